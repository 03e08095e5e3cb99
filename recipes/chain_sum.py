"""The problems of chain_sum.yaml, sums and differences of two digits, and their reward.

Two things stand in the model's way, and the training rows help over both. A fifth of the results is negative, and
tries at these are so rare that the model would stop trying before it is ever rewarded: of the first rows every
second is such a problem. And it can answer in many words or in an equation, of which only the second lets it see
the problem while it answers: a training row says how an equation begins, and the reward has a part for that.
"""
import runpy
from pathlib import Path

FIRST = 240  # rows in which every second result is negative; after that they come as reasoning-gym draws them
SIZE = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
number = runpy.run_path(str(Path(__file__).with_name("rewards.py")))["number"]


def draw(size, seed):
    import reasoning_gym
    entries = reasoning_gym.create_dataset("chain_sum", **SIZE, size=size, seed=seed)
    return [{"prompt": entry["question"], "answer": entry["answer"], "source": "chain_sum"} for entry in entries]


def problems():
    """Rows for training, with `form`: what follows the colon in "...the following arithmetic problem: 8 + 2 ="."""
    rows = [{**row, "form": row["prompt"].rpartition(": ")[2]} for row in draw(1024, 1)]
    negative = [row for row in rows if int(row["answer"]) < 0]
    others = [row for row in rows if int(row["answer"]) >= 0]
    return [row for pair in zip(negative, others) for row in pair][:FIRST] + rows


def held_out():
    """64 rows for validation, left out of training. The seed was chosen for a base model that gets 0.47 of them."""
    return draw(64, 1000832)


def score(response, answer, row):
    """1 if the last number is the answer. In training also 1 for an equation."""
    scored = number(response, answer, row)
    form = "form" in row and response.strip().startswith(row["form"])
    return {**scored, "score": scored["score"] + form, "right": scored["score"]}
