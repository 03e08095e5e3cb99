"""A calculator that the model may call, and problems that need one: calculator.yaml trains on them.

So small a model does not call a tool because it is told that there is one. After a worked example, earlier
turns of the same chat, it answers 22 of the 32 held-out problems rightly by a call before any training.
"""
import ast
import operator

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "903 - 415 + 88"}}\n</tool_call>'
EXAMPLE = [
    {"role": "user", "content": "State the final answer to the following arithmetic problem: 903 - 415 + 88 ="},
    {"role": "assistant", "content": CALL},
    {"role": "tool", "content": "576"},
    {"role": "assistant", "content": "576"},
]
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: Numbers with + - * / and parentheses, like "12 + 34 - 5".
    """
    return str(value(ast.parse(expression, mode="eval").body))


def value(node):
    """What a parsed expression amounts to. Numbers and four operators are all that there is: never eval()."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand)
    raise ValueError("only numbers, + - * / and parentheses can be computed")


def draw(size, seed):
    """Rows with sums and differences of two or three numbers, of two or three digits each."""
    import reasoning_gym
    shape = {"min_terms": 2, "max_terms": 3, "min_digits": 2, "max_digits": 3}
    entries = reasoning_gym.create_dataset("chain_sum", **shape, size=size, seed=seed)
    return [{"prompt": [*EXAMPLE, {"role": "user", "content": entry["question"]}], "answer": entry["answer"]}
            for entry in entries]


def problems():
    return draw(2000, 1)


def held_out():
    return draw(32, 1000001)
