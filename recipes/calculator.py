"""A calculator that the model may call: the tool of calculator.yaml."""
import ast
import operator

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
