"""How fast the advantage estimators are: `python bench/advantages.py [responses] [tokens]` (default 4096
2048).

Each estimator of algos.py against the same method written the obvious way: one response at a time, in plain
Python with numbers, as a reader of the paper would, on one thread. "loop" is the loop alone, from lists of
numbers to lists of numbers; "tensors" is with the way from tensors and back, which a caller has to pay too.
Such loops take seconds, so they run on the first 256 responses (whole groups of 8), their time is multiplied
up, and their result is compared with ours. Most of our own time goes into getting the memory of the result,
not into the formula.

GAE must go through the tokens one by one. What it cannot do without is reading its three inputs T times, a
column at a time, as they are given ([B, T], so a column is strided). That time is printed beside GAE's; the
target is 3 times it.
"""
import inspect
import pathlib
import statistics
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import algos  # noqa: E402

GROUP, SUBSET = 8, 256
OPTIONS = {"gamma": 0.99, "lam": 0.95, "norm_adv_by_std": True}


def make_batch(responses, tokens):
    """Outcome rewards at the last token; lengths between a quarter of the width and all of it."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(tokens // 4, tokens + 1, (responses,), generator=generator)
    mask = (torch.arange(tokens) < lengths[:, None]).float()
    rewards = torch.zeros(responses, tokens)
    rewards[torch.arange(responses), lengths - 1] = torch.rand(responses, generator=generator)
    return {"token_level_rewards": rewards, "response_mask": mask, "group": torch.arange(responses) // GROUP,
            "values": torch.randn(responses, tokens, generator=generator) * mask,
            "reward_baselines": torch.rand(responses, generator=generator)}


def as_lists(name, batch):
    """What `name` reads of the batch, as Python numbers."""
    read = inspect.signature(algos.ADVANTAGES[name]).parameters
    return {key: x.tolist() for key, x in batch.items() if key in read}


def members(group):
    rows = {}
    for i, g in enumerate(group):
        rows.setdefault(g, []).append(i)
    return rows


def whitened(rows, mask):
    kept = [x for row, keep in zip(rows, mask) for x, m in zip(row, keep) if m]
    mean, std = statistics.fmean(kept), (statistics.variance(kept) + 1e-8) ** 0.5
    return [[(x - mean) / std * m for x, m in zip(row, keep)] for row, keep in zip(rows, mask)]


def loop_outcome(name, batch):
    """Group estimators, one response after another."""
    rewards, mask, group = batch["token_level_rewards"], batch["response_mask"], batch["group"]
    scores = [sum(row) for row in rewards]
    lengths = [sum(row) for row in mask]
    rows = members(group)
    nonzero = sum(score != 0 for score in scores)
    result = []
    for i, score in enumerate(scores):
        peers = [scores[j] for j in rows[group[i]]]
        others = [scores[j] for j in rows[group[i]] if j != i]
        mean = sum(peers) / len(peers)
        if name == "rloo":
            value = score - sum(others) / len(others)
        elif name == "opo":
            weight = [lengths[j] for j in rows[group[i]]]
            value = score - sum(w * s for w, s in zip(weight, peers)) / sum(weight)
        elif name == "gpg":
            value = len(scores) / nonzero * (score - mean)
        elif name == "grpo":
            value = (score - mean) / (statistics.stdev(peers) + 1e-6)
        elif name == "grpo_passk":
            value = max(0.0, score - max(others)) / (statistics.stdev(peers) + 1e-6)
        else:  # reinforce_plus_plus_baseline
            value = score - mean
        result.append([value * m for m in mask[i]])
    return whitened(result, mask) if name == "reinforce_plus_plus_baseline" else result


def loop_tokens(name, batch):
    """Token estimators: every response backwards, token by token."""
    gamma, lam = (1.0 if name == "remax" else OPTIONS["gamma"]), (OPTIONS["lam"] if name == "gae" else 1.0)
    result = []
    for i, (rewards, mask) in enumerate(zip(batch["token_level_rewards"], batch["response_mask"])):
        values = batch["values"][i] if name == "gae" else [0.0] * len(mask)
        advantages, next_value, following = [0.0] * len(mask), 0.0, 0.0
        for t in reversed(range(len(mask))):
            if mask[t]:
                following = rewards[t] + gamma * next_value - values[t] + gamma * lam * following
                advantages[t], next_value = following, values[t]
        if name == "remax":
            advantages = [(x - batch["reward_baselines"][i]) * m for x, m in zip(advantages, mask)]
        result.append(advantages)
    return result if name == "remax" else whitened(result, batch["response_mask"])


def seconds(function, repeats):
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        best = min(best, time.perf_counter() - start)
    return best, result


def read_columns(*inputs):
    column = torch.empty(len(inputs[0]))
    for t in range(inputs[0].shape[1]):
        for x in inputs:
            column.copy_(x[:, t])


def main():
    responses, tokens = [int(x) for x in sys.argv[1:]] or (4096, 2048)
    torch.set_num_threads(1)
    batch = make_batch(responses, tokens)
    subset = {key: x[:SUBSET] for key, x in batch.items()}
    print(f"{responses} responses x {tokens} tokens, groups of {GROUP}; best of 5 runs")
    print(f"{'estimator':30}{'ours, ms':>10}{'loop, ms':>10}{'ratio':>7}{'tensors, ms':>13}{'ratio':>7}")
    times, scale = {}, responses / SUBSET
    for name in algos.ADVANTAGES:
        loop = loop_tokens if name in ("gae", "remax", "reinforce_plus_plus") else loop_outcome
        times[name], _ = seconds(lambda: algos.advantage(name, batch, OPTIONS), 5)
        reading, lists = seconds(lambda: as_lists(name, subset), 1)
        plain, theirs = seconds(lambda: loop(name, lists), 1)
        writing, theirs = seconds(lambda: torch.tensor(theirs), 1)
        ours, _ = algos.advantage(name, subset, OPTIONS)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        print(f"{name:30}{times[name] * 1e3:10.1f}", end="")
        for total, width in (plain, 10), (reading + plain + writing, 13):
            print(f"{total * scale * 1e3:{width}.0f}{total * scale / times[name]:7.0f}", end="")
        print()
    inputs = [batch[key] for key in ("token_level_rewards", "values", "response_mask")]
    reading, _ = seconds(lambda: read_columns(*inputs), 5)
    print(f"gae takes {times['gae'] / reading:.2f} times the {reading * 1e3:.0f} ms of reading its inputs")


if __name__ == "__main__":
    main()
