"""From the command to the first token, and where the time goes: python bench/startup.py [override ...]

One step of recipes/toy.yaml under Ray, without validation, watched from outside: a part ends when the process that
comes next is there, has its title, or when the run has written down its step. Nearly all of it is Python importing
torch, transformers and SGLang, in three processes one after the other.
"""
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
PLACE = Path("/tmp/startup")
# (what has happened, what a command line then begins with or ends with)
SIGNS = {
    "train_ppo.py: imports, data, then Ray begins": "raylet",
    "Ray, the worker's imports": "ray::Worker.build",
    "the actor, the worker's import of SGLang": "spawn_main",
    "the scheduler's imports": "sglang::scheduler",
}


def processes(pid):
    """The command lines of all that a process has started, also through others."""
    for process in psutil.Process(pid).children(recursive=True):
        try:
            yield " ".join(process.cmdline())
        except psutil.Error:  # it is gone, or not yet there
            continue


def main(*overrides):
    shutil.rmtree(PLACE, ignore_errors=True)
    words = ["--config", "recipes/toy.yaml", "trainer.steps=1", "data.val=null", "validation.every=0",
             f"trainer.dir={PLACE}", *overrides]
    start, seen, file = time.time(), {}, PLACE / "metrics.jsonl"
    run = subprocess.Popen([sys.executable, "train_ppo.py", *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    while run.poll() is None:
        lines = list(processes(run.pid))
        for event, sign in SIGNS.items():
            begun = all(earlier in seen for earlier in list(SIGNS)[: list(SIGNS).index(event)])
            if event not in seen and begun and any(sign in line for line in lines):
                seen[event] = time.time() - start
        time.sleep(0.05)
    ended = time.time() - start
    row = json.loads(file.read_text().splitlines()[0])
    seen["the engine's start"] = file.stat().st_mtime - start - row["time/step"]
    seen["sync"] = seen["the engine's start"] + row["time/sync"]
    print("| until | s | of it |\n| --- | --- | --- |")
    before = 0.0
    for event, moment in seen.items():
        print(f"| {event} | {moment:.1f} | {moment - before:.1f} |")
        before = moment
    print(f"| the end of the run, after one step of {row['time/step']:.1f} s | {ended:.1f} | |")


if __name__ == "__main__":
    main(*sys.argv[1:])
