"""Damage a text or a JSON value. In: a sound one and a source of chance. Out: one that may not be. Knows no format."""

from __future__ import annotations

import copy
import json
import math
import random
import re
from collections.abc import Iterator
from typing import Any

JUNK: tuple[Any, ...] = (
    None,
    [],
    {},
    "",
    "x",
    "1",
    True,
    False,
    -1,
    0,
    1,
    3,
    1.5,
    -0.5,
    1e300,
    -1e300,
    1e-300,
    math.inf,
    math.nan,
)
JUNK = (
    *JUNK,
    "false",
    "\x1b[2J",
    "\ud800",
    10**6,
    10**8,
    10**9,
    10**18,
    10**30,
    10**400,
    -(10**400),
    [1],
    {"a": 1},
    "0F0",
    "9" * 60,
)
TOKENS = [
    "0F0",
    "1B1",
    "0EVICT1",
    "2HOST0",
    "(0F1;0B0)OVERLAP_F_B",
    "0SEND_F0",
    "1RECV_F0",
    "0WAIT_SEND_F0",
    "0UNSHARD",
    "3REDUCE_GRAD",
]
TOKENS += [
    "",
    ",",
    " ",
    "\n",
    "\r\n",
    "9",
    "999999999",
    "-1",
    "\t",
    '"',
    "null",
    "{}",
    "[",
    "٣",
    "\x00",
    "\ufeff",
    "# bpipe ",
]
TOKENS += ["=", "&", "+", ".", "\x1b[31m", "*99999999999999999999", "("]


def damaged_text(text: str, rng: random.Random) -> str:
    """Cut, spliced, with cells exchanged, doubled or taken away, and numbers changed."""
    if rng.random() < 0.01:
        # What takes time by the square of its length shows here.
        place = rng.randrange(len(text) + 1)
        return text[:place] + rng.choice([*TOKENS, "$(", "${X:-", "a\n", "- "]) * 50_000 + text[place:]
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        change = rng.randrange(6)
        if change == 0:
            place = rng.randrange(len(text) + 1)
            text = text[:place] + rng.choice(TOKENS) + text[place + rng.randint(0, 8) :]
        elif change == 1:
            cells = re.split(r"([,\n ])", text)
            one, other = rng.randrange(len(cells)), rng.randrange(len(cells))
            cells[one], cells[other] = cells[other], cells[one]
            text = "".join(cells)
        elif change == 2:
            cells = re.split(r"([,\n ])", text)
            one = rng.randrange(len(cells))
            cells[one : one + 1] = rng.choice([[], [cells[one], ",", cells[one]], [rng.choice(TOKENS)]])
            text = "".join(cells)
        elif change == 3:
            numbers = list(re.finditer("[0-9]+", text))
            if numbers:
                found = rng.choice(numbers)
                new = rng.choice(
                    [
                        str(int(found[0]) + 1),
                        str(max(0, int(found[0][:9]) - 1)),
                        "0",
                        "1",
                        "7",
                        "00",
                        "999999999",
                        "1" * 30,
                        "9" * 400,
                    ]
                )
                text = text[: found.start()] + new + text[found.end() :]
        elif change == 4:
            lines = text.split("\n")
            one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[one], lines[other] = rng.choice(
                [(lines[other], lines[one]), (lines[one], lines[one]), ("", lines[other])]
            )
            text = "\n".join(lines)
        else:
            kinds = list(re.finditer("[FBIWEHRL]", text))
            if kinds:
                place = rng.choice(kinds).start()
                text = text[:place] + rng.choice("FBIWEHRL") + text[place + 1 :]
    return text


def damaged_json(text: str, rng: random.Random) -> str:
    """Return JSON with a value replaced by what it cannot be, or the text itself damaged."""
    if rng.random() < 0.25:
        return damaged_text(text, rng) if rng.random() < 0.95 else rng.choice(["[", '{"a":']) * 100_000
    lines = [json.loads(line) for line in text.splitlines()] if text.count("\n{") else [json.loads(text)]
    for _ in range(rng.choice([1, 1, 2])):
        places = list(_places(lines))
        holder, key = rng.choice(places)
        if rng.random() < 0.15 and isinstance(holder, dict):
            del holder[key]
        else:
            # A copy: the next change may be inside of it.
            holder[key] = copy.deepcopy(rng.choice(JUNK))
    return "".join(json.dumps(line) + "\n" for line in lines)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in list(inner):
        yield value, key
        yield from _places(one)
