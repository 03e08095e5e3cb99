"""How a step grows: python bench/growth.py

The time of a whole step against the number of responses (64, 128, 256), their length (16, 64, 256 tokens, which the
task makes full use of) and the ranks (1, 2), with SmolLM2 in the faster of float32 and bfloat16. Each is the second
step of a run. The fit is the exponent of time ~ size^e over the first and the last column: 1 is linear, less is better.
"""
import functools
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

from vs_trl import faster_dtype

ROOT = Path(__file__).resolve().parent.parent
PLACE = Path("/tmp/growth")


def stories():
    """Prompts whose answers are as long as they may be."""
    topics = ["the sea", "a dog", "an old house", "the moon", "a train", "two friends", "a storm", "the city"]
    return [{"prompt": f"Write a long story about {topic}, number {n}.", "answer": ""} for topic in topics for n in range(8)]


def length(response, answer, row):
    return len(response) % 7 / 7


@functools.cache
def step_seconds(prompts, tokens, ranks, dtype):
    shutil.rmtree(PLACE, ignore_errors=True)
    words = [
        f"data.train={__file__}:stories", "data.val=null", "validation.every=0", "data.shuffle=true",
        f"data.batch_size={prompts}", "rollout.n=8", f"rollout.max_response_length={tokens}",
        f"reward.function={__file__}:length", "algorithm.dynamic_sampling=0", f"actor.mini_batch_size={prompts * 8}",
        f"rollout.dtype={dtype}", f"actor.compute_dtype={dtype}", "rollout.kv_tokens=98304",
        f"pools.main.devices_per_node={ranks}", "trainer.steps=2", f"trainer.dir={PLACE}",
    ]
    command = [sys.executable, "train_ppo.py", "--config", "recipes/chain_sum.yaml", *words]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (PLACE / "metrics.jsonl").read_text().splitlines()]
    print(f"  {prompts * 8} responses of {rows[-1]['response/length_mean']:.0f} tokens, {ranks} ranks: "
          f"{[round(row['time/step'], 1) for row in rows]}", file=sys.stderr)
    return rows[1]["time/step"]


def main():
    base = {"prompts": 8, "tokens": 32, "ranks": 1, "dtype": faster_dtype()}
    print(f"| growing, {base['dtype']} | | | | exponent |\n| --- | --- | --- | --- | --- |")
    for name, sizes in (("prompts", (8, 16, 32)), ("tokens", (16, 64, 256)), ("ranks", (1, 2))):
        seconds = [step_seconds(**{**base, **({"prompts": 4} if name == "tokens" else {}), name: size}) for size in sizes]
        exponent = math.log(seconds[-1] / seconds[0]) / math.log(sizes[-1] / sizes[0])
        cells = [f"{size}: {second:.1f} s" for size, second in zip(sizes, seconds)] + [""] * (3 - len(sizes))
        print("| " + " | ".join([name, *cells, f"{exponent:.2f}"]) + " |", flush=True)


if __name__ == "__main__":
    main()
