#!/usr/bin/env python3
"""Compare predictions with the measurements in tests/data, and make the tables of docs/validation.md.

Usage: scripts/bench/predictions.py [--rows] [--write docs/validation.md]
"""

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, permutations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import runs
from bench.runs import BIG_SCIENCE, DATA, HUANG, KIM, PEAK_GB, YEUNG, Row, allocated_bytes, setup_of
from bpipe.predict.cluster import AMPERE, BLACKWELL, CALIBRATED, EXPERTS, GIB, HOPPER, MANY_RUNS, ErrorBars
from bpipe.predict.layout import EVENLY
from bpipe.predict.memory import predict_memory
from bpipe.predict.model import llama
from bpipe.record.report.report import report_of

# Target for times by formula: mean and largest error in percent, without signs.
MOST_MEAN, MOST_LARGEST = 4, 10


def measured_bars() -> list[ErrorBars]:
    """Return how much longer than predicted runs took, by kind of run, as `bpipe plan` prints it."""
    ratios: dict[ErrorBars, list[float]] = {kind: [] for kind in (AMPERE, HOPPER, BLACKWELL, EXPERTS)}
    for row in (*runs.published(), *runs.before_bloom(), *runs.in_fp8(), *runs.with_experts()):
        kind = row.setup.error_bars if row.setup else None
        if kind is not None and row.quantity != PEAK_GB:
            ratios[kind].append(1 / row.seconds_ratio)
    ratios[CALIBRATED] = [
        other / first
        for rows in times_by_source().values()
        for first, other in permutations([1 / row.seconds_ratio for row in rows], 2)
    ]
    return [_bars(kind, of_kind) for kind, of_kind in ratios.items()]


def _bars(kind: ErrorBars, ratios: Sequence[float]) -> ErrorBars:
    percent = [100 * (ratio - 1) for ratio in ratios]
    low, high = min(percent), max(percent)
    if len(percent) >= MANY_RUNS:
        low, *_, high = statistics.quantiles(percent, n=20, method="inclusive")
    low, median, high = (round(value) for value in (low, statistics.median(percent), high))
    return kind._replace(num_runs=len(percent), low=low, median=median, high=high)


def times_by_source() -> dict[str, list[Row]]:
    """Return the published times and throughputs, without memory."""
    by_source: dict[str, list[Row]] = {}
    for row in runs.published():
        if row.quantity != PEAK_GB:
            by_source.setdefault(row.source, []).append(row)
    return by_source


def agreement(rows: Sequence[Row]) -> float:
    """Return Kendall's coefficient over pairs of one source and quantity that were measured over 5 % apart."""
    agreeing = [
        (first.measured < other.measured) == (first.predicted < other.predicted)
        for first, other in combinations(rows, 2)
        if (first.source, first.quantity) == (other.source, other.quantity)
        and abs(first.measured / other.measured - 1) > 0.05
    ]
    return 2 * sum(agreeing) / len(agreeing) - 1


def h200_table() -> str:
    """Compare the run of four ranks that shared one H200; its records are in tests/data/h200."""
    model = llama("llama", 8, 4096, 32, 32, 10880, 32768, 4096)
    changes = {"sequence": 4096, "precision": "bf16", "sequence_parallel": False}
    setup = setup_of(model, "h200-141g:1x4", 1, 4, 1, 16, "none", **changes)
    plain, balanced = (report_of(DATA / "h200" / name).stages for name in ("plain", "balanced"))
    # A balanced rank's activations include those that it hosts.
    with_hosted = [
        rank.activations_bytes + rank.hosted_bytes for rank in predict_memory(replace(setup, balance=EVENLY))
    ]
    predicted, allocated = predict_memory(setup), allocated_bytes(setup)
    body = [
        (
            stage,
            _both(plain[stage].measured_bytes, predicted[stage].activations_bytes),
            _both(balanced[stage].measured_bytes, with_hosted[stage]),
            _both(plain[stage].device_peak_bytes, allocated[stage]),
        )
        for stage in range(setup.pipeline)
    ]
    return table("stage|activations, GiB|the same, balanced|most allocated", body)


def _both(measured: float | None, predicted: float) -> str:
    return f"{(measured or 0) / GIB:.2f} ({predicted / GIB:.2f})"


# -- the tables of the page

# What is compared, on which devices, what the prediction is given, and the rows.
Comparison = tuple[str, str, str, Sequence[Row]]


@cache
def comparisons() -> tuple[Comparison, ...]:
    setups = [(row, row.setup) for row in runs.in_fp8() if row.setup]
    dense = [(row, setup.cluster.device) for row, setup in setups if not setup.model.experts]
    experts = [row for row, setup in setups if setup.model.experts]
    peaks = [row for row in runs.published() if row.quantity == PEAK_GB]
    return (
        (f"iteration times, {YEUNG}", "8 A100s", "pass times", tuple(runs.replays())),
        (f"stage times, {KIM} and {YEUNG}", "A100s", "sizes", tuple(runs.stage_times())),
        (f"MFU of one stage, {HUANG}", "A100s", "sizes", tuple(runs.stage_mfu())),
        (f"MFU of GPT-3 96B, {KIM}", "32 A100s", "sizes", tuple(row.mfu for row in runs.grid())),
        *((source, _gpus(rows), "sizes", rows) for source, rows in times_by_source().items()),
        (BIG_SCIENCE, "384 A100s", "sizes", runs.before_bloom()),
        ("experts in bf16, Megatron Core 0.9 and Bridge 25.11", "H100s, GB200s", "sizes", runs.with_experts()),
        ("dense in FP8, Bridge 25.11", "H100s", "sizes", [row for row, device in dense if not device.fp8_blocks]),
        ("dense in FP8, Bridge 25.11", "B200s, GB200s", "sizes", [row for row, device in dense if device.fp8_blocks]),
        ("experts in FP8, Bridge 25.11", "B200s, GB200s", "sizes", experts),
        (f"allocated memory, {peaks[0].source}", _gpus(peaks), "sizes", peaks),
        (f"allocated memory, {YEUNG}", "8 A100s", "sizes", tuple(runs.yeung_peaks())),
    )


def _gpus(rows: Iterable[Row]) -> str:
    clusters = [row.setup.cluster for row in rows if row.setup]
    numbers = sorted({cluster.num_devices for cluster in clusters})
    return f"{numbers[0]} to {numbers[-1]} {clusters[0].device.name.partition('-')[0].upper()}s"


def table(titles: str, body: Iterable[Iterable[object]]) -> str:
    names = titles.split("|")
    rows = [names, ["---"] * len(names), *([str(cell) for cell in row] for row in body)]
    return "\n".join(f"|{'|'.join(row)}|" if row[0] == "---" else f"| {' | '.join(row)} |" for row in rows) + "\n"


def _mean_and_largest(errors: Iterable[float]) -> tuple[str, str]:
    sizes = [abs(error) for error in errors]
    return f"{statistics.mean(sizes):.1f}", f"{max(sizes):.1f}"


def comparison_table() -> str:
    body = []
    for name, devices, given, rows in comparisons():
        errors = [abs(row.error_percent) for row in rows]
        verdict = "-"
        if given == "sizes" and rows[0].quantity not in (PEAK_GB, "MiB"):
            is_on_target = statistics.mean(errors) <= MOST_MEAN and max(errors) <= MOST_LARGEST
            verdict = "yes" if is_on_target else "**no**"
        body.append((name, devices, given, len(rows), *_mean_and_largest(errors), verdict))
    return table("compared|devices|given|values|mean error %|largest %|within 4 and 10 %", body)


def grid_table() -> str:
    body = (
        (
            *(row.name, row.recompute, row.balanced, f"{row.needs_gib:.1f}", f"{row.less_gib:.1f}"),
            *("yes" if row.agrees else "**no**", f"{row.mfu.measured:.1f}", f"{row.mfu.predicted:.1f}"),
        )
        for row in runs.grid()
    )
    return table("t/p/b|recompute|balanced|needs GiB|with less|agrees|measured MFU %|predicted", body)


def error_bars_table() -> str:
    body = (
        (bars.kind, bars.num_runs, bars.time_factor, f"{bars.low:+}", f"{bars.median:+}", f"{bars.high:+}")
        for bars in measured_bars()
    )
    return table("runs of|runs|formulas times|from %|median|to", body)


def count_table() -> str:
    agreeing = sum(row.agrees for row in runs.grid())
    order = (
        f"{name}: {agreement(rows):.2f}"
        for name, rows in (("published", runs.published()), ("BLOOM", runs.before_bloom()))
    )
    body = (
        ("GPT-3 96B on 32 A100s: which configurations fit", f"{agreeing} of {len(runs.grid())}"),
        ("order of runs that were measured over 5 % apart (Kendall's coefficient)", ", ".join(order)),
    )
    return table("compared|agrees", body)


TABLES: dict[str, Callable[[], str]] = {
    "comparisons": comparison_table,
    "counts": count_table,
    "error bars": error_bars_table,
    "grid": grid_table,
    "h200": h200_table,
}


def rewritten(page: str) -> str:
    """Return the page with every table made anew. A table follows a comment with its name."""
    for name, make in TABLES.items():
        before, comment, after = page.partition(f"<!-- {name} -->\n\n")
        if not comment:
            raise ValueError(f"the page needs a line '<!-- {name} -->'")
        page = before + comment + make() + re.sub(r"\A(?:\|.*\n)*", "", after)
    return page


def all_rows() -> str:
    body = (
        (row.source, row.run, row.quantity, f"{row.measured:.4g}", f"{row.predicted:.4g}", f"{row.error_percent:+.1f}")
        for *_, rows in comparisons()
        for row in rows
    )
    return table("source|run|unit|measured|predicted|error %", body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="print every compared value instead of the page's tables")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables into this page")
    options = parser.parse_args()
    if options.write is not None:
        options.write.write_text(rewritten(options.write.read_text()))
    elif options.rows:
        print(all_rows(), end="")
    else:
        print("\n".join(f"{name}\n\n{make()}" for name, make in TABLES.items()), end="")


if __name__ == "__main__":
    main()
