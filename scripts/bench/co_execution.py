"""Measure what co-execution gains and costs: steps of one network plainly, beside Python, and lazily, taking turns.

In: sizes. Out: a table, and JSON with --json: for each kind and share of Python's work in a step, as part of the plain
step's time without any, the medians and quartiles over rounds of how many times as fast a step is co-executed, and
lazily, as plainly within that round. Work is done between a step's layers: "text" counts words and writes lines, as
tokenizers and logs do, and keeps the interpreter's lock; "unpacking" decompresses, as reading data does, and lets go of
it.

Wall clock, for overlap is nothing else; so the machine must have a free core for each side, and torch gets one thread.
On cores that others use too, two threads get more of them than one, and a gain may be that: the plain side's share of a
core is printed, and should be near 1. Losses must be equal to the bit. Operations take milliseconds here, as a device's
do; with --width 64 they take as long as issuing them.

What it cannot show: anything of a GPU, whose queue runs beside Python by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import terra

SHARES = (0.5, 1.0)
# Runner of each way.
WAYS = {"beside": "threaded", "lazily": "lazy"}
# Warm-up and traces, and blocks' programs are made in the first co-executed one.
FIRST = 5


_WORDS = (
    "a",
    "step",
    "of",
    "the",
    "training",
    "has",
    "come",
    "to",
    "its",
    "end",
    "and",
    "this",
    "is",
    "what",
    "it",
    "lost",
)
_PACKED = zlib.compress(bytes(range(256)) * 512)


def text(count: int) -> int:
    """Holds the interpreter's lock."""
    seen: dict[str, int] = {}
    for number in range(count):
        word = _WORDS[number % len(_WORDS)]
        seen[word] = seen.get(word, 0) + len(f"{number} {word}")
    return sum(seen.values())


def unpacking(count: int) -> int:
    """Lets go of the interpreter's lock."""
    return sum(len(zlib.decompress(_PACKED)) for _ in range(count))


Work = Callable[[int], int]
# With a number of turns that takes some tens of milliseconds.
WORKS: dict[Work, int] = {text: 100_000, unpacking: 300}


def training(width: int, layers: int, batch: int) -> Callable[[Work, int], torch.Tensor]:
    """Return a step that trains, and does `count` turns of work between its layers."""
    torch.manual_seed(1)
    parts = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(layers)]
    optimizer = torch.optim.SGD([each for part in parts for each in part.parameters()], lr=1e-3)
    given = torch.randn(batch, width)

    def step(work: Work, count: int) -> torch.Tensor:
        hidden = given
        for part in parts:
            work(count // layers)
            hidden = part(hidden)
        optimizer.zero_grad()
        loss = hidden.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class Way:
    """One way to run steps; `session` is None for the plain one."""

    def __init__(self, options: argparse.Namespace, session: terra.Session | None) -> None:
        self._step, self._session = training(options.width, options.layers, options.batch), session
        self.losses: list[torch.Tensor] = []
        self.wall_s = self.processor_s = 0.0

    def run(self, steps: int, work: Work = text, count: int = 0) -> float:
        """Return the seconds per step."""
        start, processor = time.perf_counter(), time.process_time()
        with self._session.ahead() if self._session else contextlib.nullcontext():
            for _ in range(steps):
                with self._session or contextlib.nullcontext():
                    self.losses.append(self._step(work, count))
        took_s = time.perf_counter() - start
        self.wall_s += took_s
        self.processor_s += time.process_time() - processor
        return took_s / steps


def _rounds(options: argparse.Namespace, ways: list[Way], work: Work, turns: int) -> list[dict[Way, float]]:
    """Return the seconds of every way, in an order that turns from round to round."""
    rounds = []
    for number in range(options.rounds):
        first = number % len(ways)
        rounds.append({way: way.run(options.steps, work, turns) for way in ways[first:] + ways[:first]})
    return rounds


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Return the rows, and the plain side's share of a core."""
    with contextlib.ExitStack() as stack:
        sessions = {
            name: stack.enter_context(contextlib.closing(terra.Session(runner)))  # type: ignore[arg-type]
            for name, runner in WAYS.items()
        }
        plain = Way(options, None)
        beside = {name: Way(options, session) for name, session in sessions.items()}
        for way in (plain, *beside.values()):
            way.run(FIRST)
        step_s = min(plain.run(options.steps) for _ in range(3))
        for way in beside.values():
            way.run(3 * options.steps)
        kinds = ((text, 0.0), *itertools.product(WORKS, SHARES))
        rows = [_row(options, plain, beside, work, share, step_s) for work, share in kinds]
        for way in beside.values():
            assert all(torch.equal(one, other) for one, other in zip(plain.losses, way.losses, strict=True)), (
                "losses differ"
            )
        assert all(session.fallbacks == 0 for session in sessions.values())
    return rows, plain.processor_s / plain.wall_s


def _row(
    options: argparse.Namespace, plain: Way, beside: dict[str, Way], work: Work, share: float, step_s: float
) -> dict[str, Any]:
    """One sort of work beside the steps, whose Python takes a share of a plain step's time."""
    turn_s = min(_timed(work, WORKS[work]) for _ in range(3)) / WORKS[work]
    rounds = _rounds(options, [plain, *beside.values()], work, int(step_s * share / turn_s))
    row: dict[str, Any] = {"python": share, "work": work.__name__ if share else "none"}
    row["plain_ms"] = spread([took[plain] * 1e3 for took in rounds])
    return row | {name: spread([took[plain] / took[way] for took in rounds]) for name, way in beside.items()}


def _timed(do: Callable[[int], object], count: int) -> float:
    start = time.perf_counter()
    do(count)
    return time.perf_counter() - start


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    ordered = sorted(values)
    first, median, third = (ordered[round(part * (len(ordered) - 1))] for part in (0.25, 0.5, 0.75))
    return first, median, third


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10, help="in each turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, core = measure(options)
    print(
        f"{options.layers} layers {options.width} wide, {options.batch} rows; {os.cpu_count()} cores, {core:.2f} of "
        f"one for the plain side"
    )
    print("times as fast as plainly, median (quartiles)")
    print("Python's work     plain ms per step        " + "".join(f"{name:23}" for name in WAYS))
    for row in rows:
        words = (
            f"{middle:7.2f} ({first:.2f} to {third:.2f})"
            for first, middle, third in (row[name] for name in ("plain_ms", *WAYS))
        )
        print(f"{row['work']:9} {row['python']:4.0%}   {'   '.join(words)}")
    if options.json:
        facts = {
            "machine": platform.platform(),
            "torch": torch.__version__,
            "options": vars(options),
            "plain_core": core,
            "rows": rows,
        }
        Path(options.json).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
