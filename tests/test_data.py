"""Data: what KNOWN_FAULTS.md lists under B, C, F and I, with its numbers, and properties of the splitting."""
import contextlib
import itertools
import json
import pickle
import math
import multiprocessing
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import tokenizers
import torch
import transformers

import data
import scoring
from config import check_data
from recipes import rewards as functions

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


def make_tokenizer(template=None):
    """Words by white space: w10 is id 10. Its post-processor puts <bos> (id 1) before every text."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "user": 3, "system": 4, "?": 5}
    vocabulary |= {f"w{number}": number for number in range(6, 60)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.post_processor = tokenizers.processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        chat_template=template)


def data_options(**changes):
    options = dict(prompt_key="prompt", answer_key="answer", source_key="source", system=None,
                   max_prompt_length=16, overlong="filter", shuffle=True)
    return SimpleNamespace(**options | changes)


def reward_options(**changes):
    options = dict(function="exact", timeout=10.0, fallback=0.0, overlong_buffer=0, overlong_penalty=1.0,
                   mask_truncated=False)
    return SimpleNamespace(**options | changes)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of_lengths(lengths):
    """Rows whose prompt has that many ids, BOS included."""
    return [{"prompt": " ".join(["w9"] * (length - 1)), "answer": str(length)} for length in lengths]


def responses(texts, answers=None, lengths=None, reasons=None):
    """A scored batch's columns before scoring; `Echo` decodes the row number back into its text."""
    count = len(texts)
    lengths = lengths or [2] * count
    return {"uid": list(range(count)), "answer": answers or [""] * count, "entry": [{}] * count,
            "response_ids": [torch.full((length,), row) for row, length in enumerate(lengths)],
            "response_mask": [torch.ones(length, dtype=torch.int64) for length in lengths],
            "finish_reason": reasons or ["stop"] * count}


class Echo:
    """A tokenizer whose text for a response full of id i is texts[i]."""
    def __init__(self, texts):
        self.texts = texts

    def decode(self, ids, skip_special_tokens):
        return self.texts[int(ids[0])] if len(ids) else ""


@pytest.fixture
def score(tmp_path):
    """score(texts, source code or name of a function, ...) -> (batch, metrics); ends its processes later."""
    opened = []

    def run(texts, function, answers=None, lengths=None, reasons=None, training=True, limit=8, **options):
        if "def " in function:
            file = tmp_path / f"reward{len(opened)}.py"
            file.write_text(function)
            function = f"{file}:score"
        rewards = scoring.Rewards(reward_options(function=function, **options), Echo(texts), limit, workers=2)
        opened.append(rewards)
        return rewards(responses(texts, answers, lengths, reasons), training)

    run.opened = opened
    yield run
    for rewards in opened:
        rewards.close()


# ---- rows ----

def test_sources(tmp_path):
    import pyarrow
    import pyarrow.parquet
    rows = [{"prompt": "w9", "answer": "a", "source": "here"},
            {"prompt": [{"role": "user", "content": "w8"}], "answer": "b"}]
    loaded = list(data.load_rows(write_rows(tmp_path / "rows.jsonl", rows), data_options()))
    assert [row["source"] for row in loaded] == ["here", "rows"] and loaded[1]["prompt"] == rows[1]["prompt"]
    assert loaded[0]["entry"] == rows[0]
    table = pyarrow.Table.from_pylist([{"q": "w9", "answer": 3}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    loaded = list(data.load_rows(str(tmp_path / "rows.parquet"), data_options(prompt_key="q")))
    assert (loaded[0]["prompt"], loaded[0]["answer"]) == ("w9", 3)
    (tmp_path / "task.py").write_text("def rows():\n    return [{'prompt': 'w7', 'answer': 1}]\n")
    assert next(data.load_rows(f"{tmp_path}/task.py:rows", data_options()))["source"] == "task"
    spec = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&size=3&seed=5"
    gym = list(data.load_rows(spec, data_options()))
    assert len(gym) == 3 and gym[0]["source"] == "chain_sum"
    assert gym[0]["prompt"] == gym[0]["entry"]["question"]


@pytest.mark.parametrize("spec, words", [
    ("missing.jsonl", ["data.train=missing.jsonl", ".jsonl"]),
    ("README.md", ["README.md: ", "README.md"]),
    ("missing.py:rows", ["data.train=missing.py:rows", "'missing.py'"]),
    ("recipes/toy.py:no_such", ["data.train=recipes/toy.py:no_such", "no function 'no_such'"]),
    ("reasoning_gym:chain_sums", ["data.train=reasoning_gym:chain_sums", "chain_sums"]),
    ("reasoning_gym:chain_sum?terms=2", ["data.train=reasoning_gym:chain_sum?terms=2", "terms"]),
    ("reasoning_gym:chain_sum?size=0", ["size must be positive"]),
    ("reasoning_gym:chain_sum?size", ["data.train=reasoning_gym:chain_sum?size: ", "bad query field: 'size'"]),
    ("reasoning_gym:chain_sum?size=", ["data.train=reasoning_gym:chain_sum?size=: ", "NoneType"]),
    ("recipes/toy.py:problems?size=3", ["problems?size=3: a file must be ", "only .parquet has options"]),
    ("rows.jsonl?size=3", ["data.train=rows.jsonl?size=3: a file must be ", "only .parquet has options"]),
])
def test_wrong_source_is_one_line(spec, words, tmp_path):
    if spec == "README.md":
        spec = str(tmp_path / "README.md")
        Path(spec).write_text("text")
    with pytest.raises(ValueError) as error:
        next(data.load_rows(spec, data_options()))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_wrong_rows_are_one_line(tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"prompt": "w9", "answer": "1"}\n{"prompt": oops}\n')
    with pytest.raises(ValueError, match=r"broken.jsonl.*oops") as error:
        list(data.load_rows(str(tmp_path / "broken.jsonl"), data_options()))
    assert "\n" not in str(error.value)
    path = write_rows(tmp_path / "rows.jsonl", rows_of_lengths([3]))
    with pytest.raises(ValueError, match="row 0 has prompt, answer, but not .* data.prompt_key=question"):
        next(data.load_rows(path, data_options(prompt_key="question")))


def test_a_null_source_is_the_name_of_the_file(tmp_path):
    rows = [{"prompt": "w9", "answer": "1", "source": source} for source in (None, "", "other", 3, 0)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert [row["source"] for row in data.load_rows(path, data_options())] == ["rows", "rows", "other", "3", "0"]


# ---- prompts ----

@pytest.mark.parametrize("prompt", ["", [{"role": "user"}], [1, 2]])
def test_a_row_that_is_no_prompt_is_one_line(prompt, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "w9", "answer": "1"}, {"prompt": prompt, "answer": "1"}])
    tokenizer = make_tokenizer(TEMPLATE if prompt else None)
    tokenizer.add_bos_token = False
    if not prompt:
        tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(ValueError, match="rows.jsonl: row 1"):
        data.Prompts(path, tokenizer, data_options())


def test_one_bos_with_and_without_template():  # fault 5
    chat, plain = make_tokenizer(TEMPLATE), make_tokenizer()
    assert data.encode(chat, "w9")[1] == [1, 3, 9]
    assert data.encode(chat, "w9", "w8")[1] == [1, 4, 8, 3, 9]
    assert data.encode(chat, [{"role": "user", "content": "w9"}])[1] == [1, 3, 9]
    assert data.encode(plain, "w9")[1] == [1, 9]
    assert data.encode(plain, "<bos> w9")[1] == [1, 9]
    for prompt, system in (("w9", "w8"), ([{"role": "user", "content": "w9"}], None)):
        with pytest.raises(ValueError, match="chat template"):
            data.encode(plain, prompt, system)


def test_overlong(tmp_path, capsys):  # fault 6
    lengths = [10, 16, 17, 40]
    rows = rows_of_lengths(lengths)
    rows[3]["prompt"] = "w9 " * 30 + " ".join(f"w{number}" for number in range(50, 59))
    path = write_rows(tmp_path / "rows.jsonl", rows)

    def load(overlong, **changes):
        return data.Prompts(path, make_tokenizer(), data_options(overlong=overlong, **changes))

    assert [len(ids) for ids in load("filter").all()["prompt_ids"]] == [10, 16]
    assert "2 of 4 dropped; 2 too long (filter)" in capsys.readouterr().out
    whole = data.encode(make_tokenizer(), rows[3]["prompt"])[1]
    assert load("left").all()["prompt_ids"][3].tolist() == whole[-16:]
    assert load("right").all()["prompt_ids"][3].tolist() == whole[:16]
    shown = capsys.readouterr().out
    assert all(f"0 of 4 dropped; 2 too long ({end})" in shown for end in ("left", "right"))
    with pytest.raises(ValueError, match="row 2 is over data.max_prompt_length=16"):
        load("error")
    with pytest.raises(ValueError, match="0 left; data.batch_size must be at most that"):
        load("filter", max_prompt_length=5)
    with pytest.raises(ValueError, match="2 left; data.batch_size must be at most that"):
        data.Prompts(path, make_tokenizer(), data_options(), batch_size=3)


def prompts_of_eight(path, **changes):
    rows = [{"prompt": f"w{10 + number}", "answer": str(number)} for number in range(8)]
    path = write_rows(path / "rows.jsonl", rows)
    return data.Prompts(path, make_tokenizer(), data_options(**changes), batch_size=2)


def draw(prompts, steps):
    return [prompts.next() for _ in range(steps)]


def test_order_and_resume(tmp_path):  # fault 37: steps 4 to 8 list the same ids after a restart at 3
    whole = draw(prompts_of_eight(tmp_path), 8)
    ids = [[int(ids[1]) for ids in batch["prompt_ids"]] for batch in whole]
    assert sorted(sum(ids[:4], [])) == sorted(sum(ids[4:], [])) == list(range(10, 18))
    assert ids[:4] != ids[4:] and sum(ids[:4], []) != list(range(10, 18))
    assert sum((batch["uid"] for batch in whole), []) == list(range(16))
    first = prompts_of_eight(tmp_path)
    draw(first, 3)
    second = prompts_of_eight(tmp_path)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = draw(second, 5)
    assert [batch["answer"] for batch in rest] == [batch["answer"] for batch in whole[3:]]
    assert [batch["uid"] for batch in rest] == [batch["uid"] for batch in whole[3:]]
    in_order = draw(prompts_of_eight(tmp_path, shuffle=False), 4)
    assert sum((batch["answer"] for batch in in_order), []) == list("01234567")


def test_changed_data_is_refused(tmp_path):  # fault 37
    state = prompts_of_eight(tmp_path).state_dict()
    rows = [{"prompt": f"w{10 + number}", "answer": str(number + (number == 7))} for number in range(8)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    changed = data.Prompts(path, make_tokenizer(), data_options(), batch_size=2)
    with pytest.raises(ValueError, match="rows.jsonl"):
        changed.load_state_dict(state)


def test_answers_without_an_order_are_the_same_data(tmp_path):
    """The fingerprint of sets does not depend on how Python happens to order them in a process."""
    file = tmp_path / "rows.py"
    file.write_text("def rows():\n    return [{'prompt': 'w9', 'answer': set('abcdefgh')}]\n")
    one_row = data.Prompts(f"{file}:rows", make_tokenizer(), data_options()).fingerprint
    assert data.json.loads(subprocess.run(
        [sys.executable, "-c", "import json, sys; sys.path.insert(0, 'tests'); import data, test_data as t\n"
         f"print(); print(json.dumps(data.Prompts({f'{file}:rows'!r}, t.make_tokenizer(), t.data_options())"
         ".fingerprint))"], env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True,
    ).stdout.splitlines()[-1]) == one_row


def test_incomplete_batch_waits(tmp_path):
    prompts = data.Prompts(write_rows(tmp_path / "rows.jsonl", rows_of_lengths([3] * 7)), make_tokenizer(),
                           data_options(), batch_size=2)
    assert prompts.steps_per_epoch == 3
    assert [len(prompts.next()["uid"]) for _ in range(7)] == [2] * 7


def test_held_out_prompts_are_dropped(tmp_path, capsys):
    val = write_rows(tmp_path / "val.jsonl", rows_of_lengths([4, 5]))
    held_out = data.Prompts(val, make_tokenizer(), data_options())
    train = write_rows(tmp_path / "train.jsonl", rows_of_lengths([3, 4, 6, 4]))
    train = data.Prompts(train, make_tokenizer(), data_options(), exclude=held_out)
    assert train.all()["answer"] == ["3", "6"] and "2 of 4 dropped" in capsys.readouterr().out


# ---- the batch ----

def test_repeat_pairs_every_column_in_blocks(tmp_path):  # fault 8
    batch = data.repeat(prompts_of_eight(tmp_path, shuffle=False).next(), 4)
    assert batch["uid"] == [0] * 4 + [1] * 4 and batch["sample"] == [0, 1, 2, 3] * 2
    assert [int(ids[1]) - 10 for ids in batch["prompt_ids"]] == [int(answer) for answer in batch["answer"]]
    assert {len(column) for column in batch.values()} == {8}
    halves = data.select(batch, [4, 5, 6, 7]), data.select(batch, [0, 1, 2, 3])
    back = data.select(data.concat(halves), [4, 5, 6, 7, 0, 1, 2, 3])
    assert all(back[name] == batch[name] for name in ("sample", "uid", "answer"))


def test_pad_and_unpad_go_by_length():  # fault 4: pad = eos = 2, and the eos stays
    rows = [torch.tensor([7, 2]), torch.tensor([7, 8, 9, 10])]
    padded = data.pad(rows, 2)
    assert padded.tolist() == [[7, 2, 2, 2], [7, 8, 9, 10]]
    assert [row.tolist() for row in data.unpad(padded, [2, 4])] == [[7, 2], [7, 8, 9, 10]]
    (row,) = data.unpad(torch.zeros(1, 10_000), [3])
    assert len(pickle.dumps(row)) < 2000  # what goes to a Ray worker is the row, not what it was cut from


def random_batch(rng):
    """Groups of 1 to 6 rows, in mixed order; prompts of 1 to 30 tokens, responses of 0 to 40."""
    prompts = [torch.zeros(rng.randint(1, 30)) for _ in range(rng.randint(1, 9))]
    rows = [(uid, prompt) for uid, prompt in enumerate(prompts) for _ in range(rng.randint(1, 6))]
    rng.shuffle(rows)
    return {"uid": [uid for uid, _ in rows], "prompt_ids": [prompt for _, prompt in rows],
            "response_ids": [torch.zeros(rng.randint(0, 40)) for _ in rows]}


def cost(batch, rows):
    prompts = {batch["uid"][row]: len(batch["prompt_ids"][row]) for row in rows}
    return sum(prompts.values()) + sum(len(batch["response_ids"][row]) for row in rows)


def test_split_is_a_fair_partition():
    rng = random.Random(1)
    for _ in range(300):
        batch, parts = random_batch(rng), rng.randint(1, 8)
        shares = data.split(batch, parts)
        rows, groups = len(batch["uid"]), len(set(batch["uid"]))
        assert len(shares) == parts and sorted(sum(shares, [])) == list(range(rows))
        assert rows < parts or all(shares)
        if groups >= parts:
            places = {(batch["uid"][row], part) for part, share in enumerate(shares) for row in share}
            assert len(places) == groups  # no group in two places
            members = [[row for row in range(rows) if batch["uid"][row] == uid] for uid in set(batch["uid"])]
            largest = max(cost(batch, group) for group in members)
            loads = [cost(batch, share) for share in shares]
            assert max(loads) - min(loads) <= largest
        assert shares == data.split(batch, parts)


def test_split_cuts_groups_when_there_are_too_few():
    batch = {"uid": [0] * 8, "prompt_ids": [torch.zeros(5)] * 8, "response_ids": [torch.zeros(10)] * 8}
    assert sorted(len(share) for share in data.split(batch, 4)) == [2, 2, 2, 2]
    assert sorted(len(share) for share in data.split(data.select(batch, [0, 1, 2]), 4)) == [0, 1, 1, 1]


@pytest.mark.parametrize("share_prompt", [True, False])
def test_micro_batches_fit_and_lose_nothing(share_prompt):
    rng = random.Random(2)
    for _ in range(300):
        batch, budget, limit = random_batch(rng), rng.randint(20, 300), rng.choice([60, 1024])
        plan = data.micro_batches(batch, budget, share_prompt, limit)
        rows = sorted(row for units in plan for unit in units for row in unit)
        assert rows == list(range(len(batch["uid"])))
        longest = [max(cost(batch, unit) for unit in units) for units in plan]
        assert longest == sorted(longest, reverse=True)
        for units, length in zip(plan, longest):
            assert len(units) * length <= budget or (len(units) == 1 and len(units[0]) == 1)
            for unit in units:
                assert len({batch["uid"][row] for row in unit}) == 1
                assert len(unit) == 1 or (share_prompt and cost(batch, unit) <= min(budget, limit))
        positions, padding = counts(batch, plan)
        assert padding <= max(data.FREE, data.PADDING * positions)
        for number, after in enumerate(plan[1:], 1):  # two as one would be over the budget or near the bound
            together = [*plan[: number - 1], plan[number - 1] + after, *plan[number + 1 :]]
            full = len(together[number - 1]) * longest[number - 1] > budget
            positions, padding = counts(batch, together)
            assert full or padding > max(data.FREE, data.PADDING * positions) / 2
        assert plan == data.micro_batches(batch, budget, share_prompt, limit)


def counts(batch, plan):
    """Positions of a plan's passes, and how many of them are padding."""
    positions = sum(len(units) * max(cost(batch, unit) for unit in units) for units in plan)
    return positions, positions - sum(cost(batch, unit) for units in plan for unit in units)


def test_little_is_padding():  # lengths log-normal from 16 to 2,048, and fewer passes than if each kept the bound
    passes, bounded = 0, 0
    for seed, prompts in itertools.product(range(5), (16, 64)):
        torch.manual_seed(seed)
        lengths = torch.exp(5.2 + torch.randn(prompts * 4)).clamp(16, 2048).int().tolist()
        batch = {"uid": [row // 4 for row in range(prompts * 4)], "prompt_ids": [torch.zeros(64)] * (prompts * 4),
                 "response_ids": [torch.zeros(length) for length in lengths]}
        for budget, share_prompt in itertools.product((4096, 16384), (True, False)):
            plan = data.micro_batches(batch, budget, share_prompt)
            positions, padding = counts(batch, plan)
            assert padding <= 0.05 * positions
            passes += len(plan)
            width = rows = tokens = 0
            for size in sorted((cost(batch, unit) for units in plan for unit in units), reverse=True):
                rows, tokens = rows + 1, tokens + size
                if rows == 1 or rows * width > budget or rows * width - tokens > 0.05 * rows * width:
                    bounded, rows, width, tokens = bounded + 1, 1, size, size
    assert passes < 0.85 * bounded


def test_few_tokens_are_one_pass():  # however much their lengths differ: a second one would cost more
    lengths = [2, 5, 40, 31, 8, 60, 47, 3]
    assert len(plan_lengths(lengths, 4096)[1]) == 1
    assert 2 < len(plan_lengths(lengths * 40, 4096)[1]) < 12


def plan_lengths(lengths, budget):
    batch = {"uid": list(range(len(lengths))), "prompt_ids": [torch.zeros(0)] * len(lengths),
             "response_ids": [torch.full((length,), row) for row, length in enumerate(lengths)]}
    return batch, data.micro_batches(batch, budget)


def test_order_comes_back_from_a_plan():  # fault 26: a stub model whose log-prob is the row's number
    batch, plan = plan_lengths([9, 3, 8, 3, 7, 3], 10)
    assert [len(units) for units in plan] == [1, 1, 1, 3]
    output = [None] * 6
    for units in plan:
        rows = [row for unit in units for row in unit]
        for row, values in zip(rows, data.select(batch, rows)["response_ids"]):
            output[row] = values
    assert all((values == row).all() for row, values in enumerate(output))
    assert [len(values) for values in output] == [9, 3, 8, 3, 7, 3]


def test_plan_counts():  # fault 27
    assert len(plan_lengths([10, 10, 10, 10], 16)[1]) == 4
    assert plan_lengths([2, 2], 16)[1] == [[[0], [1]]]
    assert plan_lengths([20, 3], 16)[1] == [[[0]], [[1]]]


# ---- rewards ----

def test_scores_land_on_the_last_written_token():  # fault 4, and tool tokens after it
    masks = [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 1], [0, 0]]
    batch = responses(["yes"] * 5, ["yes"] * 5, [len(mask) for mask in masks])
    batch["response_mask"] = [torch.tensor(mask) for mask in masks]
    rewards = scoring.Rewards(reward_options(), Echo(["yes"] * 5), 8, workers=1)
    batch, metrics = rewards(batch)
    rewards.close()
    assert [scores.tolist() for scores in batch["token_level_scores"]] == [
        [0, 0, 1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 1], [0, 0]]
    assert metrics["response/length_mean"] == 11 / 5 and metrics["response/length_max"] == 4


@pytest.mark.parametrize("error", ["ValueError", "KeyboardInterrupt", "SystemExit"])
def test_raising_costs_its_sample(score, capsys, error):  # fault 9
    texts = [f"t{row}" for row in range(8)]
    source = ("def score(response, answer, row):\n    if response == 't3':\n"
              f"        raise {error}('bad row')\n    return 1\n")
    batch, metrics = score(texts, source, fallback=-0.5)
    assert batch["scores"] == [1, 1, 1, -0.5, 1, 1, 1, 1]
    assert metrics["reward/errors"] == 1 and metrics["reward/timeouts"] == 0
    shown = capsys.readouterr().err
    assert shown.count("Traceback") == 1 and "bad row" in shown
    score.opened[0](responses(texts))
    assert "Traceback" not in capsys.readouterr().err  # shown once a run


@pytest.mark.parametrize("text, message", [
    ("'good'", "could not convert string to float: 'good'"), ("{'value': 1}", "KeyError: 'score'"),
    ("None", "2 of 2 samples have no score")])
def test_what_is_never_a_score_stops_the_run(text, message, score):
    with pytest.raises(RuntimeError, match=f"(?s).*{message}"):
        score(["a", "b"], f"def score(response, answer, row):\n    return {text}\n")


@pytest.mark.parametrize("infinite", ["float('inf')", "1e39"])  # the second in float32
def test_an_infinite_score_is_an_error(score, infinite):
    """It would make the loss NaN; and the function's own numbers do not take the names of ours."""
    batch, metrics = score(["a", "b"], "def score(response, answer, row):\n"
                           f"    return {{'score': {infinite} if response == 'b' else 1, 'mean': -7}}\n")
    assert batch["scores"] == [1, 0] and metrics["reward/errors"] == 1 and metrics["reward/mean"] == 0.5


def test_a_dead_process_costs_its_sample(score):  # fault 9
    batch, metrics = score(["a", "b", "c"], "import os\ndef score(response, answer, row):\n"
                           "    return os._exit(3) if response == 'b' else 1\n")
    assert batch["scores"] == [1, 0, 1] and metrics["reward/errors"] == 1


def test_all_raising_stops_the_run(score):  # fault 9
    with pytest.raises(RuntimeError, match="(?s)4 of 4 samples failed.*Traceback.*all are bad"):
        score(["t"] * 4, "def score(response, answer, row):\n    raise ValueError('all are bad')\n")


def test_hanging_costs_its_sample_and_no_process(score):  # fault 10
    source = ("import time\ndef score(response, answer, row):\n    print('noise')\n"
              "    time.sleep(60 if response == 'hang' else 0)\n    return 1\n")
    texts = ["t"] * 5 + ["hang"] + ["t"] * 2
    batch, metrics = score(texts, source, timeout=2.0)
    begun = time.time()
    batch, metrics = score.opened[0](responses(texts))
    assert time.time() - begun < 30
    assert batch["scores"] == [1, 1, 1, 1, 1, 0, 1, 1] and metrics["reward/timeouts"] == 1
    texts[:] = ["hang"] * 6 + ["t"]
    batch, metrics = score.opened[0](responses(texts))
    assert metrics["reward/timeouts"] == 6 and batch["scores"][6] == 1
    assert len(scoring_processes()) <= 2
    score.opened[0].close()
    assert not scoring_processes()


def starts(tmp_path, start, then):
    """A reward function that, unless the response is good, starts a process that writes its id to a file."""
    command = ["sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 300"]
    return ("import multiprocessing, os, subprocess, time\ndef score(response, answer, row):\n"
            f"    if response == 'good':\n        return 1\n    command = {command}\n"
            f"    subprocess.{start}\n    {then}\n")


def assert_it_ends(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(pid)
        try:
            started.wait(100)  # the fork server takes seconds to end, on a busy machine
        finally:
            started.kill()


@pytest.mark.parametrize("start, then", [
    ("run(command)", ""), ("Popen(command, start_new_session=True)", "time.sleep(300)")])
def test_what_a_function_starts_dies_with_its_process(score, tmp_path, start, then):
    assert score(["good", "bad"], starts(tmp_path, start, then), timeout=5.0)[0]["scores"] == [1, 0]
    assert_it_ends(int((tmp_path / "pid").read_text()))


def ask_one(function):
    scoring.Rewards(reward_options(function=function, timeout=100.0), Echo(["bad"]), 8)(responses(["bad"]))


def test_a_function_dies_with_a_killed_trainer(tmp_path):
    then = (f"while not os.path.exists('{tmp_path}/pid'):\n        time.sleep(0.1)\n"
            "    open(f'{os.path.dirname(__file__)}/own_pid', 'w').write(str(os.getpid()))\n"
            "    os.kill(multiprocessing.parent_process().pid, 9)\n    time.sleep(300)")
    (tmp_path / "reward.py").write_text(starts(tmp_path, "Popen(command)", then))
    context = multiprocessing.get_context("spawn")
    trainer = context.Process(target=ask_one, args=(f"{tmp_path}/reward.py:score",))
    trainer.start()
    trainer.join(900)
    assert trainer.exitcode == -9
    assert_it_ends(int((tmp_path / "own_pid").read_text()))
    psutil.Process(int((tmp_path / "pid").read_text())).kill()


def scoring_processes():
    """Living processes that the fork server started."""
    return [child for child in psutil.Process().children(recursive=True) if child.ppid() != os.getpid()]


@pytest.mark.parametrize("response, answer, expected", [  # fault 11
    ("#### 42" + " and so on" * 50, "42", 1), ("#### 1,234", "1234", 1), ("#### -3", "-3", 1),
    ("#### 3", "-3", 0), ("The total is 72 clips, altogether.", 72, 1), ("$1,234.50 now", "1234.50", 1),
    ("$1,234.50 now", "1,234.5", 1),
    ("no number", "42", 0), ("", "42", 0), ("10-3 = 7.", "7", 1), ("it is 5-3", "3", 1), ("-$5", "-5", 1),
    ("The answer is .5", "0.5", 1), (".5", "5", 0), ("-$.50", "-0.5", 1), ("It is ...5", "5", 1), ("v.5", "5", 1),
    ("1, 2, 3", "3", 1), ("#### 42 (of 50)", "so #### 42", 1), ("####", "4", 0), ("It is 12.", "12", 1)])
def test_number(response, answer, expected):
    assert functions.number(response, answer, {})["score"] == expected


def test_math_and_gym_in_their_process(score):  # faults 9, 11
    batch, _ = score(["\\boxed{1/3}", "so $\\frac{2}{6}$", "\\boxed{1/4}", ""], "math", ["1/3"] * 4, timeout=100.0)
    assert batch["scores"] == [1, 1, 0, 0]
    entry = next(data.load_rows("reasoning_gym:chain_sum?size=1&seed=7", data_options()))["entry"]
    assert functions.reasoning_gym(f"so <answer>{entry['answer']}</answer>", None, entry) == 1
    assert functions.reasoning_gym(f" {entry['answer']}\n", None, entry) == 1 and functions.reasoning_gym("?", None, entry) < 1


def test_missing_scores_stay_missing(score):  # fault 12
    source = ("def score(response, answer, row):\n"
              "    return {'a': 1, 'b': 0, 'c': None, 'd': float('nan')}[response]\n")
    batch, metrics = score(["a", "b", "c", "d"], source)
    assert batch["scores"][:2] == [1, 0] and all(math.isnan(score) for score in batch["scores"][2:])
    assert metrics["reward/mean"] == 0.5 and metrics["reward/std"] == 0.5 and metrics["reward/errors"] == 0


def test_async_and_dict(score):
    source = ("async def score(response, answer, row):\n"
              "    extra = {'length': len(response)} if response != 'ccc' else {}\n"
              "    return {'score': response == answer, 'note': 'text', **extra}\n")
    batch, metrics = score(["a", "bb", "ccc"], source, ["a", "b", "c"])
    assert batch["scores"] == [1, 0, 0] and metrics["reward/length"] == 1.5  # the mean of the rows that have it
    assert "reward/note" not in metrics


def test_keys_of_any_type_and_numbers_of_numpy_become_metrics(score):
    source = ("import numpy\ndef score(response, answer, row):\n"
              "    return {'score': 1, 'z': numpy.float32(2), 'n': numpy.int64(3), 'b': numpy.True_, 1: 5, 'list': [6]}\n")
    _, metrics = score(["a"], source)
    own = {name: metrics.get(f"reward/{name}") for name in ("z", "n", "b", "1", "list")}
    assert own == {"z": 2, "n": 3, "b": 1, "1": 5, "list": None}


def test_overlong_penalty_and_truncation(score):  # DAPO eq. 13: 0 up to 8 - 4 tokens, then 2/4 a token
    arguments = dict(answers=["a"] * 4, lengths=[3, 4, 6, 8], reasons=["stop", "stop", "stop", "length"],
                     overlong_buffer=4, overlong_penalty=2.0, mask_truncated=True)
    batch, metrics = score(["a"] * 4, "exact", **arguments)
    assert batch["scores"] == [1, 1, 0, -1] and metrics["reward/mean"] == 1
    assert metrics["response/truncated"] == 0.25
    assert [int(mask.sum()) for mask in batch["response_mask"]] == [3, 4, 6, 0]
    assert batch["raw_scores"][:3] == [1, 1, 1] and math.isnan(batch["raw_scores"][3])  # no group is mixed by it
    batch, _ = score(["a"] * 4, "exact", training=False, **arguments)
    assert batch["scores"] == [1] * 4 and int(batch["response_mask"][3].sum()) == 8


def test_check(tmp_path):
    section = data_options(train="recipes/toy.py:problems", val=None)
    check_data(section)
    assert scoring.reward_function("recipes/toy.py:score")
    for word, function in [("reward.function=exakt: there is no function 'exakt' in .*recipes/rewards.py", "exakt"),
                           ("no function 'scores'", "recipes/toy.py:scores")]:
        with pytest.raises(ValueError, match=word):
            scoring.reward_function(function)
    section.val = write_rows(tmp_path / "val.jsonl", [{"question": "w9"}])
    with pytest.raises(ValueError, match="data.val=.*row 0 has question, but not .* data.prompt_key=prompt"):
        check_data(section)


def test_a_reward_model_with_a_tokenizer_of_its_own_reads_its_own_template():
    """Prompt and response as text, or the whole transcript; its template has a word for each role."""
    own = make_tokenizer(TEMPLATE.replace("m['role']", "'system' if m['role'] == 'assistant' else 'user'"))
    ids = {"prompt_ids": [torch.tensor([50])] * 2, "response_ids": [torch.tensor([0, 2]), torch.tensor([1])]}
    actors, chat = Echo([" w8", " w7"]), [[{"role": "user", "content": f"w{number}"}] for number in (10, 11)]

    def read(own, **columns):
        batch = data.conversations(ids | columns, actors, own)
        assert [int(mask.sum()) for mask in batch["response_mask"]] == [1, 1] and batch["uid"] == [0, 1]
        return [row.tolist() for row in batch["prompt_ids"]]

    assert read(None, prompt=chat) == [[50, 0, 2], [50, 1]]  # the actor's ids as they are
    assert read(own, prompt=["w10", "w11"]) == [[1, 10, 8], [1, 11, 7]]
    assert read(own, prompt=chat) == [[1, 3, 10, 4, 8], [1, 3, 11, 4, 7]]
    said = [{"role": role, "content": f"w{number}"} for role, number in (("assistant", 20), ("tool", 21), ("assistant", 22))]
    failed = [said[0], {"role": "error", "content": "w59"}]
    assert read(own, prompt=chat, transcript=[said, failed]) == [
        [1, 3, 10, 4, 20, 3, 21, 4, 22], [1, 3, 11, 4, 20]]


def test_nothing_to_split():
    batch = {"uid": [], "prompt_ids": [], "response_ids": []}
    assert data.split(batch, 2) == [[], []] and data.micro_batches(batch, 16) == []


def test_toy_model_is_whole():
    folder = data.resolve_model("recipes/toy.py:build")
    tokenizer = data.load_tokenizer(folder, False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert data.encode(tokenizer, "3+ 4=")[1] == [5, 12, 14, 6, 13]
    assert tokenizer.decode([9, 1], skip_special_tokens=True) == "7"
    assert model.config.eos_token_id == tokenizer.eos_token_id == 1 and model.config.tie_word_embeddings
