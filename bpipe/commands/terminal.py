"""Write for a person at a terminal: colour, columns as wide as their widest cell, and that something takes long.

In: text, cells. Out: text, plain elsewhere.

What reads output by program gets no byte of this. Knows no command.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread

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


@contextmanager
def progress_of(what: str, begins_s: float = 2.0, every_s: float = 1.0) -> Iterator[None]:
    """Say on stderr, if that is a terminal, that something takes longer than two seconds, and for how long it has.

    The line is gone once it is over.
    """
    if not sys.stderr.isatty():
        yield
        return
    over, said, begun = Event(), Event(), time.monotonic()

    def tell() -> None:
        wait_s = begins_s
        while not over.wait(wait_s):
            said.set()
            print(f"\r{what}: {time.monotonic() - begun:.0f} s ", end="", file=sys.stderr, flush=True)
            wait_s = every_s

    teller = Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
        if said.is_set():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
