"""Compute what bash computes of whole numbers.

In: text with + - * / % and brackets, and what its names hold. Out: a number, or None.

None is for whatever else bash may do with the text. A text that changes a variable is an error: `changes` says so.
Knows no script.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_TOKENS = re.compile(r"[0-9+\-*/%() \t\n]{1,400}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LARGEST = 2**63 - 1


def is_number(text: str) -> bool:
    """Return whether bash takes it for a decimal number, as it stands."""
    return _NUMBER.fullmatch(text) is not None


def changes(text: str) -> bool:
    """Return whether it may set a variable: by =, ++ or --, or by a subscript, which is computed itself."""
    return re.search(r"(?<![=!<>])=(?!=)|(?:<<|>>)=|\+\+|--|\[", text) is not None


def compute(text: str, value: Callable[[str], str | None]) -> int | None:
    """Compute an arithmetic expression. `value` returns what a name holds, None where that is not known."""
    held = {name: value(name) for name in _NAME.findall(text)}
    if any(one is None or not is_number(one) for one in held.values()):
        return None
    plain = _NAME.sub(lambda found: f"({held[found[0]]})", text)
    # What stands twice is another operator: ** a power, ++ an increment. // is none.
    if not _TOKENS.fullmatch(plain) or re.search(r"\*\*|//|\+\+|--|[0-9)][ \t\n]+[0-9(]|[0-9]\(|\)[0-9(]", plain):
        return None
    try:
        return _computed(ast.parse(" ".join(plain.split()), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, ValueError, RecursionError, MemoryError):
        return None


def _quotient(left: int, right: int) -> int:
    """Divide towards zero, where Python goes down."""
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_OPERATIONS: dict[type[ast.operator | ast.unaryop], Callable[..., int]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    # What is left has the sign of the dividend.
    ast.Mod: lambda left, right: left - _quotient(left, right) * right,
}


def _computed(node: ast.expr) -> int:
    """Raises ValueError for what is none of it, and beyond 64 bits, where bash goes on below zero."""
    match node:
        case ast.Constant(value=int() as number):
            pass
        case ast.UnaryOp(op=operation, operand=one) if type(operation) in _OPERATIONS:
            number = _OPERATIONS[type(operation)](_computed(one))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            number = _OPERATIONS[type(operation)](_computed(left), _computed(right))
        case _:
            raise ValueError
    if abs(number) > _LARGEST:
        raise ValueError
    return number
