"""Reward functions that `reward.function` takes by their name alone. Yours may stand in any file.

Each takes the response (text), the row's answer and the row as it was found, and returns a float, None for "not
scored", or a dict with "score", perhaps "prediction" (for maj@n), and other numbers, which become metrics.
"""
import math as mathematics
import re


def none(response, answer, row):
    """Nothing: the score is the reward model's."""
    return 0.0


def exact(response, answer, row):
    """1 if the response is the answer, but for white space around it."""
    return float(response.strip() == str(answer).strip())


def last_number(text):
    """The first number after the last `####`, or else the last one; NaN without any. 1,234 is one number."""
    _, mark, rest = text.rpartition("####")
    sign, whole = r"((?:(?<!\w)-)?)\$?", r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
    numbers = re.findall(rf"{sign}({whole}|(?<![\w.])\.\d+)", rest)
    return float("".join(numbers[0 if mark else -1]).replace(",", "")) if numbers else mathematics.nan


def number(response, answer, row):
    """1 if the last number of the response is the answer's."""
    found = last_number(response)
    return {"score": mathematics.isclose(found, last_number(str(answer))), "prediction": found}


def math(response, answer, row):
    """1 if math-verify finds the two equal. Its own timeouts need the main thread; `reward.timeout` is enough."""
    from math_verify import grader, parse, parser, verify
    grader.logger.disabled = parser.logger.disabled = True  # they warn that there are no timeouts
    truth = parse(f"${answer}$", parsing_timeout=None) or parse(str(answer), parsing_timeout=None)
    found = parse(response, parsing_timeout=None)
    return {"score": verify(truth, found, timeout_seconds=None), "prediction": found[-1] if found else ""}


def reasoning_gym(response, answer, row):
    """reasoning-gym's own score of <answer>...</answer>, or of the whole response where there is no tag."""
    import reasoning_gym as gym
    found = gym.utils.extract_answer(response) or response.strip()
    return gym.get_score_answer_fn(row["metadata"]["source_dataset"])(found, row)
