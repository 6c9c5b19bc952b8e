"""Damage a text or a JSON value.

The input is valid, the result may not be. Independent of formats.
"""

import copy
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

JUNK: tuple[Any, ...] = (None, [], {}, "", "x", "1", "false", "0F0", "9" * 60, "\x1b[2J", "\ud800", [1], {"a": 1})
JUNK += (True, False, -1, 0, 1, 3, 1.5, -0.5, 1e300, -1e300, 1e-300, math.inf, math.nan)
JUNK += (10**6, 10**8, 10**9, 10**18, 10**30, 10**400, -(10**400))
WORDS = """
0F0 1B1 0EVICT1 2HOST0 (0F1;0B0)OVERLAP_F_B 0SEND_F0 1RECV_F0 0WAIT_SEND_F0 0UNSHARD 3REDUCE_GRAD
9 999999999 -1 null " {} [ ٣ = & + . ( *99999999999999999999
"""
TOKENS = (*WORDS.split(), "", ",", " ", "\n", "\r\n", "\t", "\x00", "\ufeff", "# bpipe ", "\x1b[31m")
# Long runs of these reveal code whose time grows with the square of the length.
REPEATED = (*TOKENS, "$(", "${X:-", "a\n", "- ")
LETTERS = "FBIWEHRL"


def damaged_text(text: str, rng: random.Random) -> str:
    """Return the text cut or spliced, with cells exchanged, doubled or removed, or with numbers changed."""
    if rng.randrange(100) == 99:
        place = rng.randrange(len(text) + 1)
        return text[:place] + rng.choice(REPEATED) * 50_000 + text[place:]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        text = rng.choice(CHANGES)(text, rng)
    return text


def damaged_json(text: str, rng: random.Random) -> str:
    """Return JSON with impossible values, or with the text itself damaged."""
    way = rng.randrange(80)
    if way >= 60:
        return damaged_text(text, rng) if way < 79 else rng.choice(("[", '{"a":')) * 100_000
    lines = [json.loads(line) for line in text.splitlines()] if text.count("\n{") else [json.loads(text)]
    for _ in range(rng.choice((1, 1, 2))):
        holder, key = rng.choice(list(_places(lines)))
        if isinstance(holder, dict) and rng.randrange(7) == 6:
            del holder[key]
        else:
            # Copy it, because the next change may be inside of it.
            holder[key] = copy.deepcopy(rng.choice(JUNK))
    return "".join(json.dumps(line) + "\n" for line in lines)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(inner):
        yield value, key
        yield from _places(child)


def _splice(text: str, rng: random.Random) -> str:
    place = rng.randrange(len(text) + 1)
    return text[:place] + rng.choice(TOKENS) + text[place + rng.randint(0, 8) :]


def _exchange(text: str, rng: random.Random) -> str:
    cells = re.split(r"([,\n ])", text)
    first, second = rng.randrange(len(cells)), rng.randrange(len(cells))
    cells[first], cells[second] = cells[second], cells[first]
    return "".join(cells)


def _replace_cell(text: str, rng: random.Random) -> str:
    cells = re.split(r"([,\n ])", text)
    index = rng.randrange(len(cells))
    cells[index : index + 1] = rng.choice(([], [cells[index], ",", cells[index]], [rng.choice(TOKENS)]))
    return "".join(cells)


def _replace_number(text: str, rng: random.Random) -> str:
    numbers = list(re.finditer("[0-9]+", text))
    if not numbers:
        return text
    old = rng.choice(numbers)
    nearby = (str(int(old[0]) + 1), str(max(0, int(old[0][:9]) - 1)))
    new = rng.choice((*nearby, "0", "1", "7", "00", "999999999", "1" * 30, "9" * 400))
    return text[: old.start()] + new + text[old.end() :]


def _exchange_lines(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
    ways = ((lines[second], lines[first]), (lines[first], lines[first]), ("", lines[second]))
    lines[first], lines[second] = rng.choice(ways)
    return "\n".join(lines)


def _replace_letter(text: str, rng: random.Random) -> str:
    kinds = list(re.finditer(f"[{LETTERS}]", text))
    if not kinds:
        return text
    place = rng.choice(kinds).start()
    return text[:place] + rng.choice(LETTERS) + text[place + 1 :]


CHANGES: tuple[Callable[[str, random.Random], str], ...] = (
    _splice,
    _exchange,
    _replace_cell,
    _replace_number,
    _exchange_lines,
    _replace_letter,
)
