"""`bpipe plan`: the fastest configurations of a model on a cluster, and what balancing buys. In: flags. Out: a table, JSON or flags."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from bpipe.commands.flags import add_model_arguments, add_training_arguments, cluster_of, gib, model_of, print_json
from bpipe.generate.registry import GENERATORS
from bpipe.models.layout import RECOMPUTE
from bpipe.models.profile import read_profile
from bpipe.plan.document import document
from bpipe.plan.explain import describe, only_balanced, what_balancing_buys
from bpipe.plan.megatron_flags import megatron_flags
from bpipe.plan.search import Found, Outcome, Space, search
from bpipe.program import BALANCES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_training_arguments(parser)
    add = parser.add_argument_group("search").add_argument
    add("--recompute", nargs="+", choices=RECOMPUTE, default=RECOMPUTE, help="scopes to consider (default all)")
    add("--schedule", nargs="+", choices=tuple(GENERATORS), default=("1f1b", "interleaved-1f1b"), help="default 1f1b interleaved-1f1b")
    add("--balance", nargs="+", choices=BALANCES, default=BALANCES, help="default both")
    add("--max-micro-batch", type=int, default=64, metavar="N", help="largest micro-batch to consider (default 64)")
    add("--max-chunks", type=int, default=8, metavar="V", help="most model chunks a rank (default 8)")
    add("--allow-uneven", action="store_true", help="also where layers do not divide: the first and the last rank get fewer")
    add(
        "--profile",
        metavar="FILE",
        help="measured seconds; what it does not cover (micro-batch sizes, tensor, recompute, ...) is not considered",
    )
    output = parser.add_argument_group("output").add_argument
    output("--rows", type=int, default=10, metavar="N", help="how many configurations to show (default 10)")
    output("--format", choices=("table", "json"), default="table")
    output("--emit-args", type=int, metavar="ROW", help="print only the Megatron flags of a row, the first is 1")


def run(options: argparse.Namespace) -> None:
    model = model_of(options)
    if options.rows < 1:
        raise ValueError(f"--rows is {options.rows}, but must be at least 1")
    row = options.emit_args
    if row is not None and row < 1:
        raise ValueError(f"--emit-args {row}: rows are counted from 1")
    space = Space(
        model=model,
        cluster=cluster_of(options),
        global_batch=options.global_batch,
        sequence=model.sequence,
        attention=options.attention,
        recompute=tuple(options.recompute),
        schedules=tuple(options.schedule),
        balances=tuple(options.balance),
        max_micro_batch=options.max_micro_batch,
        max_chunks=options.max_chunks,
        allow_uneven=options.allow_uneven,
        precision=options.precision,
        distributed_optimizer=not options.no_distributed_optimizer,
        kernels=options.kernels,
        profile=None if options.profile is None else read_profile(options.profile),
        formula=options.flops_formula,
    )
    bar = _Bar()
    outcome = search(space, max(options.rows, row or 0), bar.show)
    bar.clear()
    if row is not None:
        if row > len(outcome.rows):
            raise ValueError(f"--emit-args {row}: there are {len(outcome.rows)} rows. {what_balancing_buys(outcome)}")
        print(" ".join(megatron_flags(outcome.rows[row - 1].prediction.setup)))
    elif options.format == "json":
        print_json([_row(found) for found in outcome.rows])
        print(what_balancing_buys(outcome), file=sys.stderr)
    else:
        print(table(outcome), end="")


def _row(found: Found) -> dict[str, Any]:
    return {**document(found.prediction), "only_balanced": found.needs_bytes is not None, "unbalanced_peak_bytes": found.needs_bytes}


def table(outcome: Outcome) -> str:
    """The rows, what each holds in every rank, and what balancing buys."""
    lines = [
        f"{outcome.num_configurations} configurations, {outcome.num_fitting} fit, {outcome.num_simulated} simulated: "
        f"the {len(outcome.rows)} fastest"
    ]
    for number, found in enumerate(outcome.rows, 1):
        lines += _lines(number, found)
    return "\n".join((*lines, what_balancing_buys(outcome))) + "\n"


def _lines(number: int, found: Found) -> list[str]:
    prediction = found.prediction
    timing, bandwidth = prediction.timing, prediction.bandwidth
    peaks = " ".join(gib(rank.peak_bytes) for rank in prediction.memory)
    lines = [
        f"{number:3}. {timing.iteration_s:9.3f} s  MFU {100 * prediction.mfu:5.2f} %  bubble {100 * timing.bubble_of_makespan:5.1f} %  "
        f"exposed {max(timing.exposed_s):.3f} s  {describe(prediction.setup)}",
        f"     GiB a rank, of {gib(prediction.memory[0].limit_bytes)}: {peaks}",
    ]
    if bandwidth:
        lines.append(
            f"     transfers of {bandwidth.transfer_bytes / 1e9:.2f} GB need {bandwidth.required_bytes_per_s / 1e9:.1f} GB/s "
            f"({bandwidth.steady_bytes_per_s / 1e9:.1f} in the steady phase) of {bandwidth.available_bytes_per_s / 1e9:.0f}"
        )
    reason = only_balanced(found)
    return [*lines, f"     {reason}"] if reason else lines


@dataclass(slots=True)
class _Bar:
    """Progress on stderr, if that is a terminal, at most ten times a second."""

    shown_at: float = 0.0
    is_terminal: bool = field(default_factory=lambda: sys.stderr.isatty())

    def show(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if self.is_terminal and (now - self.shown_at > 0.1):
            self.shown_at = now
            filled = 30 * done // max(total, 1)
            print(f"\r{what:7}[{'#' * filled}{'.' * (30 - filled)}] {done}/{total} ", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.is_terminal and self.shown_at:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
