"""Strict reading of JSON of unknown origin, and of single values of it.

No file may have NaN, infinity, repeated keys, endless nesting, or values of another type or out of range: each is a
ValueError of one line.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

# Above any count, duration or unix time, and any size in bytes, that a file of ours could contain.
LARGEST = 10**12
LARGEST_BYTES = 2**60
# Control characters except tabs and newlines, marks that turn the direction of text, and halves of characters.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def load_json(text: str | bytes) -> object:
    """Read the value of a whole text; a ValueError says where it stops being JSON."""
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        return json.loads(decoded, object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice[:40]!r} appears twice")
    return values


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a finite number")


def an_object(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _error(name, value, "must be an object")
    return value


def a_list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise _error(name, value, "must be a list")
    return value


def a_text(value: object, name: str) -> str:
    """Read text, made printable."""
    if not isinstance(value, str):
        raise _error(name, value, "must be text")
    return printable(value)


def printable(text: str) -> str:
    r"""Return text of unknown origin with escapes such as `\x1b` for what would steer a terminal or a page."""
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def a_whole(value: object, name: str, least: int = 0, most: int = LARGEST) -> int:
    """Read a whole number from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise _error(name, value, f"must be a whole number from {least} to {most}")
    return value


def a_number(value: object, name: str, least: float = 0, most: float = LARGEST) -> float:
    """Read a finite number from `least` to `most`."""
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        raise _error(name, value, f"must be a number from {least:g} to {most:g}")
    return float(value)  # type: ignore[arg-type]


def a_flag(value: object, name: str) -> bool:
    if type(value) is not bool:
        raise _error(name, value, "must be true or false")
    return value


def _error(name: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"{name} is {repr(value)[:40]}, but {wanted}")
