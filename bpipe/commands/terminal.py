"""Print text, tables and progress for a person.

A terminal gets its own width, and colours unless NO_COLOR or TERM forbid them; anything else gets 120 columns without
colours. Rich is imported only to print, so that modules of commands load without it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Columns if output is not a terminal.
WIDTH = 120
# Cells of right-aligned columns.
_NUMBER = re.compile(r"(-|[-+]?\d[\d.,]*( to \d[\d.,]*)?( ?[x%])?)?")
# Texts up to this length are not broken either; longer ones get at least this width.
_SHORT = 24
# Seconds between updates of the progress, which a search reports millions of times.
_EVERY_S = 0.1
_LINE_EVERY_S = 5

Progress = Callable[[str, int, int], None]


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    is_tty = stream.isatty()
    has_colours = is_tty and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return Console(
        file=stream,
        width=None if is_tty else WIDTH,
        force_terminal=is_tty,
        force_jupyter=False,
        color_system="auto" if has_colours else None,
        highlight=False,
        markup=False,
        emoji=False,
    )


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], styles: Sequence[str] = ()) -> Table:
    """Return a table without its empty columns. Columns of numbers are right-aligned and never broken; long texts wrap."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    columns = [(title, cells) for title, *cells in zip(titles, *rows, strict=True) if any(cells)]
    for title, cells in columns:
        are_numbers, width = all(map(_NUMBER.fullmatch, cells)), max(map(len, cells))
        least = width if are_numbers else min(width, _SHORT)
        shown.add_column(title, justify="right" if are_numbers else "left", min_width=max(least, len(title)))
    for row, style in zip_longest(zip(*(cells for _, cells in columns), strict=True), styles):
        shown.add_row(*row, style=style)
    return shown


class Flags(str):
    """Text with flags that are copied to a shell: a long line is broken before a flag, with a backslash."""

    def fitted(self, width: int) -> str:
        """Return lines that a shell reads as one, as wide as `width` where the flags allow it."""
        first, *flags = re.split(r" (?=--)", self)
        lines, indent = [first], " " * (len(self) - len(self.lstrip()) + 4)
        for flag in flags:
            if len(lines[-1]) + len(flag) + 1 <= width - 2:
                lines[-1] += f" {flag}"
            else:
                lines.append(f"{indent}{flag}")
        return " \\\n".join(lines)


def tell(*parts: str | Table) -> None:
    """Print tables and lines of text. Long lines wrap, indented as they begin."""
    console = _console(sys.stdout)
    with console.capture() as capture:
        for part in parts:
            if isinstance(part, Flags):
                console.print(part.fitted(console.width), soft_wrap=True)
            elif isinstance(part, str):
                indent = " " * (len(part) - len(part.lstrip()))
                lines = textwrap.wrap(
                    part, console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
                )
                console.print("\n".join(lines), soft_wrap=True)
            else:
                # As wide as its numbers demand, even on a narrower terminal.
                width, unlimited = console.width, console.options.update(max_width=10_000)
                console.width = max(width, console.measure(part, options=unlimited).minimum)
                console.print(part, crop=False)
                console.width = width
    print("\n".join(line.rstrip() for line in capture.get().split("\n")), end="")


def _every(seconds: float, shown_at: float, show: Progress) -> Progress:
    """Return what shows progress no more often than every so many seconds after `shown_at`."""

    def progress(what: str, done: int, total: int) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at > seconds:
            shown_at = time.monotonic()
            show(what, done, total)

    return progress


@contextmanager
def progress_of(what: str) -> Iterator[Progress]:
    """Show progress on stderr until the block ends: on a terminal as a bar, elsewhere as a line every few seconds."""
    if not sys.stderr.isatty():
        line = "{}: {}, {} of {}"
        yield _every(
            _LINE_EVERY_S, time.monotonic(), lambda *at: print(line.format(what, *at), file=sys.stderr, flush=True)
        )
        return
    from rich.progress import Progress, TimeElapsedColumn

    with Progress(
        *Progress.get_default_columns()[:3], TimeElapsedColumn(), console=_console(sys.stderr), transient=True
    ) as bar:
        task = bar.add_task(what, total=None)
        yield _every(
            _EVERY_S, 0.0, lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
        )


def print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=1, allow_nan=False)
    print()
