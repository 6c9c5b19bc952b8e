"""Write for a person at a terminal: colour, and columns as wide as their widest cell.

In: text, cells. Out: text, plain elsewhere.

What reads output by program gets no byte of this. Knows no command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

BOLD, RED, GREEN = "1", "31", "32"


def is_terminal() -> bool:
    """Return whether standard output is a terminal."""
    return sys.stdout.isatty()


def has_colours() -> bool:
    """Return whether that terminal shows colours and nothing forbids them."""
    return is_terminal() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def paint(text: str, code: str) -> str:
    """Return the text in a colour, where there are colours."""
    return f"\x1b[{code}m{text}\x1b[0m" if has_colours() else text


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Join cells to lines, right-aligned below the first row's titles; by program a column stays as wide as its
    title."""
    widths = [max(map(len, cells)) if is_terminal() else len(cells[0]) for cells in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
