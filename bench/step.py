"""Where a step's time goes: python bench/step.py [steps]  (default 6)

Trains recipes/chain_sum.yaml for some steps without validation; medians, the first step left out. Two targets: what is
neither the engine nor a model (rewards, advantages, records, the controller itself) takes under 5 % of a step, and a
sync at most 3 times as long as copying the weights once in memory, into pages that are new, as the engine's are.
"""
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
PLACE = Path("/tmp/step")
MODELS = ("time/sync", "time/rollout", "time/update_actor")


def copy_seconds():
    sys.path.insert(0, str(ROOT))
    import data

    path = data.resolve_model(f"{ROOT}/recipes/smollm2.py:build")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    weights, seconds = [parameter.detach() for parameter in model.parameters()], []
    for _ in range(5):
        start = time.perf_counter()
        copies = [weight.clone() for weight in weights]
        seconds.append(time.perf_counter() - start)
        del copies
    return statistics.median(seconds)


def main(steps=6):
    shutil.rmtree(PLACE, ignore_errors=True)
    words = [f"trainer.steps={steps}", f"trainer.dir={PLACE}", "data.val=null", "validation.every=0"]
    command = [sys.executable, "train_ppo.py", "--config", "recipes/chain_sum.yaml", *words]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (PLACE / "metrics.jsonl").read_text().splitlines()][1:]
    phases = {name: statistics.median(row[name] for row in rows) for name in rows[0] if name.startswith("time/")}
    whole = phases.pop("time/step")
    print("| phase | s | share |\n| --- | --- | --- |")
    for name, seconds in phases.items():
        print(f"| {name} | {seconds:.3f} | {seconds / whole:.1%} |")
    print(f"| time/step | {whole:.3f} | |")
    print(f"outside engine and models: {statistics.median(1 - sum(row[n] for n in MODELS) / row['time/step'] for row in rows):.1%}")
    copy = copy_seconds()
    print(f"the weights are copied in {copy:.3f} s; a sync takes {phases['time/sync'] / copy:.1f} times as long")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
