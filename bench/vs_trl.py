"""Our step against TRL's, side by side: python bench/vs_trl.py [steps]  (default 6)

SmolLM2-135M, 8 prompts of about 45 tokens, 8 completions each of at most 32 tokens, GRPO without a reference, AdamW
with the same settings. The two take turns, step by step, in one run: this machine's speed changes from minute to
minute. TRL's GRPOTrainer runs in an environment of its own (bench/.trl, made on first use), with its faster settings:
no gradient checkpointing, one pass for old and new log-probs, float32 or bfloat16, with or without the large pages of
memory that train_ppo.py asks for, whatever was fastest in trials of two steps before (all at once would not fit into
24 GiB). Ours is the default launch: Ray, an FSDP2 worker, the SGLang engine in processes of its own, which
keeps its memory (rollout.release=false). A step holds sync, rollout, rewards, update. The first step of each is not
counted. docs/vs_trl.svg is drawn from the medians. The last line is `ratio X`, TRL's time over ours.
"""
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
ROOT, ENVIRONMENT = HERE.parent.parent, HERE.parent / ".trl"
PACKAGES = ["trl==1.16.0", "torch==2.13.0"]
PROMPTS, COMPLETIONS, TOKENS, LR = 8, 8, 32, 1e-6
SMALL = ", pages of 4 KiB"
TASK = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&size=512&seed=1"


# ---- TRL, in a process of its environment ------------------------------------------------------------------


def peer(path, prompts, dtype, steps):
    """One GRPOTrainer. A line on stdin lets it take a step; it answers with a JSON line on stdout."""
    import datasets
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seconds, out = {"generate": 0.0}, sys.stdout
    sys.stdout = sys.stderr  # what libraries print is not an answer

    class Turns(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            sys.stdin.readline()
            seconds.update(start=time.perf_counter(), generate=0.0)

        def on_step_end(self, *args, **kwargs):
            total = time.perf_counter() - seconds["start"]
            length = trainer._metrics["train"]["completions/mean_length"][-1]
            print(json.dumps({"total": total, "generate": seconds["generate"], "length": length}), file=out, flush=True)

    options = GRPOConfig(
        output_dir="/tmp/trl", per_device_train_batch_size=PROMPTS * COMPLETIONS, num_generations=COMPLETIONS,
        max_completion_length=TOKENS, max_steps=steps, learning_rate=LR, weight_decay=0.01, temperature=1.0,
        lr_scheduler_type="constant", gradient_checkpointing=False, use_cpu=True, bf16=False, report_to=[],
        save_strategy="no", logging_steps=1000, disable_tqdm=True, beta=0.0, model_init_kwargs={"dtype": dtype},
    )
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in json.loads(Path(prompts).read_text())]
    trainer = GRPOTrainer(
        model=path, args=options, train_dataset=datasets.Dataset.from_list(rows), callbacks=[Turns()],
        reward_funcs=lambda completions, **_: [float("1" in c[0]["content"]) for c in completions],
    )
    generate = trainer._generate

    def timed(*args, **kwargs):
        start = time.perf_counter()
        result = generate(*args, **kwargs)
        seconds["generate"] += time.perf_counter() - start
        return result

    trainer._generate = timed
    trainer.train()


class Peer:
    """A TRL process and the steps that it has taken."""

    def __init__(self, path, prompts, trial, steps):
        python, pipe, environment = ENVIRONMENT / "bin" / "python", subprocess.PIPE, dict(os.environ)
        dtype = trial.removesuffix(SMALL)
        if dtype != trial:
            del environment["GLIBC_TUNABLES"]  # which train_ppo.run has set
        command = [str(word) for word in (python, HERE, "--peer", path, prompts, dtype, steps)]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.steps = []

    def step(self):
        print(file=self.process.stdin, flush=True)
        self.steps.append(json.loads(self.process.stdout.readline()))

    def end(self):
        self.process.kill()
        self.process.wait()


# ---- Ours, and the turns -----------------------------------------------------------------------------------


def reward(response, answer, row):
    return float("1" in response)


def main(steps=6):
    if not ENVIRONMENT.exists():
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
        subprocess.run([ENVIRONMENT / "bin" / "python", "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    sys.path.insert(0, str(ROOT))
    import train_ppo
    from config import check, load

    best = faster_dtype()
    config = load([ROOT / "recipes" / "chain_sum.yaml"], [
        f"data.train={TASK}", "data.val=null", "data.batch_size=8", "data.shuffle=true", "rollout.n=8",
        f"rollout.max_response_length={TOKENS}", "algorithm.dynamic_sampling=0", "actor.mini_batch_size=64",
        f"actor.lr={LR}", "actor.schedule=constant", "actor.min_lr_ratio=0.0", f"reward.function={HERE}:reward",
        f"rollout.dtype={best}", f"actor.compute_dtype={best}", f"trainer.steps={steps}", "validation.every=0",
        "trainer.dir=/tmp/vs_trl", "rollout.release=false",
    ])
    check(config)
    ours, peers = [], {}  # in the order in which they were started

    class Turns(train_ppo.Trainer):
        def fit(self):
            prompts = Path("/tmp/vs_trl/prompts.json")
            prompts.write_text(json.dumps([messages[-1]["content"] for messages in self.prompts.rows["prompt"]]))
            fastest = faster(["float32", "bfloat16"], self.paths["actor"], prompts, peers)
            fastest = faster([fastest, fastest + SMALL], self.paths["actor"], prompts, peers)
            peers["turns"] = peer = Peer(self.paths["actor"], prompts, fastest, steps)
            for self.step in range(1, steps + 1):
                self.train_step()
                ours.append(self.metrics)
                self.metrics = {}
                peer.step()
                print(f"step {self.step}: ours {ours[-1]['time/step']:.1f} s, TRL {peer.steps[-1]['total']:.1f} s", file=sys.stderr)

    train_ppo.Trainer = Turns
    try:
        train_ppo.run(config)
    finally:
        for peer in peers.values():
            peer.end()
    report(ours[1:], peers, best)


def faster(trials, path, prompts, peers):
    """The trial with the faster second step. Those that are not yet in `peers` are run."""
    for trial in trials:
        if trial not in peers:
            peers[trial] = peer = Peer(path, prompts, trial, 2)
            peer.step()
            peer.step()
            peer.end()
    return min(trials, key=lambda trial: peers[trial].steps[1]["total"])


def faster_dtype():
    """The precision in which this machine multiplies faster."""
    import torch

    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(1024, 576, dtype=dtype), torch.ones(576, 1536, dtype=dtype)
        a @ b
        start = time.perf_counter()
        for _ in range(10):
            a @ b
        seconds[str(dtype).removeprefix("torch.")] = time.perf_counter() - start
    return min(seconds, key=seconds.get)


def report(ours, peers, dtype):
    """Medians and ratios, for people; the last line for scripts."""
    def median(rows, name):
        return statistics.median(row[name] for row in rows)

    table = {f"ours, {dtype}": {
        "total": median(ours, "time/step"),
        "generate": median([{"t": row["time/sync"] + row["time/rollout"]} for row in ours], "t"),
        "length": median(ours, "response/length_mean"),
    }}
    for name, peer in peers.items():
        rows = peer.steps[1:]
        name = f"in a trial, {name}" if len(rows) == 1 else "in turns, the fastest of these"
        table[f"TRL {name}"] = {key: median(rows, key) for key in rows[0]}
    print("| | step (s) | generate, with sync (s) | the rest (s) | tokens written per s |\n| --- | --- | --- | --- | --- |")
    for name, row in table.items():
        speed = PROMPTS * COMPLETIONS * row["length"] / row["total"]
        print(f"| {name} | {row['total']:.1f} | {row['generate']:.1f} | {row['total'] - row['generate']:.1f} | {speed:.0f} |")
    mine, *_, best = table.values()
    draw({"kilo-ppo": mine, "TRL": best})
    for part in ("generate", "rest"):
        a, b = (row["generate"] if part == "generate" else row["total"] - row["generate"] for row in (best, mine))
        print(f"{part}: {a / b:.2f} times")
    print(f"ratio {best['total'] / mine['total']:.2f}")


def draw(table):
    """The bars of docs/vs_trl.svg, of {name: a row of the table}."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 1.8))
    names, generate = list(table), [row["generate"] for row in table.values()]
    rest = [row["total"] - row["generate"] for row in table.values()]
    axes.barh(names, generate, label="generate, with weight sync")
    axes.barh(names, rest, left=generate, label="rewards and update")
    axes.invert_yaxis()
    axes.set_xlabel("median step (s): SmolLM2-135M, 64 completions of at most 32 tokens, 2 cores")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "vs_trl.svg")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        peer(*sys.argv[2:5], int(sys.argv[5]))
    else:
        main(*map(int, sys.argv[1:]))
