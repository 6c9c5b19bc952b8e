"""Measure co-execution: steps of one network plainly, next to Python ("beside"), and lazily, taking turns.

Prints a table, and with --json writes it: for each kind and share of Python's work in a step, as a part of the plain
step's time without any, how many times as fast as plainly a step is co-executed, and lazily, within a round (medians
and quartiles). Work is done between a step's layers: "text" counts words and writes lines, as tokenizers and logs do,
and keeps the interpreter's lock; "unpacking" decompresses, as reading data does, and releases it.

It measures wall clock, so the machine must have a free core for each side; torch gets one thread. On cores that others
use, two threads get more of them than one: the plain side's share of a core is printed, and should be near 1. Losses
must be bit-identical. Operations take milliseconds here, as on a device; with --width 64 they take as long as issuing
them. It cannot show anything of a GPU, whose queue runs next to Python by itself.
"""

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

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch

import terra

SHARES = (0.5, 1.0)
# The runner of each way.
WAYS = {"beside": "threaded", "lazily": "lazy"}
# Steps until everything is made: warm-up, traces, and the first co-executed step, which compiles the blocks.
FIRST = 5
_WORDS = "a step of the training has come to its end and this is what it lost".split()
_PACKED = zlib.compress(bytes(range(256)) * 512)


def text(count: int) -> int:
    """Count words, and hold the interpreter's lock."""
    lengths: dict[str, int] = {}
    for number in range(count):
        word = _WORDS[number % len(_WORDS)]
        lengths[word] = lengths.get(word, 0) + len(f"{number} {word}")
    return sum(lengths.values())


def unpacking(count: int) -> int:
    """Decompress, and release the interpreter's lock."""
    return sum(len(zlib.decompress(_PACKED)) for _ in range(count))


Work = Callable[[int], int]
# With a number of turns that takes tens of milliseconds.
WORKS: dict[Work, int] = {text: 100_000, unpacking: 300}


def training(width: int, layers: int, batch: int) -> Callable[[Work, int], torch.Tensor]:
    """Return a step that trains, and does `count` turns of work between its layers."""
    torch.manual_seed(1)
    parts = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(layers)]
    optimizer = torch.optim.SGD([parameter for part in parts for parameter in part.parameters()], lr=1e-3)
    inputs = torch.randn(batch, width)

    def step(work: Work, count: int) -> torch.Tensor:
        hidden = inputs
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
            losses = zip(plain.losses, way.losses, strict=True)
            assert all(torch.equal(*pair) for pair in losses), "losses differ"
        assert all(session.fallbacks == 0 for session in sessions.values())
    return rows, plain.processor_s / plain.wall_s


def _row(
    options: argparse.Namespace, plain: Way, beside: dict[str, Way], work: Work, share: float, step_s: float
) -> dict[str, Any]:
    """Measure one kind of work, which takes a share of a plain step's time. The order of ways rotates."""
    turn_s = min(_timed(work, WORKS[work]) for _ in range(3)) / WORKS[work]
    turns, ways, rounds = int(step_s * share / turn_s), [plain, *beside.values()], []
    for number in range(options.rounds):
        first = number % len(ways)
        rounds.append({way: way.run(options.steps, work, turns) for way in ways[first:] + ways[:first]})
    row: dict[str, Any] = {"python": share, "work": work.__name__ if share else "none"}
    row["plain_ms"] = spread([took[plain] * 1e3 for took in rounds])
    return row | {name: spread([took[plain] / took[way] for took in rounds]) for name, way in beside.items()}


def _timed(do: Callable[[int], object], count: int) -> float:
    start = time.perf_counter()
    do(count)
    return time.perf_counter() - start


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
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
    sizes = f"{options.layers} layers {options.width} wide, {options.batch} rows"
    print(f"{sizes}; {os.cpu_count()} cores, {core:.2f} of one for the plain side")
    print("times as fast as plainly, median (quartiles)")
    print("Python's work     plain ms per step        " + "".join(f"{name:23}" for name in WAYS))
    for row in rows:
        spreads = (row[name] for name in ("plain_ms", *WAYS))
        words = (f"{middle:7.2f} ({first:.2f} to {third:.2f})" for first, middle, third in spreads)
        print(f"{row['work']:9} {row['python']:4.0%}   {'   '.join(words)}")
    if options.json:
        facts = {"machine": platform.platform(), "torch": torch.__version__, "options": vars(options)}
        Path(options.json).write_text(json.dumps(facts | {"plain_core": core, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
