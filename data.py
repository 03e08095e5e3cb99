"""Data: rows from any source, prompts as token ids, the batch and its splitting, rewards.

A batch is a plain dict of equal-length lists, one entry per response (per prompt, before generation). Token-level
columns are 1-D tensors over that response; nothing is padded here. A prompt becomes ids exactly once, and the
same ids go to the engine and to the trainer. Left out: streaming (rows are kept in memory) and packing (workers).

A wrong input raises ValueError with one line that names the option or file, its value, and what would be right.
"""
import asyncio
import concurrent.futures
import functools
import hashlib
import importlib.util
import inspect
import json
import logging
import math
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import traceback
import urllib.parse
from pathlib import Path

import pebble
import torch
import yaml

log = logging.getLogger("data")


# ---- rows ----

@functools.cache
def load_function(spec, key):
    """The function that `path/to/file.py:name` names; `key` is the option that says so, for the error's line."""
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"{key}={spec}: there is no file {path!r}")
    module_spec = importlib.util.spec_from_file_location(path, path)
    module = sys.modules[path] = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"{key}={spec}: {path} has no function {name!r}")
    return getattr(module, name)


def resolve_model(path):
    """A model's folder or hub name: `path` itself, or what `path/to/file.py:function` returns when called."""
    return str(load_function(path, "model.path")()) if ".py:" in path else path


def open_source(spec, key="data.train"):
    """Checks a data spec without reading it: returns (short name, function that gives the rows as dicts).

    Specs: file.jsonl, file.parquet, path/file.py:function, reasoning_gym:task?option=value&..., and hub names, with
    arguments of datasets.load_dataset as options: openai/gsm8k?name=main&split=test.
    """
    name, _, query = str(spec).partition("?")
    options = {option: yaml.safe_load(value) for option, value in urllib.parse.parse_qsl(query)}
    path = Path(name)
    if ".py:" in name:
        return Path(name.rpartition(":")[0]).stem, load_function(name, key)
    if name.startswith("reasoning_gym:"):
        import reasoning_gym
        task = name.removeprefix("reasoning_gym:")
        try:
            dataset = reasoning_gym.create_dataset(task, **options)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"{key}={spec}: {error}; see reasoning-gym's gallery of tasks") from error
        return task, lambda: dataset
    if path.suffix == ".jsonl" and path.is_file():
        return path.stem, lambda: map(json.loads, path.open(encoding="utf-8"))
    import datasets
    if path.suffix == ".parquet" and path.is_file():
        return path.stem, lambda: datasets.load_dataset("parquet", data_files=name, split="train")
    if path.suffix in (".jsonl", ".parquet") or path.exists():
        raise ValueError(f"{key}={spec}: must be an existing file that ends in .jsonl or .parquet")
    return path.name, lambda: datasets.load_dataset(name, **{"split": "train", **options})


def load_rows(spec, options, key="data.train"):
    """The rows of a data spec: dicts with prompt (str or messages), answer, source, entry (the row as it was found).

    `options` is the config's `data` section; its prompt_key, answer_key and source_key name the columns.
    """
    name, read = open_source(spec, key)
    try:
        entries = list(read())
    except Exception as error:  # no such hub name, no network, not parquet, and `doc` is the line that is not JSON
        text = f"{type(error).__name__}: {error} {getattr(error, 'doc', '')[:60]}"
        raise ValueError(f"{key}={spec}: {' '.join(text.split())}") from error
    prompt_key = "question" if str(spec).startswith("reasoning_gym:") else options.prompt_key
    rows = []
    for number, entry in enumerate(entries):
        if not isinstance(entry.get(prompt_key), (str, list)) or options.answer_key not in entry:
            raise ValueError(f"{key}={spec}: row {number} must have data.prompt_key={prompt_key} (text or messages) "
                             f"and data.answer_key={options.answer_key}; it has {', '.join(entry)}")
        rows.append({"prompt": entry[prompt_key], "answer": entry[options.answer_key],
                     "source": entry.get(options.source_key, name), "entry": entry})
    return rows


# ---- prompts ----

def encode(tokenizer, prompt, system=None):
    """(prompt as the model sees it, its ids): the chat template, or else special tokens, applied exactly once.

    With a chat template a string becomes a user message, with `system` before it; without one it stays text.
    """
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if system:
            messages.insert(0, {"role": "system", "content": system})
        return messages, tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    if system or not isinstance(prompt, str):
        raise ValueError("data.system and chat messages need a tokenizer with a chat template")
    has_bos = bool(tokenizer.bos_token) and prompt.startswith(tokenizer.bos_token)
    return prompt, tokenizer(prompt, add_special_tokens=not has_bos)["input_ids"]


class Prompts:
    """The prompts of one source. `next()` gives batches in an order that follows from (seed, epoch) alone.

    The position is `cursor`, the number of batches drawn. `options` is the config's `data` section. Validation
    leaves `batch_size` out and uses `all()`. Prompts that are also in `exclude` (another Prompts) are dropped.
    """

    def __init__(self, spec, tokenizer, options, seed=1, batch_size=1, key="data.train", exclude=None):
        self.name, self.seed, self.batch_size, self.cursor = f"{key}={spec}", seed, batch_size, 0
        self.shuffle = options.shuffle
        rows = load_rows(spec, options, key)
        for row in rows:
            row["prompt"], row["prompt_ids"] = encode(tokenizer, row["prompt"], options.system)
        rows = self._fit(rows, options.max_prompt_length, options.overlong)
        if exclude:
            held_out = {tuple(ids.tolist()) for ids in exclude.rows["prompt_ids"]}
            kept = [row for row in rows if tuple(row["prompt_ids"]) not in held_out]
            log.warning("%s: %d of %d dropped, held out", self.name, len(rows) - len(kept), len(rows))
            rows = kept
        if len(rows) < batch_size:
            raise ValueError(f"{self.name}: {len(rows)} usable rows, too few for data.batch_size={batch_size}; "
                             "see data.max_prompt_length and data.overlong")
        order = (seed, batch_size, self.shuffle, [(row["prompt_ids"], row["answer"]) for row in rows])
        self.fingerprint = hashlib.sha256(repr(order).encode()).hexdigest()
        self.rows = {name: [row[name] for row in rows] for name in rows[0]}
        self.rows["prompt_ids"] = [torch.tensor(ids) for ids in self.rows["prompt_ids"]]
        self.steps_per_epoch = len(rows) // batch_size  # what is left over waits for the next epoch's order

    def _fit(self, rows, limit, overlong):
        long = [number for number, row in enumerate(rows) if len(row["prompt_ids"]) > limit]
        if not long:
            return rows
        count = f"{self.name}: {len(long)} of {len(rows)}"
        if overlong == "error":
            raise ValueError(f"{count} are over data.max_prompt_length={limit}; the first is row {long[0]}")
        if overlong == "filter":
            log.warning("%s dropped, over data.max_prompt_length=%d", count, limit)
            return [row for row in rows if len(row["prompt_ids"]) <= limit]
        log.warning("%s cut to their %smost %d tokens", count, overlong, limit)
        cut = slice(-limit, None) if overlong == "left" else slice(limit)
        return [{**row, "prompt_ids": row["prompt_ids"][cut]} for row in rows]

    def next(self):
        """The next `batch_size` prompts, with the columns of `all`; moves the cursor."""
        epoch, step = divmod(self.cursor, self.steps_per_epoch)
        order = list(range(len(self.rows["answer"])))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        batch = select(self.rows, order[step * self.batch_size:][:self.batch_size])
        first = self.cursor * self.batch_size
        self.cursor += 1
        return {**batch, "uid": list(range(first, first + self.batch_size))}

    def all(self):
        """Every prompt once, in the source's order. Columns: uid (int, counts the prompts drawn in the run),
        prompt_ids (1-D int64), prompt (text or messages), answer, source, entry (the row as it was found)."""
        return {**self.rows, "uid": list(range(len(self.rows["answer"])))}

    def state_dict(self):
        return {"cursor": self.cursor, "fingerprint": self.fingerprint}

    def load_state_dict(self, state):
        """Continues at a saved position; raises ValueError if the data or its order is not what it was."""
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(f"{self.name}: rows, tokens, seed, data.batch_size or data.shuffle are not those of "
                             "the checkpoint; put them back or start in a new trainer.dir")
        self.cursor = state["cursor"]


# ---- the batch ----

def select(batch, indices):
    """The rows `indices` of a batch, in that order."""
    return {name: [column[index] for index in indices] for name, column in batch.items()}


def repeat(batch, n):
    """Every row n times, in blocks (a a a b b b), with a column `sample` that counts 0..n-1 within a block."""
    count = len(batch["uid"])
    return {**select(batch, [row for row in range(count) for _ in range(n)]), "sample": list(range(n)) * count}


def concat(batches):
    """One batch of the rows of several, which have the same columns."""
    return {name: [value for batch in batches for value in batch[name]] for name in batches[0]}


def pad(tensors, fill=0):
    """1-D tensors of any length, filled on the right: (B, T) with T the longest."""
    return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True, padding_value=fill)


def unpad(tensor, lengths):
    """The inverse of `pad`: the first lengths[i] entries of each row of (B, T), as a list. Lengths alone decide."""
    return [row[:length] for row, length in zip(tensor, lengths, strict=True)]


def _tokens(batch, rows):
    """Tokens of rows of one group, whose prompt is computed once."""
    return len(batch["prompt_ids"][rows[0]]) + sum(len(batch["response_ids"][row]) for row in rows)


def _groups(batch):
    groups = {}
    for row, uid in enumerate(batch["uid"]):
        groups.setdefault(uid, []).append(row)
    return list(groups.values())


def split(batch, parts):
    """Row indices for each of `parts` ranks, even in tokens: a group's prompt counts once, and all its responses.

    A group (the rows of one uid) stays together unless there are fewer groups than parts. No part is empty if there
    are rows enough. Longest first, each to the part that has least (LPT; Graham 1969: within 4/3 of the best).
    """
    groups = _groups(batch)
    while len(groups) < min(parts, len(batch["uid"])):
        groups.sort(key=len)
        largest = groups.pop()
        groups += [largest[:len(largest) // 2], largest[len(largest) // 2:]]
    shares, tokens = [[] for _ in range(parts)], [0] * parts
    for group in sorted(groups, key=lambda group: -_tokens(batch, group)):
        least = tokens.index(min(tokens))
        shares[least] += group
        tokens[least] += _tokens(batch, group)
    return [sorted(share) for share in shares]


def micro_batches(batch, budget, share_prompt=True, unit_tokens=1024):
    """Plans forward passes: a list of micro-batches, each a list of units, each a list of row indices.

    A unit is one row of the model's input: a prompt and, with `share_prompt`, as many responses of its group as keep
    it within min(budget, unit_tokens); else one response. A micro-batch, padded to its longest unit, is within
    `budget` tokens, unless it is one response that alone is over it. Every row is in exactly one unit.
    """
    units = []
    for group in _groups(batch):
        units.append([group[0]])
        for row in group[1:]:
            if share_prompt and _tokens(batch, units[-1] + [row]) <= min(budget, unit_tokens):
                units[-1].append(row)
            else:
                units.append([row])
    plan = []
    for unit in sorted(units, key=lambda unit: -_tokens(batch, unit)):
        if plan and (len(plan[-1]) + 1) * _tokens(batch, plan[-1][0]) <= budget:
            plan[-1].append(unit)
        else:
            plan.append([unit])
    return plan


# ---- reward functions: fn(response: str, answer, row: dict) -> float, None, or a dict with "score" ----

def exact(response, answer, row):
    """1 if the response is the answer, but for white space around it."""
    return float(response.strip() == str(answer).strip())


def last_number(text):
    """The number after the last `####`, or else the last one of the text; None without any. 1,234 is one number."""
    if "####" in text:
        text = text.rpartition("####")[2].split(maxsplit=1)[0]
    numbers = re.findall(r"((?:(?<!\w)-)?)\$?(\d{1,3}(?:,\d{3})+(?!\d)|\d+)(\.\d+)?", text)
    return float("".join(numbers[-1]).replace(",", "")) if numbers else None


def number(response, answer, row):
    """1 if the last number of the response is the answer's."""
    found = last_number(response)
    return float(found is not None and math.isclose(found, last_number(str(answer))))


def math_equal(response, answer, row):
    """1 if math-verify finds the two equal. Its own timeouts need the main thread; ours is enough."""
    from math_verify import parse, verify
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there are no timeouts
    truth = parse(f"${answer}$", parsing_timeout=None) or parse(str(answer), parsing_timeout=None)
    return float(verify(truth, parse(response, parsing_timeout=None), timeout_seconds=None))


def gym_score(response, answer, row):
    """reasoning-gym's own score of <answer>...</answer>, or of the whole response where there is no such tag."""
    import reasoning_gym
    found = reasoning_gym.utils.extract_answer(response)
    score_answer = reasoning_gym.get_score_answer_fn(row["metadata"]["source_dataset"])
    return score_answer(response.strip() if found is None else found, row)


REWARDS = {"exact": exact, "number": number, "math": math_equal, "reasoning_gym": gym_score}


def reward_function(spec):
    """A function of REWARDS, or the one that `path/to/file.py:function` names."""
    if ".py:" not in spec and spec not in REWARDS:
        raise ValueError(f"reward.function={spec}: must be {', '.join(REWARDS)} or path/to/file.py:function")
    return REWARDS[spec] if spec in REWARDS else load_function(spec, "reward.function")


def check(data, reward):
    """Refuses what cannot work in the config's `data` and `reward` sections, before any process starts."""
    open_source(data.train, "data.train")
    if data.val is not None:
        open_source(data.val, "data.val")
    reward_function(reward.function)


# ---- rewards ----

def _call(spec, response, answer, row):
    """One score as a dict of floats; whatever goes wrong, BaseException included, as {"error": traceback}."""
    try:
        result = reward_function(spec)(response, answer, row)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        result = result if isinstance(result, dict) else {"score": result}
        numbers = {name: float(value) for name, value in result.items() if isinstance(value, (bool, int, float))}
        return {"score": math.nan, **numbers} if result["score"] is None else {**numbers, "score": float(result["score"])}
    except BaseException:
        return {"error": traceback.format_exc()}


def _outcome(future):
    try:
        return future.result()
    except concurrent.futures.TimeoutError:
        return {"timeout": "it ran out of time"}
    except Exception as error:  # the process ended: killed, out of memory, os._exit
        return {"error": f"the scoring process ended: {error!r}"}


def serve(spec, timeout, workers):
    """The life of the scoring server: pickled lists of tasks on stdin, lists of `_call`'s results on stdout.

    It is a process of its own because its pool must fork from one that has no engine, no threads and few imports,
    and because a pool inside the trainer would import the trainer again in every worker.
    """
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a reward function prints must not come between results
    reward_function(spec)  # a file is loaded once, here; and so is a package, by a first call of no consequence
    if spec in REWARDS:
        _call(spec, "0", "0", {})
    pool = pebble.ProcessPool(workers, context=multiprocessing.get_context("fork"))
    while True:
        try:
            tasks = pickle.load(sys.stdin.buffer)
        except EOFError:  # the trainer is gone
            os._exit(0)
        futures = [pool.schedule(_call, (spec, *task), timeout=timeout) for task in tasks]
        pickle.dump([_outcome(future) for future in futures], results)
        results.flush()


class Rewards:
    """Scores responses in processes that can be killed: a function that hangs or crashes costs its sample only.

    `options` is the config's `reward` section; `max_response_length` is in tokens.
    """

    def __init__(self, options, tokenizer, max_response_length, workers=2):
        self.options, self.tokenizer, self.max_response_length = options, tokenizer, max_response_length
        command = [sys.executable, os.path.abspath(__file__), options.function, str(options.timeout), str(workers)]
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self.shown = False

    def close(self):
        os.killpg(self.server.pid, signal.SIGKILL)  # with its pool and all that the functions started
        self.server.wait()

    def __call__(self, batch, training=True):
        """Scores every response. Returns (the batch with new columns, metrics).

        New columns: response (text), scores (float, NaN where the function gave None or NaN), reward/<key> for other
        numbers of the function, token_level_scores (1-D float32: the score on the last token the model wrote, else 0).
        Training scores include the penalty for nearing max_response_length (DAPO, https://arxiv.org/abs/2503.14476,
        eq. 13); with mask_truncated a cut response gets a response_mask of 0. Raises RuntimeError if all fail.
        """
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in batch["response_ids"]]
        pickle.dump(list(zip(texts, batch["answer"], batch["entry"])), self.server.stdin)
        self.server.stdin.flush()
        results = pickle.load(self.server.stdout)
        timeouts = sum("timeout" in result for result in results)
        errors = sum("error" in result for result in results)
        self._report(results, errors, timeouts)
        scores = torch.tensor([result.get("score", self.options.fallback) for result in results])
        lengths = torch.tensor([mask.sum() for mask in batch["response_mask"]]).float()
        truncated = [reason == "length" for reason in batch["finish_reason"]]
        metrics = {"reward/mean": scores.nanmean(), "reward/std": scores[~scores.isnan()].std(correction=0),
                   "reward/errors": errors, "reward/timeouts": timeouts, "response/length_mean": lengths.mean(),
                   "response/length_max": lengths.max(), "response/truncated": sum(truncated) / len(truncated)}
        batch = {**batch, "response": texts}
        for name in sorted({name for result in results for name in result} - {"score", "error", "timeout"}):
            batch[f"reward/{name}"] = [result.get(name, math.nan) for result in results]
            metrics[f"reward/{name}"] = torch.tensor(batch[f"reward/{name}"]).nanmean()
        if training and self.options.overlong_buffer:
            over = lengths - (self.max_response_length - self.options.overlong_buffer)
            scores -= self.options.overlong_penalty * (over / self.options.overlong_buffer).clamp(0, 1)
        batch["scores"] = scores.tolist()
        batch["token_level_scores"] = [_on_last(score, mask) for score, mask in zip(scores, batch["response_mask"])]
        if training and self.options.mask_truncated:
            batch["response_mask"] = [mask * (not cut) for mask, cut in zip(batch["response_mask"], truncated)]
        return batch, {name: float(value) for name, value in metrics.items()}

    def _report(self, results, errors, timeouts):
        failures = [result for result in results if "score" not in result]
        text = f"reward.function={self.options.function}: {errors} of {len(results)} failed, {timeouts} timed out"
        if failures and len(failures) == len(results):
            raise RuntimeError(f"{text}; the first: {''.join(failures[0].values())}")
        if failures and not self.shown:
            self.shown = True
            log.warning("%s; the first: %s", text, "".join(failures[0].values()))


def _on_last(score, mask):
    """(T,) zeros with the score at the last 1 of the mask (T,)."""
    scores = torch.zeros(len(mask))
    scores[mask.nonzero()[-1:]] = score
    return scores


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
