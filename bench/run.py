"""Runs the measurements one after another and writes bench/results.md: make bench

Each is a program of its own in this folder, and its output stands under its name as it was printed.
"""
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAMS = ("vs_trl 4", "step", "decode", "decode 64 32 bfloat16", "logprob_memory", "agent_overhead", "startup", "growth",
            "advantages", "size")
PACKAGES = ("torch", "transformers", "sglang", "ray")


def machine():
    model = subprocess.getoutput("lscpu | sed -n 's/^Model name: *//p'")
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {platform.platform()}"


def main(*programs):
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    parts = [f"# Measured on {time.strftime('%Y-%m-%d')}\n\n{machine()}; Python {platform.python_version()}, {versions}.\n"]
    for program in programs or PROGRAMS:
        start = time.monotonic()
        name, *words = program.split()
        done = subprocess.run([sys.executable, HERE / f"{name}.py", *words], stdout=subprocess.PIPE, text=True)
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        took = f"`python {' '.join([f'bench/{name}.py', *words])}`, {time.monotonic() - start:.0f} s, exit code {done.returncode}"
        parts.append(f"## {program}\n\n{took}\n\n```\n" + "\n".join(lines) + "\n```\n")
        (HERE / "results.md").write_text("\n".join(parts))
        print(parts[-1], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
