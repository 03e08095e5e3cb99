"""Draws metrics of several runs over steps: python bench/curves.py OUT.svg METRIC[,METRIC] NAME=RUN_DIRECTORY ...

The figures of the README are made with it, from the runs that their text names. NAME may be nothing for a single
run: `python bench/curves.py docs/chain_sum.svg val/chain_sum/mean@1,reward/right =RUN`.
"""
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402


def curve(directory, metric):
    """(steps, values) of the rows of a run that have the metric."""
    rows = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return zip(*[(row["step"], row[metric]) for row in rows if metric in row])


def main(out, metrics, *runs):
    figure, axes = pyplot.subplots(figsize=(7, 3))
    for run in runs:
        name, _, directory = run.partition("=")
        for metric in metrics.split(","):
            label = f"{name} {metric}".strip() if "," in metrics else name
            axes.plot(*curve(directory, metric), marker="o", markersize=3, label=label)
    axes.set(xlabel="step", ylabel="mean score" if "," in metrics else metrics, ylim=(0, 1))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
