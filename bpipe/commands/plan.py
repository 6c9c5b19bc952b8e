"""`bpipe plan`: the fastest configurations of a model on a cluster, and what balancing buys. In: flags. Out: a table, JSON or flags."""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from bpipe.commands.flags import (
    add_calibration_argument,
    add_model_arguments,
    add_routing_arguments,
    add_training_arguments,
    cluster_of,
    picture_file,
    print_json,
)
from bpipe.commands.front import SUFFIXES, show
from bpipe.commands.launch import add_launch_arguments, launch_document, lines, reading_of
from bpipe.commands.simulate import budgeted
from bpipe.flag_types import HOSTS_SAID, positive
from bpipe.generate.families import FAMILIES, SEARCHED
from bpipe.ir.hosts import ARRANGEMENTS, IN_NODES
from bpipe.models.cluster import Cluster, gib
from bpipe.models.fp8 import Fp8
from bpipe.models.layout import Setup
from bpipe.models.model import Model
from bpipe.models.profile import read_profile
from bpipe.models.recompute import FORMS
from bpipe.plan import standings
from bpipe.plan.budget import MemoryBudget, within_budget
from bpipe.plan.document import document
from bpipe.plan.explain import calibrated, costly_halves, describe, only_balanced, replicas_apart, verdict
from bpipe.plan.fewest_layers import BLOCK
from bpipe.plan.hybrid_flags import stage_flags
from bpipe.plan.judge import Found
from bpipe.plan.megatron_command import Reading
from bpipe.plan.megatron_flags import hosts_flags, megatron_flags, schedule_flags
from bpipe.plan.options import filled, fp8_of, memory, model_of, routing_of, scope, setup_of, switches_of
from bpipe.plan.predict import SetupPrediction, predict
from bpipe.plan.search import Outcome, search
from bpipe.plan.space import CUTS, SEARCHED_SCOPES, VOCABULARIES, Space, num_grids, usual_contexts
from bpipe.plan.state_hosts import StateHosts, hosts_document, instead_of_balancing
from bpipe.plan.state_hosts import words as words_on_state
from bpipe.plan.vocabulary import Burden, burden, burden_document, words
from bpipe.program import BALANCES

# The exit status where nothing was found; 2 is an error in what was asked.
NO_ROWS = 3
SCOPES = (
    f"what to recompute, each one of {FORMS}, or {BLOCK}: of every stage the fewest layers with which it fits (default "
    f"{' '.join(SEARCHED_SCOPES)})"
)
# As `gc.set_threshold` takes them.
_SELDOM = (200_000, 20, 100)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_training_arguments(parser)
    add_routing_arguments(parser)
    add_calibration_argument(parser)
    add_launch_arguments(parser)
    add = parser.add_argument_group("search").add_argument
    add("--recompute", nargs="+", type=scope, default=SEARCHED_SCOPES, metavar="TEXT", help=SCOPES)
    add("--schedule", nargs="+", choices=tuple(FAMILIES), default=SEARCHED, help=f"default {' '.join(SEARCHED)}")
    add("--balance", nargs="+", choices=BALANCES, default=BALANCES, help="default both")
    add("--memory", type=memory, metavar="GIB|auto", help="all that a device may hold; of balanced rows only what must leaves")
    add("--hosts", nargs="+", choices=ARRANGEMENTS, help=f"of balanced rows, where what leaves may go: {HOSTS_SAID}")
    help_text = "how many devices may have a part of a sequence each (default 1, of sequences from 32768 on more)"
    add("--context", type=positive, nargs="+", metavar="C", help=help_text)
    add(
        "--vocabulary-parallel",
        nargs="+",
        choices=VOCABULARIES,
        help="whether the output layer is in shards on all pipeline ranks, and by which algorithm, with the embedding and without where "
        "that is trained (default: none, and each that lowers the bound of the time where the last rank computes longer than others)",
    )
    add("--max-micro-batch", type=positive, default=64, metavar="N", help="largest micro-batch to consider (default 64)")
    add("--max-chunks", type=positive, default=8, metavar="V", help="most model chunks a rank (default 8)")
    add(
        "--even-layers",
        action="store_true",
        help="no unequal stages where the layers do not divide (default: those before the last get one more)",
    )
    add(
        "--profile",
        metavar="FILE",
        help="measured seconds; what it does not cover (micro-batch sizes, tensor, recompute, ...) is not considered",
    )
    output = parser.add_argument_group("output").add_argument
    output("--rows", type=positive, default=10, metavar="N", help="how many configurations to show (default 10)")
    output("--front", action="store_true", help="what is fastest for every amount of memory, up to twice what a device has")
    output("--plot", metavar="FILE", help="with --front: draw it, .svg or .png, or write it as a page, .html")
    output("--format", choices=("table", "json"), default="table")
    output("--emit-args", type=positive, metavar="ROW", help="print only the Megatron flags of a row, the first is 1")


def run(asked: argparse.Namespace) -> int:
    reading = reading_of(asked)
    # What the search chooses is no one's to say; `yours` below is the launch as it stands.
    every = filled(argparse.Namespace(**{**vars(asked), "hosts": None}), reading, ("global_batch",))
    options = argparse.Namespace(**{**vars(every), **{name: getattr(asked, name) for name in ("recompute", "schedule", "balance")}})
    model, cluster = model_of(options), _budgeted(cluster_of(options, reading.devices if reading else None), options.memory)
    yours = None if reading is None else _yours(asked, reading)
    if options.global_batch is None:
        raise ValueError("the launch does not say --global-batch-size: give --global-batch")
    row = options.emit_args
    space = _space(asked, options, model, cluster, _contexts(asked, every, cluster))
    bar = _Bar()
    if options.front:
        with _seldom_collected():
            found = show(space, options.format, picture_file(options.plot, SUFFIXES), row, bar.show)
        return NO_ROWS if found.winner is None else 0
    if options.plot is not None:
        raise ValueError("--plot draws a front: give --front, too, or leave it out")
    with _seldom_collected():
        asked_what = (space, max(options.rows, row or 0), bar.show)
        if options.memory is not None or set(space.hosts) & set(IN_NODES):
            outcome = search(*asked_what, _sending_what_must(space, cluster.device.memory_bytes))
        else:
            outcome = search(*asked_what)
    beside = _beside(outcome) if row is None else _Beside()
    bar.clear()
    if row is not None:
        if row > len(outcome.rows):
            raise ValueError(f"--emit-args {row}: there are {len(outcome.rows)} rows. {verdict(outcome).text}")
        print(shlex.join(megatron_flags(outcome.rows[row - 1].prediction.setup)))
    elif options.format == "json":
        print_json({**plan_document(outcome, beside), **(_launch_document(yours, reading) if yours and reading else {})})
    else:
        for line in (*(lines(reading) if reading else ()), *(_yours_lines(yours) if yours else ())):
            print(line)
        print(table(outcome, beside), end="")
    return 0 if outcome.rows else NO_ROWS


def _space(asked: argparse.Namespace, options: argparse.Namespace, model: Model, cluster: Cluster, contexts: tuple[int, ...]) -> Space:
    """What to search."""
    return Space(
        model=model,
        cluster=cluster,
        global_batch=options.global_batch,
        sequence=model.sequence,
        attention=options.attention,
        recompute=tuple(options.recompute),
        schedules=_schedules(asked, fp8_of(options)),
        balances=tuple(options.balance),
        max_micro_batch=options.max_micro_batch,
        max_chunks=options.max_chunks,
        uneven=not options.even_layers,
        precision=options.precision,
        distributed_optimizer=not options.no_distributed_optimizer,
        kernels=options.kernels,
        profile=None if options.profile is None else read_profile(options.profile),
        formula=options.flops_formula,
        switches=switches_of(options),
        hosts=tuple(asked.hosts or (options.hosts,)),
        routing=routing_of(options),
        expert=options.expert,
        contexts=contexts,
        cp_comm_type=options.cp_comm_type,
        fp8=fp8_of(options),
        vocabulary_parallel=None if asked.vocabulary_parallel is None else tuple(asked.vocabulary_parallel),
    )


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """A search makes millions of small values, and hardly any of them is part of a cycle: to look for some took a fifth of its time."""
    before = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _schedules(asked: argparse.Namespace, fp8: Fp8 | None) -> tuple[str, ...]:
    """In FP8 those that split backwards are looked at only where they are asked for, which is refused with the reason."""
    if fp8 is None or tuple(asked.schedule) != tuple(SEARCHED):
        return tuple(asked.schedule)
    return tuple(name for name in SEARCHED if not FAMILIES[name].splits)


def _contexts(asked: argparse.Namespace, every: argparse.Namespace, cluster: Cluster) -> tuple[int, ...]:
    """What was asked for; else what a launch has is tried beside the usual ones."""
    if asked.context is not None:
        return tuple(sorted(set(asked.context)))
    model = model_of(every)
    is_possible = every.attention == "flash" and every.kernels == "gpu" and model.no_context(model.sequence, every.cp_comm_type) is None
    return tuple(sorted({*(usual_contexts(model.sequence, cluster.num_devices) if is_possible else ()), every.context}))


def _budgeted(cluster: Cluster, asked: MemoryBudget | None) -> Cluster:
    """With devices of as much memory as the budget."""
    if asked is None or asked.budget_bytes is None:
        return cluster
    if len(asked.budget_bytes) > 1:
        raise ValueError("--memory: the search has pipelines of different lengths, so give one number for all ranks")
    return replace(cluster, device=replace(cluster.device, memory_bytes=asked.budget_bytes[0]))


def _sending_what_must(space: Space, budget_bytes: int) -> Callable[[Setup], Setup]:
    """Balanced setups send what the budget demands and no more; those that were judged to fit by a hair stay."""

    def anew(setup: Setup) -> Setup:
        with suppress(ValueError):
            return within_budget(setup, (budget_bytes,), profile=space.profile)[0]
        return setup

    return anew


class _Beside(NamedTuple):
    """What is said beside the rows: of the first row in which the vocabulary hurts, and the first that fits only balanced, its number."""

    hurts: tuple[Burden, int] | None = None
    hosts: tuple[StateHosts, int] | None = None


def _beside(outcome: Outcome) -> _Beside:
    profile, formula = outcome.space.profile, outcome.space.formula
    # Of shards that were searched the rows say what they gain.
    others = [name for name in VOCABULARIES if name not in outcome.space.vocabularies]
    every = ((burden(found.prediction, profile, others), number) for number, found in enumerate(outcome.rows, 1))
    hurts = next(((one, number) for one, number in every if one is not None), None)
    for number, found in enumerate(outcome.rows, 1):
        if found.needs_bytes is not None:
            hosts = instead_of_balancing(found.prediction.setup, profile, formula)
            return _Beside(hurts, None if hosts is None else (hosts, number))
    return _Beside(hurts)


def _yours(asked: argparse.Namespace, reading: Reading) -> SetupPrediction | str:
    """The launch as it stands, or why it cannot be on this cluster."""
    chosen = ("recompute", "schedule", "balance", "tensor", "pipeline", "vocabulary_parallel")
    options = argparse.Namespace(**{**vars(asked), **dict.fromkeys(chosen)})
    others = ("context", "micro_batch", "chunks", "layers", "group", "delay", "keep_weights_halves")
    options = argparse.Namespace(**{**vars(options), **dict.fromkeys(others), "no_sequence_parallel": False})
    try:
        every = filled(options, reading, ())
        if every.balance == BALANCES[0]:
            every.memory = None
        setup, _ = budgeted(every, setup_of(every, cluster_of(every, reading.devices)))
    except ValueError as error:
        return str(error)
    return predict(setup, formula=asked.flops_formula)


def _yours_lines(yours: SetupPrediction | str) -> list[str]:
    if isinstance(yours, str):
        return [f"the launch as it stands: {yours}"]
    misses = [f"rank {rank.rank} needs {gib(rank.peak_bytes)}" for rank in yours.memory if not rank.fits]
    fits = "fits" if not misses else f"does not fit: {', '.join(misses[:4])}{', ...' if len(misses) > 4 else ''}"
    return ["the launch as it stands, first; then what was found", *_lines(0, Found(yours, None)), f"     {fits}"]


def _launch_document(yours: SetupPrediction | str, reading: Reading) -> dict[str, Any]:
    said = {"impossible": yours} if isinstance(yours, str) else document(yours)
    return {"launch": {**launch_document(reading), "as_it_stands": said}}


def _unasked(space: Space) -> tuple[str, ...]:
    """What cuts nothing where it was not asked for, or of a model without such layers."""
    contexts, layers = ("context",) * (space.contexts == (1,)), ("layers",) * (BLOCK not in space.recompute)
    return (*contexts, *layers, *(("mamba", "hybrid") if space.model.hybrid is None else ()))


def plan_document(outcome: Outcome, beside: _Beside) -> dict[str, Any]:
    """What `--format json` promises (docs/planning.md)."""
    return {
        "verdict": verdict(outcome)._asdict(),
        "searched": {
            "grids": num_grids(outcome.space),
            "configurations": outcome.num_configurations,
            "sharded": outcome.num_sharded,
            "fitting": outcome.num_fitting,
            "only_balanced": outcome.num_only_balanced,
            "simulated": outcome.num_simulated,
            "cut": {name: outcome.cuts.get(name, 0) for name in CUTS if name not in _unasked(outcome.space)},
        },
        "rows": [_row(found) for found in outcome.rows],
        "families": standings.documents(outcome),
        "needs": standings.needs(outcome),
        "vocabulary": None if beside.hurts is None else burden_document(*beside.hurts),
        "optimizer_state_hosts": None if beside.hosts is None else {"row": beside.hosts[1], **hosts_document(beside.hosts[0])},
    }


def _row(found: Found) -> dict[str, Any]:
    return {
        **document(found.prediction),
        "only_balanced": found.needs_bytes is not None,
        "unbalanced_peak_bytes": found.needs_bytes,
        "megatron_flags": megatron_flags(found.prediction.setup),
    }


def table(outcome: Outcome, beside: _Beside) -> str:
    """The rows, what each holds in every rank, where the vocabulary hurts, and what balancing buys."""
    head = f"{outcome.num_configurations} configurations, {outcome.num_fitting} fit"
    if outcome.rows:
        head += f", {outcome.num_simulated} simulated: the {len(outcome.rows)} fastest"
    lines = [head, *calibrated(outcome.space.cluster)]
    for number, found in enumerate(outcome.rows, 1):
        lines += _lines(number, found)
    standing = standings.lines(outcome)
    hurts = words(*beside.hurts) if beside.hurts else ()
    hosts = [f"Row {beside.hosts[1]}: {words_on_state(beside.hosts[0])}."] if beside.hosts else ()
    return "\n".join((*lines, *standing, *hurts, *hosts, verdict(outcome).text)) + "\n"


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
    lines += [f"     {text}" for text in (only_balanced(found), costly_halves(prediction), replicas_apart(prediction.setup)) if text]
    setup = prediction.setup
    flags = [*stage_flags(setup), *hosts_flags(setup), *schedule_flags(setup)]
    return [*lines, f"     {shlex.join(flags)}"] if flags else lines


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
