"""Measure co-execution: steps of one network plainly and next to Python (`terra.Session`), taking turns.

Prints a table: for each kind and share of Python's work in a step, as a part of the plain step's time without any, how
many times as fast as plainly a step is co-executed within a round (medians and quartiles). Work is done between a step's
layers: "text" counts words and writes lines, as tokenizers and logs do, and keeps the interpreter's lock; "unpacking"
decompresses, as reading data does, and releases it.

It measures wall clock, so the machine must have a free core for each side; torch gets one thread. On cores that others
use, two threads get more of them than one: the plain side's share of a core is printed, and should be near 1. Losses
must be bit-identical. Operations take milliseconds here, as on a device; with --width 64 they take as long as issuing
them. It cannot show anything of a GPU, whose queue runs next to Python by itself.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import time
import zlib
from collections.abc import Callable

import torch

import terra

SHARES = (0.5, 1.0)
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


class Side:
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


def measure(options: argparse.Namespace, plain: Side, beside: Side, work: Work, share: float, step_s: float) -> str:
    """Measure one kind of work, which takes a share of a plain step's time, and return its row."""
    turns = int(step_s * share / min(_timed(work, WORKS[work]) / WORKS[work] for _ in range(3)))
    seconds: dict[Side, list[float]] = {plain: [], beside: []}
    for number in range(options.rounds):
        for side in (plain, beside) if number % 2 else (beside, plain):
            seconds[side].append(side.run(options.steps, work, turns))
    plain_ms = spread([1e3 * took_s for took_s in seconds[plain]])
    ratios = [by_itself / co_executed for by_itself, co_executed in zip(seconds[plain], seconds[beside], strict=True)]
    name = work.__name__ if share else "none"
    return f"{name:9} {share:4.0%}   {plain_ms:25} {spread(ratios)}"


def spread(values: list[float]) -> str:
    """Return the median, and the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _timed(do: Callable[[int], object], count: int) -> float:
    start = time.perf_counter()
    do(count)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10, help="in each turn")
    parser.add_argument("--rounds", type=int, default=7, help="at least 2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with contextlib.closing(terra.Session("threaded")) as session:
        plain, beside = Side(options, None), Side(options, session)
        for side in (plain, beside):
            side.run(FIRST)
        step_s = min(plain.run(options.steps) for _ in range(3))
        beside.run(3 * options.steps)
        kinds = ((text, 0.0), *itertools.product(WORKS, SHARES))
        rows = [measure(options, plain, beside, work, share, step_s) for work, share in kinds]
        assert all(torch.equal(*pair) for pair in zip(plain.losses, beside.losses, strict=True)), "losses differ"
        assert session.fallbacks == 0
    core = plain.processor_s / plain.wall_s
    sizes = f"{options.layers} layers {options.width} wide, {options.batch} rows"
    print(f"{sizes}; {os.cpu_count()} cores, {core:.2f} of one for the plain side; medians (quartiles)")
    print("Python's work    plain ms per step         times as fast as plainly")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
