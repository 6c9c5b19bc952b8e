"""Measure what the ranges for profilers cost where no profiler runs: iterations of our own loop with and without them,
taking turns in one run.

In: sizes. Out: a table: of every rank the processor time of the training thread in an iteration with each, and the ratio
within a turn, medians and quartiles; of all ranks together the median with what it would be in 95 of 100 such runs. With
sizes so small that there is nothing to compute (--hidden 16 --sequence 8) the difference is what ranges cost themselves.

What it cannot show: anything of a GPU, where the training thread issues what a device computes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.loop import in_95_of_100, own_loop, prepared
from bench.turns import add_sizes, on_ranks, processor_seconds, quotients, spread
from bpipe.ir.action import Action
from bpipe.runtime import engine
from bpipe.runtime.ranges import Ranges


class NoRanges:
    """Names nothing."""

    def __init__(self, slices: int) -> None: ...

    def of(self, action: Action) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def begin(self, action: Action, beside: Action | None = None) -> None: ...

    def end(self) -> None: ...


def measure(_: int, sizes: argparse.Namespace) -> dict[str, list[float]]:
    model, iteration = prepared(sizes)
    loops = {"without": (own_loop(sizes), NoRanges), "with": (own_loop(sizes), Ranges)}

    def named(name: str) -> None:
        # An engine is made in the first iteration, and keeps its ranges.
        loop, kind = loops[name]
        with patch.object(engine, "Ranges", kind):
            iteration(loop)

    ways = {name: functools.partial(named, name) for name in loops}
    return processor_seconds(ways, lambda _: model.zero_grad(), sizes.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_sizes(parser, microbatches=16)
    sizes = parser.parse_args()
    measured = on_ranks(measure, sizes.stages, sizes)
    together: list[float] = []
    print(f"{'rank':<5} {'without ranges, ms':>28} {'with, ms':>28} {'with to without in a turn':>32}")
    for rank, spent in enumerate(measured):
        ratios = quotients(spent["with"], spent["without"])
        plain, named = ([1e3 * value for value in spent[name]] for name in ("without", "with"))
        print(f"{rank:<5} {spread(plain, '.1f'):>28} {spread(named, '.1f'):>28} {spread(ratios, '.4f'):>32}")
        together += ratios
    low, high = in_95_of_100(together)
    print(f"{'all':<5} {'':>28} {'':>28} {f'{statistics.median(together):.4f} (95 %: {low:.4f} to {high:.4f})':>32}")
    if sizes.json:
        Path(sizes.json).write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
