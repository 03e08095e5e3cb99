"""Draws what each process holds after each phase: python bench/memory.py OUT.svg RUN_DIRECTORY FIRST LAST

The steps FIRST to LAST come from the run's metrics.jsonl. The figure of docs/walkthrough.md is made with it,
from the run that its text names. In a step that validated or saved some phases ran twice, and only the second
was kept: such a step is refused.
"""
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

pyplot.rcParams["svg.fonttype"] = "none"  # text stays text: the file is smaller and can be searched


def refuse(reason):
    print(f"error: {reason}", file=sys.stderr)
    sys.exit(2)


def phases(row):
    """(names of the step's phases in order, {process: MiB after each of them})."""
    names = [key.removeprefix("time/") for key in row if key.startswith("time/") and key != "time/step"]
    if {"validate", "save"} & set(names):
        refuse(f"step {row['step']} validated or saved, so some phases ran twice; choose others")
    first = f"mem/{names[0]}/"
    processes = [key.removeprefix(first) for key in row if key.startswith(first)]
    return names, {process: [row[f"mem/{name}/{process}"] for name in names] for process in processes}


def main(out, directory, first, last):
    lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if int(first) <= row["step"] <= int(last)]
    if not rows:
        refuse(f"{directory}/metrics.jsonl has no steps {first} to {last}")
    figure, axes = pyplot.subplots(figsize=(8, 4.2))
    above = axes.get_xaxis_transform()  # x in phases, y in parts of the figure
    ticks, held = [], {}
    for row in rows:
        names, memory = phases(row)
        axes.axvline(len(ticks) - 0.5, color="grey", linewidth=0.5)
        axes.text(len(ticks) - 0.4, 1.02, f"step {row['step']}", transform=above, fontsize=8)
        ticks += [f"{name}, {row[f'time/{name}']:.2f} s" for name in names]
        for process, mib in memory.items():
            held.setdefault(process, []).extend(mib)
    for process, mib in held.items():
        axes.step(range(len(ticks)), mib, where="mid", marker="o", markersize=3, label=process)
    axes.set(xlabel="phase, and the time it took", ylabel="memory held after it (MiB)", ylim=(0, None))
    axes.set_xticks(range(len(ticks)), ticks, rotation=60, ha="right", rotation_mode="anchor", fontsize=7)
    axes.legend(fontsize=8, loc="upper left")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
