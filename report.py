"""One page about one run: `python report.py runs/name/time` reads what the run left and writes report.html.

It works for a run that has ended, is going on or was killed: a part without its file or metric is left out.
The page needs nothing but itself: matplotlib draws the charts into it as SVG; no scripts, no fonts to load.
Not here: comparing runs, zooming, smoothing. TensorBoard (trainer.tensorboard) does those.
"""
import argparse
import collections
import contextlib
import io
import json
import os
import re
import subprocess
from pathlib import Path

import jinja2
import matplotlib
import numpy as np
from matplotlib.figure import Figure

MAX_SAMPLES = 20
TIMES = r"time/(?!step$).+"
# A step's phases in the order in which they happen; any other comes after these.
PHASES = ("sync", "rollout", "reward_model", "reward", "rollout_greedy", "sleep", "old_logprobs",
          "ref_logprobs", "values", "advantage", "update_critic", "update_actor", "validate", "save")
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "", "font.size": 9, "legend.frameon": False,
         "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
         "grid.color": "#eee"}
PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ name }}</title>
<style>
  body { max-width: 1240px; margin: 0 auto; padding: 1rem; font: 15px/1.5 system-ui, Arial, sans-serif;
         color: #222; background: #f6f6f4; overflow-wrap: anywhere; }
  .grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(350px, 100%), 1fr)); }
  figure, table { margin: 0 0 1rem; padding: .6rem; background: #fff; border: 1px solid #ddd; }
  .grid > figure { margin: 0; }
  figure svg { display: block; width: 100%; height: auto; }
  table { width: 100%; table-layout: fixed; border-collapse: collapse; }
  th, td { padding: .5rem .7rem; text-align: left; vertical-align: top; }
  th:nth-child(2) { width: 12%; }
  td, pre { white-space: pre-wrap; }
  tr { border-bottom: 1px solid #ddd; }
  b, small { display: block; font-size: .85rem; font-weight: normal; color: #666; }
  td b { display: none; }
  @media (max-width: 700px) { thead { display: none; } td, td b { display: block; } }
</style>
{% macro show(value) %}{% set whole = text(value) %}{% if whole|length <= 300 %}{{ whole }}{% else -%}
<details><summary>{{ whole[:300] }} …</summary>… {{ whole[300:] }}</details>{% endif %}{% endmacro %}
<h1>{{ name }}</h1>
<p>{{ facts|join(" · ") }}</p>
<div class="grid">
{% for title, svg in charts %}<figure><figcaption>{{ title }}</figcaption>{{ svg|safe }}</figure>
{% endfor %}</div>
{% if pairs %}<h2>Validation samples</h2>
<table><thead><tr><th>Prompt<th>Answer{% for step in steps %}<th>Step {{ step }}{% endfor %}</tr></thead>
{% for pair in pairs %}{% set sample = pair.values()|first %}<tr>
<td><b>Prompt</b>{{ show(sample.prompt) }}</td><td><b>Answer</b>{{ show(sample.answer) }}</td>
{% for step in steps %}<td>{% if step in pair %}<b>Step {{ step }}</b>{{
  show(pair[step].transcript or pair[step].response) -}}
<small>score {{ text(pair[step].scores) }}, {{ pair[step].finish_reason }}</small>{% endif %}</td>
{% endfor %}</tr>{% endfor %}</table>{% endif %}
{% if config %}<details><summary>Config</summary><pre>{{ config }}</pre></details>{% endif %}
"""


def read(file, *key):
    """Rows of a jsonl file by step. Of rows with one key the last counts: a resumed run repeats steps."""
    rows = {}
    if file.exists():
        for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
            with contextlib.suppress(ValueError):  # the last line of a run in progress may be half written
                row = json.loads(line)
                rows[tuple(row.get(name) for name in key)] = row
    return sorted(rows.values(), key=lambda row: row["step"])


def matching(rows, pattern):
    return sorted({name for row in rows for name in row if re.fullmatch(pattern, name)})


def phases_of(names):
    found = {name.split("/")[1] for name in names}
    return [phase for phase in PHASES if phase in found] + sorted(found.difference(PHASES))


def over_steps(axes, rows):
    axes.set(xlabel="step", xlim=(rows[0]["step"] - 0.5, rows[-1]["step"] + 0.5))
    axes.xaxis.get_major_locator().set_params(integer=True)


def curves(axes, rows, names):
    for name in names:
        steps, values = zip(*[(row["step"], row[name]) for row in rows if name in row])
        label = name.replace("$", r"\$")  # not the start of a formula
        axes.plot(steps, values, label=label, marker="o" if len(steps) <= 100 else "", markersize=3)
    over_steps(axes, rows)


def times(axes, rows, names):
    """Bars, a stack per step; drawn as one outline per phase, so that the page of a long run stays small."""
    steps = [row["step"] for row in rows]
    edges = np.array([*steps, steps[-1] + 1]) - 0.5
    top = np.zeros(len(steps))
    for phase, color in zip(phases_of(names), matplotlib.colormaps["tab20"].colors):
        bottom, top = top, top + np.nan_to_num([row.get(f"time/{phase}", 0.0) for row in rows])
        axes.stairs(top, edges, baseline=bottom, fill=True, color=color, label=phase)
    over_steps(axes, rows)


def memory(axes, rows, names):
    """A line per process through the phases of a step: where the engine sleeps, its line goes down."""
    phases = phases_of(names)
    for process in sorted({name.split("/")[2] for name in names}):
        keys = [f"mem/{phase}/{process}" for phase in phases]
        means = [np.mean([row[key] for row in rows if key in row] or [np.nan]) for key in keys]
        axes.plot(phases, means, "o-", markersize=4, label=process)
    axes.tick_params(axis="x", labelrotation=45, labelrotation_mode="xtick")
    axes.set_ylim(0, 1.1 * axes.dataLim.y1)


CHARTS = (  # title, unit, who draws it, its metrics (a regular expression), scale
    ("Reward", "mean score", curves, r"reward/mean", "linear"),
    ("Validation", "mean score", curves, r"val/.+/mean@\d+", "linear"),
    ("Response length", "tokens", curves, r"response/length_(mean|max)", "linear"),
    ("KL divergence", "nats per token", curves, r"actor/(ppo_kl|kl_loss)|reward/kl", "linear"),
    ("Entropy", "nats per token", curves, r"actor/entropy", "linear"),
    ("Mismatch of engine and trainer", "|log-prob difference|", curves, r"rollout/logprob_diff_m\w+", "log"),
    ("Gradient", "norm before clipping", curves, r"(actor|critic)/grad_norm", "linear"),
    ("Critic", "explained variance", curves, r"critic/explained_variance", "linear"),
    ("Time per phase", "seconds", times, TIMES, "linear"),
    ("Memory per phase", "MiB, mean over steps", memory, r"mem/.+/.+", "linear"),
)


def chart(title, unit, draw, rows, names, scale):
    """An <svg> element, whose ids no other chart of the page has."""
    figure = Figure(figsize=(4.4, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.set(ylabel=unit, yscale=scale)
    draw(axes, rows, names)
    figure.legend(loc="outside lower center", ncols=3, handlelength=1)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(["Date", "Creator", "Format", "Type"]))
    _, tag, body = file.getvalue().partition("<svg")
    return tag + re.sub(r'(\sid="|href="#|url\(#)', rf"\1{title.split()[0]}-", body)


def machine():
    failed, gpus = subprocess.getstatusoutput("nvidia-smi --query-gpu=name --format=csv,noheader")
    counts = collections.Counter([] if failed else gpus.splitlines())
    return [f"{os.cpu_count()} cores"] + [f"{count} x {name}" for name, count in counts.items()]


def text(value):
    if isinstance(value, list):  # chat messages are shown as "role: content"
        return "\n".join(": ".join(map(str, m.values())) if isinstance(m, dict) else str(m) for m in value)
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value) if str(value).strip() else repr(value)  # an empty response is seen as ''


def write(directory):
    """Makes report.html of a run directory's metrics.jsonl, samples.jsonl and config.yaml; returns its path.

    To be called where the run ran: the machine that the page names is the one at hand.
    """
    directory = Path(directory).resolve()
    rows = read(directory / "metrics.jsonl", "step")
    samples = read(directory / "samples.jsonl", "step", "uid", "sample")
    config = directory / "config.yaml"
    facts, charts, pairs = machine(), [], {}
    if rows:
        minutes = sum(row.get(name, 0.0) for row in rows for name in matching(rows, TIMES)) / 60
        facts += [f"steps {rows[0]['step']} to {rows[-1]['step']}", f"{minutes:.1f} minutes"]
    for title, unit, draw, pattern, scale in CHARTS:
        names = matching(rows, pattern)
        if names:
            with matplotlib.rc_context(STYLE):
                charts.append((title, chart(title, unit, draw, rows, names, scale)))
    steps = sorted({row["step"] for row in samples[:1] + samples[-1:]})  # the first and the last validation
    for row in samples:
        if row["step"] in steps:
            pairs.setdefault((row.get("uid"), row.get("sample")), {})[row["step"]] = row
    page = jinja2.Template(PAGE, autoescape=True).render(
        name="/".join(directory.parts[-2:]), facts=facts, charts=charts, steps=steps, text=text,
        pairs=list(pairs.values())[:MAX_SAMPLES], config=config.read_text("utf-8") if config.exists() else "")
    report = directory / "report.html"
    report.write_text(page, encoding="utf-8", errors="replace")
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write report.html into a run directory.")
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    if not directory.is_dir():
        parser.error(f"{directory}: no such run directory")
    print(write(directory))
