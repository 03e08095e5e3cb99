"""Data: rows from any source, prompts as token ids, the batch and its splitting.

A batch is a plain dict of equal-length lists, one entry per response (before generation: per prompt).
Token-level columns are 1-D tensors over that response. `pad` is for who needs them as one tensor. A prompt
becomes ids exactly once, and these go to the engine and to the trainer. Which rows share a forward pass is
planned here (`micro_batches`) and laid out in workers.py. Left out: streaming (rows are kept in memory).

A wrong input raises ValueError with one line: the option or file, its value, and what would be right.
"""
import contextlib
import functools
import hashlib
import json
import random
import runpy
import sys
import traceback
from pathlib import Path
from urllib.parse import parse_qsl

import torch
import yaml


# ---- rows ----

@contextlib.contextmanager
def blame(key, value):
    """What somebody's file or a library raises inside becomes one line that begins with the option and its
    value. If the file that the value names has raised it, the line says where."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [f"(line {frame.lineno})" for frame in frames if value.startswith(f"{frame.filename}:")]
        kind = [] if type(error) is ValueError else [f"{type(error).__name__}:"]
        words = [f"{key}={value}:", *kind, *str(error).split(), *places[-1:]]
        raise ValueError(" ".join(words)) from error


@functools.cache
def load_function(spec, key, default_file=""):
    """The function that `path/to/file.py:name` names, or `name` alone in the default file. `key` is the
    option that says so, for the error. The file can import those beside it."""
    path, _, name = spec.rpartition(":")
    path = path or default_file
    folder, functions = str(Path(path).resolve().parent), {}
    if Path(path).is_file():
        if folder not in sys.path:
            sys.path.append(folder)  # last: files beside it do not hide ours of the same name
        with blame(key, spec):
            functions = runpy.run_path(path)
    if not callable(functions.get(name)):
        found = f"no function {name!r} in {path!r}" if Path(path).is_file() else f"no file {path!r}"
        raise ValueError(f"{key}={spec}: there is {found}; write path/to/file.py:function")
    return functions[name]


def resolve_model(path):
    """A model's folder or hub name: `path` itself, or what `path/to/file.py:function` returns when called."""
    if ".py:" not in path:
        return path
    build = load_function(path, "model.path")
    with blame("model.path", path):
        return str(Path(build()))  # Path refuses what is none


def load_tokenizer(name, trust_remote_code):
    """The tokenizer in a model's folder, or of what `resolve_model` takes."""
    from transformers import AutoTokenizer  # not for the processes that compute rewards
    return AutoTokenizer.from_pretrained(resolve_model(name), trust_remote_code=trust_remote_code)


def json_lines(name):
    """Yields what each line of a file holds; empty ones are left out."""
    for number, line in enumerate(open(name, encoding="utf-8"), 1):
        with blame(f"line {number}", line[:60].strip()):
            if line.strip():
                yield json.loads(line)


def load_rows(spec, options, key="data.train"):
    """Yields the rows of a data spec: dicts of prompt (str or messages), answer, source, entry (as found).

    Specs: file.jsonl, file.parquet, path/file.py:function, reasoning_gym:task?option=value&... and hub names,
    whose options go to datasets.load_dataset: openai/gsm8k?name=main&split=test. `options` is the config's
    `data` section: its prompt_key, answer_key and source_key name the columns.
    """
    name, _, query = spec.partition("?")
    source, prompt_key, answer_key = Path(name).stem, options.prompt_key, options.answer_key
    make = load_function(name, key) if ".py:" in name else None
    with blame(key, spec):
        # True twice: an option without a value is not left out, but is null, or refused without a `=`.
        arguments = {option: yaml.safe_load(value) for option, value in parse_qsl(query, True, True)}
        if name.endswith((".json", ".csv", ".txt", ".py")) or query and (make or name.endswith(".jsonl")):
            raise ValueError("a file must be .jsonl, .parquet or .py:function, and only .parquet has options")
        elif make:
            entries = make()
        elif name.startswith("reasoning_gym:"):
            import reasoning_gym
            source, prompt_key = name.removeprefix("reasoning_gym:"), "question"
            entries = reasoning_gym.create_dataset(source, **arguments)
        elif name.endswith(".jsonl"):
            entries = json_lines(name)
        else:
            import datasets
            place = {"path": "parquet", "data_files": name} if name.endswith(".parquet") else {"path": name}
            entries = datasets.load_dataset(**{"split": "train", **place, **arguments})
        for number, entry in enumerate(entries):
            columns = entry if isinstance(entry, dict) else {}
            if not isinstance(columns.get(prompt_key), (str, list)) or answer_key not in columns:
                found = ", ".join(columns) or repr(entry)[:60]
                raise ValueError(f"row {number} has {found}, but not text or messages as data.prompt_key="
                                 f"{prompt_key} and something as data.answer_key={answer_key}")
            known = entry.get(options.source_key) not in (None, "")
            yield {"prompt": entry[prompt_key], "answer": entry[answer_key], "entry": entry,
                   "source": str(entry[options.source_key]) if known else source}


# ---- prompts ----

def encode(tokenizer, prompt, system=None, tools=None):
    """(the prompt as asked, its ids): the chat template, or else special tokens, applied exactly once.

    With a chat template a string becomes a user message, with `system` before it. Without one it stays text,
    and transformers raises ValueError for messages and for `system`. The template shows `tools`, JSON
    schemas, to the model; for one that does not, `system` may have "{tools}" in it.
    """
    if isinstance(prompt, str) and not system and not tokenizer.chat_template:
        has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        return prompt, tokenizer(prompt, add_special_tokens=not has_bos)["input_ids"]
    shown = (system or "").replace("{tools}", "\n".join(map(json.dumps, tools or ())))
    messages = [{"role": "system", "content": shown}] if system else []
    messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages):
        raise ValueError(f"{prompt} must be messages with role and content")  # a template may not mind
    return messages, tokenizer.apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=True, return_dict=False)


def unknown(tokenizer, text):
    """The characters for which a tokenizer has nothing, not even an id that says so: it would drop them."""
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    kept = {place for start, end in spans for place in range(start, end)}
    return [c for place, c in enumerate(text) if place not in kept and c.isprintable() and c != " "]


class Prompts:
    """The prompts of one source. `next()` gives batches in an order that follows from (seed, epoch) alone.

    The position is `cursor`, the number of batches drawn. `options` is the config's `data` section. For
    validation leave `batch_size` out and use `all()`. Prompts found in `exclude`, a Prompts, are dropped.
    `tools` are the JSON schemas of what the model may call.
    """

    def __init__(self, spec, tokenizer, options, seed=1, batch_size=1, key="data.train", exclude=None,
                 tools=None):
        self.name, self.seed, self.batch_size, self.cursor = f"{key}={spec}", seed, batch_size, 0
        self.shuffle, limit, mode = options.shuffle, options.max_prompt_length, options.overlong
        rows = list(load_rows(spec, options, key))
        for number, row in enumerate(rows):
            text = row["prompt"] if isinstance(row["prompt"], str) and tokenizer.is_fast else ""
            try:
                row["prompt"], row["prompt_ids"] = encode(tokenizer, row["prompt"], options.system, tools)
            except Exception as error:  # of templates that refuse messages, each in its own way
                raise ValueError(f"{self.name}: row {number} is no prompt here: {error}") from error
            if not row["prompt_ids"] or unknown(tokenizer, text):
                lost = unknown(tokenizer, text) or "it"
                raise ValueError(f"{self.name}: row {number}, {row['prompt']!r:.60}: no tokens for {lost}")
        long = [number for number, row in enumerate(rows) if len(row["prompt_ids"]) > limit]
        if long and mode == "error":
            raise ValueError(f"{self.name}: row {long[0]} is over data.max_prompt_length={limit} tokens")
        cut = {"left": slice(-limit, None), "right": slice(limit)}.get(mode, slice(None))
        rows = [{**row, "prompt_ids": torch.tensor(row["prompt_ids"][cut])} for row in rows]
        held = {repr(prompt) for prompt in exclude.rows["prompt"]} if exclude else set()
        kept = [row for row in rows if len(row["prompt_ids"]) <= limit and repr(row["prompt"]) not in held]
        dropped = (f"{self.name}: {len(rows) - len(kept)} of {len(rows)} dropped; {len(long)} too long "
                   f"({mode}), {sum(repr(row['prompt']) in held for row in rows)} also in data.val")
        print(dropped)
        if len(kept) < batch_size:
            raise ValueError(f"{dropped}; {len(kept)} left; data.batch_size must be at most that")
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
    """The inverse of `pad`: a list of the first lengths[i] entries of each row of (B, T). They are copies: of
    a view, pickle writes all that it is a view of, so that to send a row would be to send the whole batch."""
    return [row[:length].clone() for row, length in zip(tensor, lengths, strict=True)]


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
            said = [{"role": "assistant", "content": text}]
            if "transcript" in batch:  # several have said something
                said = [message for message in batch["transcript"][row] if message["role"] != "error"]
            ids = own.apply_chat_template([*prompt, *said], return_dict=False)
        whole[row] = torch.tensor(ids)
    token, mask, rows = torch.zeros(1, dtype=torch.int64), torch.ones(1), len(whole)
    return {"uid": list(range(rows)), "prompt_ids": whole, "response_ids": [token] * rows,
            "response_mask": [mask] * rows}


def count_tokens(batch, rows):
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

    A group (the rows of one uid) stays together. With fewer groups than parts each row goes by itself,
    and no part is empty if there are rows enough. Longest first, each to the part with least (within 4/3 of
    the best, Graham 1969).
    """
    groups = _groups(batch)
    if len(groups) < parts:
        groups = [[row] for row in range(len(batch["uid"]))]
    shares, tokens = [[] for _ in range(parts)], [0] * parts
    for group in sorted(groups, key=lambda group: -count_tokens(batch, group)):
        least = tokens.index(min(tokens))
        shares[least] += group
        tokens[least] += count_tokens(batch, group)
    return [sorted(share) for share in shares]


# Padding is at most this share of all positions, or this many: a pass of its own costs as much as some 350
# (SmolLM2 on 2 cores).
PADDING, FREE = 0.05, 320


def micro_batches(batch, budget, share_prompt=True, unit_tokens=1024):
    """Plans forward passes: a list of micro-batches, each a list of units, each a list of row indices.

    A unit is one row of the model's input: a prompt and, with `share_prompt`, as many responses of its group
    as keep it within min(budget, unit_tokens), or else one response. A micro-batch, padded to its longest
    unit, is within `budget` tokens, or is one response that alone is over it. Lengths that differ much make
    more micro-batches: padding is at most PADDING of all, or FREE tokens. Every row is in exactly one unit.
    """
    limit = min(budget, unit_tokens) if share_prompt else 0
    units = [unit for group in _groups(batch)
             for unit in _chunks(group, lambda rows: count_tokens(batch, rows) <= limit)]
    units.sort(key=lambda unit: -count_tokens(batch, unit))
    tokens = [count_tokens(batch, unit) for unit in units]

    def padding(part):
        return len(part) * tokens[part[0]] - sum(tokens[part[0] : part[-1] + 1])

    most = budget  # padding that one micro-batch may have
    while True:  # the less it is, the more micro-batches there are, and the less padding in all
        plan = _chunks(range(len(units)), lambda part: padding(part) <= most
                       and len(part) * tokens[part[0]] <= budget)
        wasted = sum(map(padding, plan))
        if wasted <= max(FREE, PADDING * (wasted + sum(tokens))):
            return [[units[number] for number in part] for part in plan]
        most *= 0.8
