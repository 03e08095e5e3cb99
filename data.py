"""Data: rows from any source, prompts as token ids, the batch and its splitting, rewards.

A batch is a plain dict of equal-length lists, one entry per response (before generation: per prompt).
Token-level columns are 1-D tensors over that response; nothing is padded here. A prompt becomes ids exactly
once, and these go to the engine and to the trainer. Left out: streaming (rows are kept in memory), packing.

A wrong input raises ValueError with one line: the option or file, its value, and what would be right.
"""
import asyncio
import faulthandler
import functools
import hashlib
import importlib.util
import json
import logging
import math
import multiprocessing
import random
import re
import sys
import traceback
import urllib.parse
from pathlib import Path

import pebble
import torch
import yaml

log = logging.getLogger("data")
OVERLONG = {"filter": "dropped", "left": "cut on the left", "right": "cut on the right", "error": "refused"}


# ---- rows ----

@functools.cache
def load_function(spec, key):
    """The function that `path/to/file.py:name` names. `key` is the option that says so, for the error."""
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

    Specs: file.jsonl, file.parquet, path/file.py:function, reasoning_gym:task?option=value&... and hub names,
    whose options go to datasets.load_dataset: openai/gsm8k?name=main&split=test.
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
    """The rows of a data spec: dicts of prompt (str or messages), answer, source, entry (the row as found).

    `options` is the config's `data` section: its prompt_key, answer_key and source_key name the columns.
    """
    name, read = open_source(spec, key)
    try:
        entries = list(read())
    except Exception as error:  # of many libraries; `doc` is the line that is not JSON
        text = f"{type(error).__name__}: {error} {getattr(error, 'doc', '')[:60]}"
        raise ValueError(f"{key}={spec}: {' '.join(text.split())}") from error
    prompt_key = "question" if str(spec).startswith("reasoning_gym:") else options.prompt_key
    rows = []
    for number, entry in enumerate(entries):
        if not isinstance(entry.get(prompt_key), (str, list)) or options.answer_key not in entry:
            raise ValueError(f"{key}={spec}: row {number} needs data.prompt_key={prompt_key} (text or chat) "
                             f"and data.answer_key={options.answer_key}; it has {', '.join(entry)}")
        rows.append({"prompt": entry[prompt_key], "answer": entry[options.answer_key],
                     "source": entry.get(options.source_key, name), "entry": entry})
    return rows


# ---- prompts ----

def encode(tokenizer, prompt, system=None):
    """(the prompt as asked, its ids): the chat template, or else special tokens, applied exactly once.

    With a chat template a string becomes a user message, with `system` before it; without one it stays text.
    """
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if system:
            messages.insert(0, {"role": "system", "content": system})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return messages, ids
    if system or not isinstance(prompt, str):
        raise ValueError("data.system and chat messages need a tokenizer with a chat template")
    has_bos = bool(tokenizer.bos_token) and prompt.startswith(tokenizer.bos_token)
    return prompt, tokenizer(prompt, add_special_tokens=not has_bos)["input_ids"]


class Prompts:
    """The prompts of one source. `next()` gives batches in an order that follows from (seed, epoch) alone.

    The position is `cursor`, the number of batches drawn. `options` is the config's `data` section. For
    validation leave `batch_size` out and use `all()`. Prompts found in `exclude`, a Prompts, are dropped.
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
            raise ValueError(f"{self.name}: {len(rows)} usable rows for data.batch_size={batch_size}")
        order = (seed, batch_size, self.shuffle, [(row["prompt_ids"], row["answer"]) for row in rows])
        self.fingerprint = hashlib.sha256(repr(order).encode()).hexdigest()
        self.rows = {name: [row[name] for row in rows] for name in rows[0]}
        self.rows["prompt_ids"] = [torch.tensor(ids) for ids in self.rows["prompt_ids"]]
        self.steps_per_epoch = len(rows) // batch_size  # what is left over waits for the next epoch's order

    def _fit(self, rows, limit, overlong):
        long = [number for number, row in enumerate(rows) if len(row["prompt_ids"]) > limit]
        if long:
            text = f"{self.name}: {len(long)} of {len(rows)} {OVERLONG[overlong]}, over {limit} tokens"
            if overlong == "error":
                raise ValueError(f"{text} (data.max_prompt_length); the first is row {long[0]}")
            log.warning(text)
        cut = {"left": slice(-limit, None), "right": slice(limit)}.get(overlong, slice(None))
        rows = [{**row, "prompt_ids": row["prompt_ids"][cut]} for row in rows]
        return [row for row in rows if len(row["prompt_ids"]) <= limit]

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
            raise ValueError(f"{self.name}: rows, tokens, seed, data.batch_size or data.shuffle changed since"
                             " the checkpoint; put them back or start in a new trainer.dir")
        self.cursor = state["cursor"]


# ---- the batch ----

def select(batch, indices):
    """The rows `indices` of a batch, in that order."""
    return {name: [column[index] for index in indices] for name, column in batch.items()}


def repeat(batch, n):
    """Every row n times, in blocks (a a a b b b); a new column `sample` counts 0..n-1 within a block."""
    count = len(batch["uid"])
    batch = select(batch, [row for row in range(count) for _ in range(n)])
    return {**batch, "sample": list(range(n)) * count}


def concat(batches):
    """One batch of the rows of several, which have the same columns."""
    return {name: [value for batch in batches for value in batch[name]] for name in batches[0]}


def pad(tensors, fill=0):
    """1-D tensors of any length, filled on the right: (B, T) with T the longest."""
    return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True, padding_value=fill)


def unpad(tensor, lengths):
    """The inverse of `pad`: a list of the first lengths[i] entries of each row of (B, T)."""
    return [row[:length] for row, length in zip(tensor, lengths, strict=True)]


def _tokens(batch, rows):
    """Tokens of rows of one group, whose prompt is computed once."""
    responses = batch.get("response_ids") or [()] * len(batch["uid"])  # none before generation
    return len(batch["prompt_ids"][rows[0]]) + sum(len(responses[row]) for row in rows)


def _groups(batch):
    groups = {}
    for row, uid in enumerate(batch["uid"]):
        groups.setdefault(uid, []).append(row)
    return list(groups.values())


def split(batch, parts):
    """Row indices for each of `parts` ranks, even in tokens: a group's prompt, once, and all its responses.

    A group (the rows of one uid) stays together unless there are fewer groups than parts; no part is empty if
    there are rows enough. Longest first, each to the part with least (within 4/3 of the best; Graham 1969).
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

    A unit is one row of the model's input: a prompt and, with `share_prompt`, as many responses of its group
    as keep it within min(budget, unit_tokens); else one response. A micro-batch, padded to its longest unit,
    is within `budget` tokens, or is one response that alone is over it. Every row is in exactly one unit.
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
    """The first number after the last `####`, or else the last one; None without any. 1,234 is one number."""
    _, mark, rest = text.rpartition("####")
    numbers = re.findall(r"((?:(?<!\w)-)?)\$?(\d{1,3}(?:,\d{3})+(?!\d)|\d+)(\.\d+)?", rest)
    return float("".join(numbers[0 if mark else -1]).replace(",", "")) if numbers else None


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
    """reasoning-gym's own score of <answer>...</answer>, or of the whole response where there is no tag."""
    import reasoning_gym
    found = reasoning_gym.utils.extract_answer(response)
    score_answer = reasoning_gym.get_score_answer_fn(row["metadata"]["source_dataset"])
    return score_answer(response.strip() if found is None else found, row)


REWARDS = {"exact": exact, "number": number, "math": math_equal, "reasoning_gym": gym_score}
PACKAGES = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}


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

def _call(spec, timeout, response, answer, row):
    """One score as a dict of floats; whatever goes wrong, BaseException included, as {"error": traceback}."""
    faulthandler.dump_traceback_later(2 * timeout, exit=True)  # if no trainer is left to end it
    try:
        result = reward_function(spec)(response, answer, row)
        if asyncio.iscoroutine(result):
            result = asyncio.run(result)
        result = result if isinstance(result, dict) else {"score": result}
        numbers = {name: float(value) for name, value in result.items() if isinstance(value, (int, float))}
        return {**numbers, "score": math.nan if result["score"] is None else float(result["score"])}
    except BaseException:
        return {"error": traceback.format_exc()}
    finally:
        faulthandler.cancel_dump_traceback_later()


class Rewards:
    """Scores responses in processes that can be killed: a function that hangs or crashes costs its sample.

    `options` is the config's `reward` section; `max_response_length` is in tokens.
    """

    def __init__(self, options, tokenizer, max_response_length, workers=2):
        self.options, self.tokenizer, self.max_response_length = options, tokenizer, max_response_length
        self.shown = False
        processes = multiprocessing.get_context("forkserver")  # a trainer with threads must not be forked
        processes.set_forkserver_preload(["data", PACKAGES.get(options.function, "data")])
        self.pool = pebble.ProcessPool(workers, context=processes, initializer=reward_function,
                                       initargs=(options.function,))  # loads a file outside any score's time

    def close(self):
        self.pool.stop()
        self.pool.join()

    def _results(self, tasks):
        """What `_call` returns for each of tasks (response, answer, row); failures as metrics."""
        timeout = self.options.timeout  # seconds
        calls = [(self.options.function, timeout, *task) for task in tasks]
        futures = [self.pool.schedule(_call, call, timeout=timeout) for call in calls]
        failures = [future.exception() for future in futures]  # waits; there is one if a process ended
        results = [{"error": repr(failure)} if failure else future.result()
                   for failure, future in zip(failures, futures)]
        errors = [result["error"] for result in results if "error" in result]
        timeouts = sum(isinstance(failure, TimeoutError) for failure in failures)
        if errors:
            text = (f"reward.function={self.options.function}: {len(errors)} of {len(results)} scores failed "
                    f"({timeouts} out of time); the first: {errors[0]}")
            if len(errors) == len(results):
                raise RuntimeError(text)
            if not self.shown:
                log.warning(text)
            self.shown = True
        return results, {"reward/errors": len(errors) - timeouts, "reward/timeouts": timeouts}

    def __call__(self, batch, training=True):
        """Scores every response: returns (batch with new columns, metrics), raises RuntimeError if all fail.

        New columns: response (text), scores (float; NaN where the function gave None or NaN), reward/<key>
        for its other numbers, token_level_scores (1-D: the score on the last token the model wrote, else 0).
        In training, scores include the penalty for nearing max_response_length (DAPO, arXiv 2503.14476,
        eq. 13), and with mask_truncated a cut response has a response_mask of 0.
        """
        options, masks = self.options, batch["response_mask"]
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in batch["response_ids"]]
        results, metrics = self._results(zip(texts, batch["answer"], batch["entry"]))
        scores = torch.tensor([r.get("score", options.fallback) for r in results], dtype=torch.float64)
        lengths = torch.tensor([mask.sum() for mask in masks]).double()
        truncated = torch.tensor([reason == "length" for reason in batch["finish_reason"]])
        metrics |= {"reward/mean": scores.nanmean(), "reward/std": scores[~scores.isnan()].std(correction=0),
                    "response/length_mean": lengths.mean(), "response/length_max": lengths.max(),
                    "response/truncated": truncated.double().mean()}
        batch = {**batch, "response": texts}
        for name in sorted({name for result in results for name in result} - {"score", "error"}):
            batch[f"reward/{name}"] = [result.get(name, math.nan) for result in results]
            metrics[f"reward/{name}"] = torch.tensor(batch[f"reward/{name}"]).nanmean()
        if training and options.overlong_buffer:
            over = lengths - (self.max_response_length - options.overlong_buffer)
            scores -= options.overlong_penalty * (over / options.overlong_buffer).clamp(0, 1)
        batch["scores"] = scores.tolist()
        batch["token_level_scores"] = [_on_last(score, mask) for score, mask in zip(scores, masks)]
        if training and options.mask_truncated:
            batch["response_mask"] = [mask * ~cut for mask, cut in zip(masks, truncated)]
        return batch, {name: float(value) for name, value in metrics.items()}


def _on_last(score, mask):
    """(T,) zeros with the score at the last 1 of the mask (T,)."""
    scores = torch.zeros(len(mask))
    scores[mask.nonzero()[-1:]] = float(score)
    return scores
