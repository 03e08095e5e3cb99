"""The report of a made-up run directory, and the line budget."""
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import report

ROOT = Path(report.__file__).parent
METRICS = [
    {"step": 0, "val/sums$x$<b>/mean@1": 0.4, "time/validate": 2.0, "mem/validate/engine_00": 900.0},
    {"step": 1, "reward/mean": 0.5, "actor/grad_norm": float("nan"), "rollout/logprob_diff_max": 1e-6,
     "time/rollout": 58.0, "time/step": 60.0, "mem/rollout/engine_00": 900.0, "mem/sleep/engine_00": 80.0},
]
SAMPLE = {"uid": 0, "sample": 0, "source": "sums", "prompt": [{"role": "user", "content": "1+1?"}],
          "answer": "2", "scores": 1.0, "finish_reason": "stop"}
SAMPLES = [
    {**SAMPLE, "step": 0, "response": "<script>alert(1)</script>"},
    {**SAMPLE, "step": 1, "response": "long " * 200 + "the end"},
    {**SAMPLE, "step": 1, "uid": 1, "response": "2", "transcript": [
        {"role": "assistant", "content": "call"}, {"role": "tool", "name": "sum", "content": "<b>2</b>"},
        {"role": "assistant", "content": "2"}]},
    {**SAMPLE, "step": 1, "uid": 2, "response": " \n"},
]


class Page(HTMLParser):
    """Collects a page's tags, attributes and text."""

    def __init__(self, file):
        super().__init__()
        self.tags, self.attributes, self.words = [], [], ""
        self.feed(file.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.words += data


def run_directory(path, metrics=METRICS, samples=SAMPLES):
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    (path / "config.yaml").write_text("seed: 1  # <config>\n")
    return path


def test_the_page_stands_alone_and_escapes_what_a_model_wrote(tmp_path):
    page = Page(report.write(run_directory(tmp_path)))
    assert "script" not in page.tags and "link" not in page.tags
    for text in ("<script>alert(1)</script>", "user: 1+1?", "the end", "# <config>", "val/sums$x$<b>/mean@1",
                 "tool: sum: <b>2</b>", r"' \n'"):
        assert text in page.words
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "data")]
    assert all(link.startswith("#") for link in links)
    assert "url(http" not in page.words and "@import" not in page.words
    assert page.tags.count("svg") == 6  # reward, validation, mismatch, gradient (only NaN), time, memory
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert "steps 0 to 1" in page.words and "1.0 minutes" in page.words  # 58 s and 2 s


def test_a_run_in_progress_or_with_nothing_yet_has_a_page(tmp_path):
    assert "svg" not in Page(report.write(tmp_path)).tags
    run_directory(tmp_path, samples=[])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    page = Page(report.write(tmp_path))
    assert "svg" in page.tags and "table" not in page.tags and "steps 0 to 1" in page.words


def test_a_step_repeated_by_a_resumed_run_counts_once(tmp_path):
    again = [{"step": 1, "time/rollout": 118.0}]
    page = Page(report.write(run_directory(tmp_path, metrics=METRICS + again)))
    assert "2.0 minutes" in page.words


def test_a_process_that_always_holds_the_most_is_not_drawn_on_the_frame():
    axes = report.Figure().subplots()
    report.memory(axes, [{"step": 1, "mem/sync/trainer0": 1200.0, "mem/sleep/trainer0": 1199.0}],
                  ["mem/sync/trainer0", "mem/sleep/trainer0"])
    assert axes.get_ylim() == pytest.approx((0, 1320))


def test_the_phases_of_the_trainer_have_a_place_in_their_order():
    trainer = (ROOT / "train_ppo.py").read_text(encoding="utf-8")
    named = set(re.findall(r'phase\("(\w+)"\)|"(\w+_logprobs|values)"\)', trainer))
    assert {"".join(pair) for pair in named} >= {"sync", "reward_model", "reward", "old_logprobs", "values", "save"}
    assert {"".join(pair) for pair in named} <= set(report.PHASES)
    drawn = report.phases_of(["time/save", "time/reward", "time/mine", "time/reward_model", "time/rollout"])
    assert drawn == ["rollout", "reward_model", "reward", "save", "mine"]


def test_the_code_is_within_its_budget_and_the_readme_says_so():
    done = subprocess.run([sys.executable, ROOT / "bench" / "size.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = dict(re.findall(r"^(\S+\.py) +(\d+)", done.stdout, re.MULTILINE))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `(\S+\.py)`.*\| (\d+) \|$", readme, re.MULTILINE)) == counted
    five = re.search(r"five modules +(\d)(\d+)", done.stdout).groups()
    assert f"**{','.join(five)}**" in readme
