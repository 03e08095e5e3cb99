"""Whole runs as a user starts them, one process tree each: what test_train.py and test_resume.py share."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 900  # seconds, for what has no limit of its own: only what hangs takes so long
# Clocks, memory, and what rests on the engine's log-probs.
NOT_REPEATED = ("time/", "mem/", "perf/", "rollout/")


class Run:
    """One training run in a session of its own; every process of it is found by a mark in its environment.

    `log` has what it writes; with `stderr_apart` stderr is not there but in `errors`. `answers` has what the
    reward function `record` below was asked to score.
    """

    def __init__(self, directory, *overrides, command=(sys.executable,), stderr_apart=False):
        self.directory, self.mark = Path(directory), uuid.uuid4().hex
        self.log = self.directory.with_suffix(f".{self.mark[:6]}.log")
        self.errors = self.log.with_suffix(".err") if stderr_apart else self.log
        self.answers = self.log.with_suffix(".answers")
        arguments = ["train_ppo.py", "--config", "recipes/toy.yaml", f"trainer.dir={directory}"]
        # Ray starts a process for every core of the machine before it is asked to, all of them on our one core.
        arguments += ["ray.num_cpus=2", *overrides]
        environment = os.environ | {"KILO_TEST": self.mark, "KILO_ANSWERS": str(self.answers)}
        environment.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)  # of a train_ppo.run in this process
        self.start = time.monotonic()
        with open(self.log, "a") as log, open(self.errors, "a") as errors:
            self.process = subprocess.Popen(
                [*command, *arguments], cwd=ROOT, env=environment, stdout=log, stderr=errors,
                start_new_session=True,
            )

    def wait(self, timeout=PATIENCE):
        code = self.process.wait(timeout)
        self.seconds = time.monotonic() - self.start
        return code

    def processes(self, title=""):
        return marked(self.mark, title)

    def assert_nothing_left(self):
        assert_nothing_left(self.mark)

    def kill(self):
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.wait()

    def until(self, seen, pause=0.005):
        """What `seen()` gives as soon as it is true; the run must be alive until then."""
        begun = time.monotonic()
        while not (found := seen()):
            assert self.process.poll() is None, self.said()
            assert time.monotonic() - begun < PATIENCE, self.said()
            time.sleep(pause)
        return found

    def find(self, title, wanted=lambda process: True):
        """The first process with that pattern in its command line. All are looked at, which takes long, and the run has the same core."""
        return self.until(lambda: list(filter(wanted, self.processes(title))), pause=0.2)[0]

    def wait_for_step(self, step):
        self.until(lambda: any(row["step"] >= step for row in self.rows()), pause=0.02)

    def said(self):
        """The ends of what the run wrote, for a failure."""
        return "\n".join(path.read_text()[-3000:] for path in {self.log, self.errors})

    def rows(self):
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().splitlines(True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]  # the last is perhaps being written


def marked(mark, title=""):
    """The living processes with KILO_TEST=`mark` in their environment and the pattern `title` in their command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            living = process.status() != psutil.STATUS_ZOMBIE
            titled = living and re.search(title, " ".join(process.cmdline()))
            if titled and process.environ().get("KILO_TEST") == mark:
                found.append(process)
    return found


def assert_nothing_left(mark):
    """Two agents of Ray try for 60 s to report that their raylet is dead, where it was killed."""
    deadline = time.monotonic() + 90
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not marked(mark), [process.cmdline()[:4] for process in marked(mark)]


def repeatable(rows):
    return [{name: value for name, value in row.items() if not name.startswith(NOT_REPEATED)} for row in rows]


def record(response, answer, row):
    """A reward function: some number that follows from the response. It notes what it is asked to score."""
    with open(os.environ["KILO_ANSWERS"], "a") as file:
        file.write(f"{row['prompt']} {response!r}\n")
    return sum(map(ord, response)) % 7 / 7
