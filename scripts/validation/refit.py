#!/usr/bin/env python3
"""Say how the two constants that published runs decide fit them: the share of products and of what is hidden.

In: tests/data/published_throughput.csv. Out: for every pair of `PRODUCT_EFFICIENCY` and `HIDDEN_SHARE`, the mean error of
all times and of each source's, in percent without signs.

Usage: scripts/validation/refit.py [--shares 0.5,0.6,0.65] [--efficiencies 0.88,0.9,0.92]

Runs as they were run, with their flags. Needs no torch, writes nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bpipe.models import rates, tensor_parallel
from validation.throughput import PEAK, throughputs

SHARES, EFFICIENCIES = (0.0, 0.4, 0.5, 0.6, 0.65, 0.75, 1.0), (0.88, 0.89, 0.9, 0.91, 0.92)


def errors_by_source(share: float, efficiency: float) -> dict[str, list[float]]:
    """Return the errors of all times in percent, without signs, under these constants.

    Predictions are cached, so that a process has one pair of constants.
    """
    tensor_parallel.HIDDEN_SHARE, rates.PRODUCT_EFFICIENCY = share, efficiency
    found: dict[str, list[float]] = {}
    for one in throughputs():
        if one.quantity != PEAK:
            found.setdefault(one.source.split(" (")[0], []).append(100 * abs(one.seconds_ratio - 1))
    return found


def _row(pair: tuple[float, float]) -> str:
    by_source = errors_by_source(*pair)
    every = statistics.mean(error for errors in by_source.values() for error in errors)
    means = (f"{source.split()[0]} {statistics.mean(errors):.1f}" for source, errors in by_source.items())
    return f"share {pair[0]:.2f}  efficiency {pair[1]:.2f}  all {every:.2f}  {'  '.join(means)}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for flag, usual in (("--shares", SHARES), ("--efficiencies", EFFICIENCIES)):
        parser.add_argument(flag, type=_numbers, default=usual, metavar="A,B", help="of those to try")
    asked = parser.parse_args(arguments)
    pairs = [(share, efficiency) for share in asked.shares for efficiency in asked.efficiencies]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for row in pool.imap(_row, pairs, chunksize=1):
            print(row, flush=True)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


if __name__ == "__main__":
    main()
