"""A guessing game, learned from nothing: the toy's model guesses a digit and hears whether it is higher or lower.

`Game` is the interaction, `secrets` are the rows, and `build` makes the model: it has two more words than toy.py's
and a chat template in which only the model's turns end with a token.
"""
from recipes import toy

WORDS = [*toy.WORDS, "?", ">", "<"]
TEMPLATE = ("{% for message in messages %}{{ message['content'] }}"
            "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}")


def build():
    return toy.build(toy.FOLDER.with_name("toy_guess"), WORDS, TEMPLATE)


def secrets():
    """One row per secret digit. The prompt is the same for all; the reward is the interaction's."""
    return [{"prompt": "?", "answer": str(secret)} for secret in range(10)]


class Game:
    """The other player. Its reward is 1 for the secret, less `haste` for every guess before."""

    def __init__(self, haste=0.1):
        self.haste, self.guesses = haste, 0

    def create(self, row):
        self.secret = int(row["answer"])

    def __call__(self, messages, row):
        """(what it says, whether the game is over, the reward for this guess)."""
        guess = messages[-1]["content"]
        self.guesses += 1
        if not guess.isdigit() or len(guess) > 1:
            return "?", False, 0.0
        if int(guess) == self.secret:
            return "", True, 1.0 - self.haste * (self.guesses - 1)
        return (">" if self.secret > int(guess) else "<"), False, 0.0
