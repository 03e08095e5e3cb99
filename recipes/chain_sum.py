"""The problems of chain_sum.yaml: reasoning-gym's sums and differences of two digits, the rare kind more often."""

NEGATIVE = 0.5  # the share of problems with a negative result; as they come it is 0.2, and tries at them are rare


def problems():
    """Rows of reasoning_gym:chain_sum, 1024 drawn, as many of them kept as give that share."""
    import reasoning_gym
    size = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    rows = reasoning_gym.create_dataset("chain_sum", **size, size=1024, seed=1)
    rows = [{"prompt": row["question"], "answer": row["answer"], "source": "chain_sum"} for row in rows]
    negative = [row for row in rows if int(row["answer"]) < 0]
    others = [row for row in rows if int(row["answer"]) >= 0]
    return negative + others[:round(len(negative) * (1 - NEGATIVE) / NEGATIVE)]
