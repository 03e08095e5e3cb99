"""Reward functions for tests/test_train.py."""


def raises_on_zero(response, answer, row):
    if row["prompt"].startswith("0"):
        raise ValueError("no zeros please")
    return float(response == answer)


def raises(response, answer, row):
    return 1 / 0
