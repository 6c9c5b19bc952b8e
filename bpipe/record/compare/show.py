"""Write a comparison of two runs, called A and B, as text with the verdict as its last line, or as values for JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from bpipe.record.compare.judge import Mismatch, Quartiles, SideBySide
from bpipe.record.compare.read import LOSS, StageNumbers, Training

# What is shown of each iteration. A report and a log spell the gradient norm differently.
_SHOWN = (LOSS, "grad_norm", "grad norm")
_WIDTH = 24
# The number of differences that are listed.
_MOST = 3
_MIB = 2**20


def text(pair: SideBySide, num_rows: int) -> str:
    """Return the comparison as text, with the last `num_rows` iterations up to the first difference side by side."""
    lines = [f"A: {pair.first.path}", f"B: {pair.second.path}"]
    if pair.first.stages and pair.second.stages:
        lines += _peaks(pair.first, pair.second)
    lines += _numbers(pair, num_rows)
    if pair.alone:
        lines.append(f"note: {pair.alone} iteration{'s' * (pair.alone != 1)} only in one run, not compared")
    lines += [*_losses(pair), *_seconds(pair), *_largest(pair), _verdict(pair)]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _peaks(first: Training, second: Training) -> list[str]:
    """Return measured and (predicted) micro-batches and MiB, one row per stage, with the transfers of balanced runs."""
    head, titles = f"{'':5}", f"{'stage':>5}"
    for name, run in (("A", first), ("B", second)):
        head += f"  {name + (', with --bpipe' if run.balanced else ', without balancing'):^27}"
        titles += f"  {'micro-batches':>13} {'MiB':>13}"
        if run.balanced:
            head += f"  {'per iteration':^16}"
            titles += f"  {'evictions':>9} {'loads':>6}"
    rows = [
        f"{stage:>5}" + "".join(_cells(run.stages.get(stage), bool(run.balanced)) for run in (first, second))
        for stage in sorted(first.stages.keys() | second.stages.keys())
    ]
    notes = []
    for name, run in (("A", first), ("B", second)):
        stages = sorted(run.stages.items())
        if wrong := [stage for stage, row in stages if row.peak_microbatches != row.predicted_microbatches]:
            notes.append(f"note: in {name}, the measured peak of stages {wrong} is not the predicted one")
    title = "peak of saved activations on each stage: measured (predicted from the schedule)"
    return [title, head, titles, *rows, *notes]


def _cells(row: StageNumbers | None, balanced: bool) -> str:
    if row is None:
        return f"  {'-':>13} {'-':>13}" + f"  {'-':>9} {'-':>6}" * balanced
    counts = f"{row.peak_microbatches} ({row.predicted_microbatches})"
    sizes = f"{row.peak_bytes / _MIB:.2f} ({row.predicted_bytes / _MIB:.2f})"
    return f"  {counts:>13} {sizes:>13}" + f"  {row.evictions:>9} {row.loads:>6}" * balanced


def _numbers(pair: SideBySide, num_rows: int) -> list[str]:
    """Return one row per iteration, with each value of the first run, then of the second."""
    if num_rows == 0:
        return []
    until = pair.common.index(pair.mismatches[0].iteration) + 1 if pair.mismatches else len(pair.common)
    iterations = pair.common[max(0, until - num_rows) : until]
    runs = pair.first.iterations, pair.second.iterations
    names = [name for name in _SHOWN if any(name in run[iterations[0]] for run in runs)]
    rows = [f"{'':>9}" + "".join(f"  {name:^{2 * _WIDTH + 2}}" for name in names)]
    rows.append(f"{'iteration':>9}" + "".join(f"  {letter:>{_WIDTH}}" for _ in names for letter in "AB"))
    for iteration in iterations:
        values = (run[iteration].get(name) for name in names for run in runs)
        rows.append(f"{iteration:>9}" + "".join(f"  {_cell(value, pair.first.exact):>{_WIDTH}}" for value in values))
    return rows


def _cell(value: float | None, exact: bool) -> str:
    if value is None:
        return "none"
    return value.hex() if exact else f"{value!r}"


def _losses(pair: SideBySide) -> list[str]:
    """Return the first and the last loss; those of both runs if they differ as far as is shown."""
    losses = []
    for run in (pair.first, pair.second):
        ends = [(iteration, run.iterations[iteration].get(LOSS)) for iteration in (pair.common[0], pair.common[-1])]
        losses.append(", ".join(f"{loss:.3f} at iteration {number}" for number, loss in ends if loss is not None))
    if not all(losses):
        return []
    lines = [f"loss: {losses[0]}"] if losses[0] == losses[1] else [f"loss: A {losses[0]}; B {losses[1]}"]
    if any(not math.isfinite(run.iterations[pair.common[-1]].get(LOSS) or 0.0) for run in (pair.first, pair.second)):
        lines.append("note: the loss is not finite")
    return lines


def _seconds(pair: SideBySide) -> list[str]:
    first, second, ratio = _spread(pair, pair.first), _spread(pair, pair.second), pair.seconds_ratio()
    if first is None or second is None or ratio is None:
        return []
    times = ", ".join(f"{name} {_between(spread)}" for name, spread in (("A", first), ("B", second)))
    return [
        f"seconds per iteration, median (quartiles): {times}",
        f"B's time divided by A's, median (quartiles): {_between(ratio)}",
    ]


def _spread(pair: SideBySide, run: Training) -> Quartiles | None:
    return Quartiles.of([run.seconds[iteration] for iteration in pair.common if iteration in run.seconds])


def _between(spread: Quartiles) -> str:
    return f"{spread.median:.3g} ({spread.low:.3g} to {spread.high:.3g})"


def _largest(pair: SideBySide) -> list[str]:
    """Return the largest differences, if there are more than the one in the verdict."""
    if len(pair.mismatches) == 1:
        return []
    largest = sorted(pair.mismatches, key=lambda mismatch: -mismatch.share)[:_MOST]
    return [f"difference of {mismatch.share:.3g}, {difference(mismatch)}" for mismatch in largest]


def _verdict(pair: SideBySide) -> str:
    num = len(pair.common)
    within = f"within {pair.tolerance:g}"
    if pair.mismatches:
        first, others = pair.mismatches[0], len(pair.mismatches) - 1
        more = f"; {others} more differ after it" if others else ""
        return f"NOT {'equal ' + within if pair.tolerance else 'identical'}: {difference(first)}{more}"
    if pair.exact:
        return f"identical: all numbers of {num} iterations agree to the last bit"
    if pair.tolerance:
        return f"equal {within}: no two numbers of {num} iterations differ by more, relative to the larger one"
    return (
        f"no difference in {num} iterations, but Megatron rounds the numbers in its logs; "
        "to compare every bit, run with --bpipe-report DIR and compare the folders"
    )


def difference(mismatch: Mismatch) -> str:
    """Return one sentence part: the number, and what both runs have for it."""
    numbers = f"{_number(mismatch.first)} in A, {_number(mismatch.second)} in B"
    return f"{mismatch.name} of iteration {mismatch.iteration}: {numbers}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value!r} ({value.hex()})"


def document(pair: SideBySide) -> dict[str, Any]:
    """Return the comparison as JSON values. Numbers without a JSON form are text: nan, inf, -inf."""
    ratio = pair.seconds_ratio()
    return {
        "equal": pair.equal,
        "exact": pair.exact,
        "tolerance": pair.tolerance,
        "iterations": len(pair.common),
        "in_one_only": pair.alone,
        "differences": [
            {
                "iteration": mismatch.iteration,
                "name": mismatch.name,
                "a": _plain(mismatch.first),
                "b": _plain(mismatch.second),
            }
            for mismatch in pair.mismatches
        ],
        "a": _run(pair, pair.first),
        "b": _run(pair, pair.second),
        "iteration_s_ratio": None if ratio is None else asdict(ratio),
    }


def _run(pair: SideBySide, run: Training) -> dict[str, Any]:
    spread = _spread(pair, run)
    return {
        "path": str(run.path),
        "balanced": run.balanced,
        "first_loss": _plain(run.iterations[pair.common[0]].get(LOSS)),
        "last_loss": _plain(run.iterations[pair.common[-1]].get(LOSS)),
        "iteration_s": None if spread is None else asdict(spread),
        "stages": [{"stage": stage, **asdict(row)} for stage, row in sorted(run.stages.items())],
    }


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else repr(value)
