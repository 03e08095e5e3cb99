"""The problems of chain_sum.yaml: reasoning-gym's sums and differences of two digits, in an order that helps."""

FIRST = 100  # rows in which every second result is negative; after that they come as reasoning-gym draws them


def problems():
    """1,124 rows of reasoning_gym:chain_sum. A fifth of the results is negative, and the model's tries at these
    are so rare that it would stop trying before it is ever rewarded; so it meets them more often at first."""
    import reasoning_gym
    size = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    rows = reasoning_gym.create_dataset("chain_sum", **size, size=1024, seed=1)
    rows = [{"prompt": row["question"], "answer": row["answer"], "source": "chain_sum"} for row in rows]
    negative = [row for row in rows if int(row["answer"]) < 0]
    others = [row for row in rows if int(row["answer"]) >= 0]
    return [row for pair in zip(negative, others) for row in pair][:FIRST] + rows
