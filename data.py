"""Data: rows from any source, prompts as token ids, the batch and its splitting, rewards.

A batch is a plain dict of equal-length lists, one entry per response (before generation: per prompt).
Token-level columns are 1-D tensors over that response; `pad` is for who needs them as one tensor. A prompt
becomes ids exactly once, and these go to the engine and to the trainer. Which rows share a forward pass is
planned here (`micro_batches`) and laid out in workers.py. Left out: streaming (rows are kept in memory).

A wrong input raises ValueError with one line: the option or file, its value, and what would be right.
"""
import asyncio
import ctypes
import functools
import hashlib
import json
import math
import multiprocessing
import random
import runpy
import signal
import sys
import traceback
import urllib.parse
from pathlib import Path

import pebble
import torch
import yaml


# ---- rows ----

@functools.cache
def load_function(spec, key, default_file=""):
    """The function that `path/to/file.py:name` names, or `name` alone in the default file. `key` is the
    option that says so, for the error."""
    path, _, name = spec.rpartition(":")
    path = path or default_file
    functions = runpy.run_path(path) if Path(path).is_file() else {}
    if name not in functions:
        raise ValueError(f"{key}={spec}: there is no file {path!r} or no function {name!r} in it")
    return functions[name]


def resolve_model(path):
    """A model's folder or hub name: `path` itself, or what `path/to/file.py:function` returns when called."""
    return str(load_function(path, "model.path")()) if ".py:" in path else path


def load_tokenizer(name, trust_remote_code):
    """The tokenizer in a model's folder, or of what `resolve_model` takes."""
    from transformers import AutoTokenizer  # not for the processes that compute rewards
    return AutoTokenizer.from_pretrained(resolve_model(name), trust_remote_code=trust_remote_code)


def load_rows(spec, options, key="data.train"):
    """Yields the rows of a data spec: dicts of prompt (str or messages), answer, source, entry (as found).

    Specs: file.jsonl, file.parquet, path/file.py:function, reasoning_gym:task?option=value&... and hub names,
    whose options go to datasets.load_dataset: openai/gsm8k?name=main&split=test. `options` is the config's
    `data` section: its prompt_key, answer_key and source_key name the columns.
    """
    name, _, query = str(spec).partition("?")
    arguments = {option: yaml.safe_load(value) for option, value in urllib.parse.parse_qsl(query)}
    source, prompt_key = Path(name).stem, options.prompt_key
    entries = load_function(name, key)() if ".py:" in name else None
    try:
        if name.startswith("reasoning_gym:"):
            import reasoning_gym
            source, prompt_key = name.removeprefix("reasoning_gym:"), "question"
            entries = reasoning_gym.create_dataset(source, **arguments)
        elif name.endswith(".jsonl"):
            entries = map(json.loads, open(name, encoding="utf-8"))
        elif ".py:" not in name:
            import datasets
            place = {"path": "parquet", "data_files": name} if name.endswith(".parquet") else {"path": name}
            entries = datasets.load_dataset(**{"split": "train", **place, **arguments})
        for number, entry in enumerate(entries):
            if not isinstance(entry.get(prompt_key), (str, list)) or options.answer_key not in entry:
                raise ValueError(f"row {number} has {', '.join(entry)}; see data.prompt_key, data.answer_key")
            yield {"prompt": entry[prompt_key], "answer": entry[options.answer_key],
                   "source": str(entry.get(options.source_key) or source), "entry": entry}
    except Exception as error:  # of many libraries; `doc` is the line that is not JSON
        text = f"{type(error).__name__}: {error} {getattr(error, 'doc', '')[:60]}"
        raise ValueError(f"{key}={spec}: {' '.join(text.split())}") from error


# ---- prompts ----

def encode(tokenizer, prompt, system=None):
    """(the prompt as asked, its ids): the chat template, or else special tokens, applied exactly once.

    With a chat template a string becomes a user message, with `system` before it; without one it stays text,
    and transformers raises ValueError for messages and for `system`.
    """
    if isinstance(prompt, str) and not system and not tokenizer.chat_template:
        has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        return prompt, tokenizer(prompt, add_special_tokens=not has_bos)["input_ids"]
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages):
        raise ValueError(f"{prompt} must be messages with role and content")  # a template may not mind
    return messages, tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


class Prompts:
    """The prompts of one source. `next()` gives batches in an order that follows from (seed, epoch) alone.

    The position is `cursor`, the number of batches drawn. `options` is the config's `data` section. For
    validation leave `batch_size` out and use `all()`. Prompts found in `exclude`, a Prompts, are dropped.
    """

    def __init__(self, spec, tokenizer, options, seed=1, batch_size=1, key="data.train", exclude=None):
        self.name, self.seed, self.batch_size, self.cursor = f"{key}={spec}", seed, batch_size, 0
        self.shuffle, limit, mode = options.shuffle, options.max_prompt_length, options.overlong
        rows = list(load_rows(spec, options, key))
        for number, row in enumerate(rows):
            try:
                row["prompt"], row["prompt_ids"] = encode(tokenizer, row["prompt"], options.system)
            except Exception as error:  # of templates that refuse messages, each in its own way
                raise ValueError(f"{self.name}: row {number} is no prompt here: {error}") from error
            if not row["prompt_ids"]:
                raise ValueError(f"{self.name}: row {number}, {row['prompt']!r}, has no tokens")
        long = [number for number, row in enumerate(rows) if len(row["prompt_ids"]) > limit]
        if long and mode == "error":
            raise ValueError(f"{self.name}: row {long[0]} is over data.max_prompt_length={limit} tokens")
        cut = {"left": slice(-limit, None), "right": slice(limit)}.get(mode, slice(None))
        rows = [{**row, "prompt_ids": torch.tensor(row["prompt_ids"][cut])} for row in rows]
        held = {repr(prompt) for prompt in exclude.rows["prompt"]} if exclude else set()
        kept = [row for row in rows if len(row["prompt_ids"]) <= limit and repr(row["prompt"]) not in held]
        print(f"{self.name}: {len(rows) - len(kept)} of {len(rows)} dropped; {len(long)} too long ({mode})")
        if len(kept) < batch_size:
            raise ValueError(f"{self.name}: {len(kept)} usable rows for data.batch_size={batch_size}")
        order = seed, batch_size, self.shuffle, [(row["prompt_ids"].tolist(), row["answer"]) for row in kept]
        text = json.dumps(order, default=lambda answer: type(answer).__name__)  # not repr: a set has no order
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self.rows = {name: [row[name] for row in kept] for name in kept[0]}
        self.steps_per_epoch = len(kept) // batch_size  # what is left over waits for the next epoch's order

    def next(self):
        """The next `batch_size` prompts, with the columns of `all`; moves the cursor."""
        epoch, step = divmod(self.cursor, self.steps_per_epoch)
        order = list(range(len(self.rows["answer"])))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        uid = range(self.cursor * self.batch_size, (self.cursor + 1) * self.batch_size)
        self.cursor += 1
        return {**select(self.rows, order[step * self.batch_size:][:self.batch_size]), "uid": list(uid)}

    def all(self):
        """Every prompt once, in the source's order. Columns: uid (int, counts the prompts drawn in the run),
        prompt_ids (1-D int64), prompt (text or messages), answer, source, entry (the row as it was found)."""
        return {**self.rows, "uid": list(range(len(self.rows["answer"])))}

    def state_dict(self):
        return {"cursor": self.cursor, "fingerprint": self.fingerprint}

    def load_state_dict(self, state):
        """Continues at a saved position; raises ValueError if the data or its order is not what it was."""
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(f"{self.name}: the data or its order changed; start in a new trainer.dir")
        self.cursor = state["cursor"]


# ---- the batch ----

def select(batch, indices):
    """The rows `indices` of a batch, in that order."""
    return {name: [column[index] for index in indices] for name, column in batch.items()}


def repeat(batch, n):
    """Every row n times, in blocks (a a a b b b); a new column `sample` counts 0..n-1 within a block."""
    rows = {name: [value for value in column for _ in range(n)] for name, column in batch.items()}
    return {**rows, "sample": list(range(n)) * len(batch["uid"])}


def concat(batches):
    """One batch of the rows of several, which have the same columns."""
    return {name: [value for batch in batches for value in batch[name]] for name in batches[0]}


def pad(tensors, fill=0, width=0):
    """1-D tensors of any length, filled on the right: (B, T) with T the longest, or `width` if more."""
    padded = torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True, padding_value=fill)
    return torch.nn.functional.pad(padded, (0, max(0, width - padded.shape[1])), value=fill)


def unpad(tensor, lengths):
    """The inverse of `pad`: a list of the first lengths[i] entries of each row of (B, T)."""
    return [row[:length] for row, length in zip(tensor, lengths, strict=True)]


def conversations(batch, tokenizer, own):
    """What a reward model reads, as a batch: whole conversations as `prompt_ids`, each with a response of one
    token, so that the value that would predict it, at the last token of the conversation, is the score.

    tokenizer is the actor's; own the reward model's, or None where it has the same vocabulary and template.
    """
    whole = [torch.cat(ids) for ids in zip(batch["prompt_ids"], batch["response_ids"])]
    for row, prompt in enumerate(batch["prompt"] if own else ()):
        text = tokenizer.decode(batch["response_ids"][row], skip_special_tokens=True)
        if isinstance(prompt, str):
            ids = own(prompt + text)["input_ids"]
        else:
            chat = [*prompt, {"role": "assistant", "content": text}]
            ids = own.apply_chat_template(chat, return_dict=False)
        whole[row] = torch.tensor(ids)
    token, mask, rows = torch.zeros(1, dtype=torch.int64), torch.ones(1), len(whole)
    return {"uid": list(range(rows)), "prompt_ids": whole, "response_ids": [token] * rows,
            "response_mask": [mask] * rows}


def _tokens(batch, rows):
    """Tokens of rows of one group, whose prompt is computed once."""
    responses = batch.get("response_ids") or [()] * len(batch["uid"])  # none before generation
    return len(batch["prompt_ids"][rows[0]]) + sum(len(responses[row]) for row in rows)


def _chunks(items, fits):
    """The items in lists, in order, each list as long as it fits; a single item always does."""
    chunks = []
    for item in items:
        if not (chunks and fits(chunks[-1] + [item])):
            chunks.append([])
        chunks[-1].append(item)
    return chunks


def _groups(batch):
    uid = batch["uid"]
    return _chunks(sorted(range(len(uid)), key=uid.__getitem__), lambda rows: uid[rows[0]] == uid[rows[-1]])


def split(batch, parts):
    """Row indices for each of `parts` ranks, even in tokens: a group's prompt, once, and all its responses.

    A group (the rows of one uid) stays together; with fewer groups than parts each row goes by itself,
    and no part is empty if there are rows enough. Longest first, each to the part with least (within 4/3 of
    the best; Graham 1969).
    """
    groups = _groups(batch)
    if len(groups) < parts:
        groups = [[row] for row in range(len(batch["uid"]))]
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
    limit = min(budget, unit_tokens) if share_prompt else 0
    units = [unit for group in _groups(batch)
             for unit in _chunks(group, lambda rows: _tokens(batch, rows) <= limit)]
    units.sort(key=lambda unit: -_tokens(batch, unit))
    return _chunks(units, lambda units: len(units) * _tokens(batch, units[0]) <= budget)


# ---- rewards ----

PACKAGES = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}


def reward_function(spec):
    """What `path/to/file.py:function` names, or a function's name alone in recipes/rewards.py."""
    return load_function(spec, "reward.function", str(Path(__file__).parent / "recipes/rewards.py"))


def check(data, reward):
    """Refuses what cannot work in the config's `data` and `reward` sections, before any process starts."""
    for key, spec in (("data.train", data.train), ("data.val", data.val)):
        if spec is not None:
            next(load_rows(spec, data, key), None)
    reward_function(reward.function)


def _call(spec, response, answer, row):
    """One score as a dict of floats. Any error leaves as a RuntimeError: others need not survive pickling."""
    try:
        result = reward_function(spec)(response, answer, row)
        result = asyncio.run(result) if asyncio.iscoroutine(result) else result
        result = result if isinstance(result, dict) else {"score": result}
        result["score"] = math.nan if result["score"] is None else float(result["score"])
        if math.isinf(result["score"]):
            raise ValueError("an infinite score would make the loss NaN")
        return {name: float(value) for name, value in result.items() if isinstance(value, (int, float))}
    except BaseException:
        raise RuntimeError(traceback.format_exc()) from None


def _begin(spec):
    """The start of a scoring process: it will die with the trainer, and loads the function beforehand."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    reward_function(spec)


class Rewards:
    """Scores responses in processes that can be killed: a function that hangs or crashes costs its sample.

    `options` is the config's `reward` section; `max_response_length` is in tokens.
    """

    def __init__(self, options, tokenizer, max_response_length, workers=2):
        self.options, self.tokenizer, self.max_response_length = options, tokenizer, max_response_length
        self.shown = False  # has a failed score been shown?
        # a trainer with threads must not be forked
        multiprocessing.set_forkserver_preload(["data", PACKAGES.get(options.function, "data")])
        self.pool = pebble.ProcessPool(workers, context=multiprocessing.get_context("forkserver"),
                                       initializer=_begin, initargs=(options.function,))

    def close(self):
        self.pool.stop()
        self.pool.join()

    def __call__(self, batch, training=True):
        """Scores every response: returns (batch with new columns, metrics), raises RuntimeError if all fail.

        New columns: response (text), scores (float; NaN where the function gave None or NaN),
        token_level_scores (1-D: the score on the last token the model wrote, else 0). The function's other
        numbers become metrics reward/<key>.
        The batch's model_scores (floats), if it has them, are added to the scores. In training, scores
        include the penalty for nearing max_response_length (DAPO, arXiv 2503.14476, eq. 13), and with
        mask_truncated a cut response has a response_mask of 0.
        """
        options, masks, limit = self.options, batch["response_mask"], self.max_response_length
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in batch["response_ids"]]
        tasks = [(options.function, *task) for task in zip(texts, batch["answer"], batch["entry"])]
        futures = [self.pool.schedule(_call, task, timeout=options.timeout) for task in tasks]
        errors = [future.exception() for future in futures if future.exception()]  # waits
        timeouts = sum(isinstance(error, TimeoutError) for error in errors)
        if errors:
            text = f"{options.function}: {len(errors)} of {len(tasks)} scores failed: {errors[0]}"
            if len(errors) == len(tasks):
                raise RuntimeError(text)
            if not self.shown:
                print(text, file=sys.stderr)
            self.shown = True
        results = [{} if future.exception() else future.result() for future in futures]
        scores = torch.tensor([r.get("score", options.fallback) for r in results], dtype=torch.float64)
        scores += torch.tensor(batch.get("model_scores", 0.0))
        lengths = torch.tensor([mask.sum() for mask in masks]).double()
        metrics = {"reward/errors": len(errors) - timeouts, "reward/timeouts": timeouts,
                   "reward/mean": scores.nanmean(), "reward/std": scores[~scores.isnan()].std(correction=0),
                   "response/length_mean": lengths.mean(), "response/length_max": lengths.max(),
                   "response/truncated": batch["finish_reason"].count("length") / len(masks)}
        if training and options.overlong_buffer:
            scores -= options.overlong_penalty * (1 - (limit - lengths) / options.overlong_buffer).clamp(0, 1)
        batch = {**batch, "response": texts, "scores": scores.tolist()}
        batch["token_level_scores"] = [torch.zeros(len(mask)).index_fill(0, mask.nonzero()[-1:, 0], score)
                                       for mask, score in zip(masks, batch["scores"])]
        for name in sorted({name for result in results for name in result} - {"score"}):
            mean = torch.tensor([result.get(name, math.nan) for result in results]).nanmean()
            metrics.setdefault(f"reward/{name}", mean)  # ours have the right to their names
        if training and options.mask_truncated:
            batch["response_mask"] = [m * (end != "length") for m, end in zip(masks, batch["finish_reason"])]
        return batch, {name: float(value) for name, value in metrics.items()}
