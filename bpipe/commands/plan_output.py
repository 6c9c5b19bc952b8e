"""Say what `bpipe plan` found.

In: the outcome of a search, the launch it is for. Out: lines, or the values of its JSON.

Predicts nothing that nobody asks for, and searches only what stands beside the rows.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from bpipe.commands.launch import launch_document
from bpipe.commands.terminal import BOLD, paint
from bpipe.config.launch.megatron_command import Reading
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.config.launch.row_flags import chosen_flags, common_flags, difference
from bpipe.plan import standings, stock
from bpipe.plan.answer import Answer, Choice, ChoiceKind, answer
from bpipe.plan.document import document
from bpipe.plan.explain import (
    CLEARLY,
    calibration_lines,
    costly_halves,
    describe,
    is_level,
    only_balanced,
    pairs_apart,
    replicas_apart,
    verdict,
)
from bpipe.plan.judge import Candidate
from bpipe.plan.predict import SetupPrediction
from bpipe.plan.refusals import refused_launch
from bpipe.plan.search import Outcome
from bpipe.plan.space import CUTS, VOCABULARIES, Space, num_grids
from bpipe.plan.stock import Stock
from bpipe.plan.vocabulary import Burden, burden, burden_document, burden_lines
from bpipe.predict.cluster import gib_text
from bpipe.predict.layout import Setup
from bpipe.predict.memory import RankMemory
from bpipe.predict.recompute import BLOCK

# Ranks whose peaks fit into one line.
_ALL_SHOWN = 16


class PlanNotes(NamedTuple):
    """Facts shown beside the rows: Megatron's own best, and the first row that the vocabulary hurts.

    `launch`: the launch from which the rows' flags differ, if one is given.
    """

    stock: Stock
    launch: Reading | None
    hurts: tuple[Burden, int] | None = None


def plan_notes(outcome: Outcome, launch: Reading | None) -> PlanNotes:
    beside = PlanNotes(stock.stock_of(outcome.space, outcome.rows), launch)
    # Of shards that were searched the rows say what they gain.
    others = [name for name in VOCABULARIES if name not in outcome.space.vocabularies]
    every = (
        (burden(found.prediction, outcome.space.profile, others), number)
        for number, found in enumerate(outcome.rows, 1)
    )
    hurts = next(((one, number) for one, number in every if one is not None), None)
    return beside._replace(hurts=hurts)


def launch_lines(yours: SetupPrediction | str) -> list[str]:
    """Return the launch as it stands, as a row of its own."""
    if isinstance(yours, str):
        return [f"the launch as it is: {yours}"]
    misses = [f"rank {rank.rank} needs {gib_text(rank.peak_bytes)}" for rank in yours.memory if not rank.fits]
    fits = "fits" if not misses else f"does not fit: {', '.join(misses[:4])}{', ...' if len(misses) > 4 else ''}"
    return ["first the launch as it is, then what was found", *_lines(0, Candidate(yours, None)), f"     {fits}"]


def answer_of(beside: Stock, differs_from: Reading | None = None, launch: Choice | None = None) -> Answer:
    """Return what to run: the launch, where one was given and can be predicted, stock's best or ours.

    `differs_from`: the launch that flags are said of.
    """
    stocks = None if beside.found is None else beside.found.prediction
    found = [
        Choice(kind, prediction, flags_of(prediction.setup, differs_from))
        for kind, prediction in ((ChoiceKind.STOCK, stocks), (ChoiceKind.OURS, beside.ours))
        if prediction is not None
    ]
    return answer(found if launch is None else [launch, *found])


def choice_of_launch(yours: SetupPrediction | str | None, reading: Reading | None) -> Choice | None:
    """Return the launch as it stands as something to run; None where there is none, or it cannot be predicted."""
    if reading is None or not isinstance(yours, SetupPrediction):
        return None
    return Choice(ChoiceKind.LAUNCH, yours, refused=refused_launch(yours.setup, reading))


def launch_values(yours: SetupPrediction | str, reading: Reading) -> dict[str, Any]:
    if isinstance(yours, str):
        said: dict[str, Any] = {"impossible": yours}
    else:
        said = {**document(yours), "refused": list(refused_launch(yours.setup, reading))}
    return {"launch": {**launch_document(reading), "as_it_stands": said}}


def _unasked(space: Space) -> tuple[str, ...]:
    """What cuts nothing where it was not asked for, or of a model without such layers."""
    contexts, layers = ("context",) * (space.contexts == (1,)), ("layers",) * (BLOCK not in space.recompute)
    asked = () if any((space.tensors, space.pipelines, space.micro_batches, space.chunk_counts)) else ("asked",)
    return (*contexts, *layers, *asked, *(("mamba", "hybrid") if space.model.hybrid is None else ()))


def plan_document(outcome: Outcome, beside: PlanNotes) -> dict[str, Any]:
    """Return the document that `--format json` promises (docs/planning.md)."""
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
        "rows": [_row(found, beside.launch) for found in outcome.rows],
        "stock": stock.stock_document(beside.stock),
        "families": standings.family_values(outcome),
        "needs": standings.trainer_needs(outcome),
        "vocabulary": None if beside.hurts is None else burden_document(*beside.hurts),
    }


def _row(found: Candidate, launch: Reading | None) -> dict[str, Any]:
    return {
        **document(found.prediction),
        "only_balanced": found.needs_bytes is not None,
        "unbalanced_peak_bytes": found.needs_bytes,
        "megatron_flags": megatron_flags(found.prediction.setup),
        "launch_difference": None if launch is None else difference(found.prediction.setup, launch)._asdict(),
    }


def table(outcome: Outcome, beside: PlanNotes) -> str:
    """Return the rows, what each holds in every rank, where the vocabulary hurts, and what balancing buys."""
    cluster = outcome.space.cluster
    share = f"{100 * cluster.limit_bytes / cluster.device.memory_bytes:.0f} % of a device"
    limit = f"{gib_text(cluster.limit_bytes)} GiB ({share})"
    head = f"{outcome.num_fitting} of {outcome.num_configurations} configurations fit into {limit}"
    if outcome.rows:
        head += f", {outcome.num_simulated} were simulated; the {len(outcome.rows)} fastest:"
    lines = [head, *calibration_lines(cluster)]
    num_level = _num_level(outcome)
    for number, found in enumerate(outcome.rows, 1):
        if number == num_level + 1:
            lines.append(
                f"rows below take at least {100 * (CLEARLY - 1):.0f} % more time than row 1; rows above are level with it"
            )
        apart = pairs_apart(found.prediction, outcome.space.profile)
        lines += [
            *_lines(number, found),
            *([f"     {apart}"] if apart else []),
            f"     {flags_of(found.prediction.setup, beside.launch)}",
        ]
    if outcome.rows and beside.launch is None:
        lines.append(f"all rows: {shlex.join(common_flags(outcome.rows[0].prediction.setup))}")
    standing = standings.family_lines(outcome)
    hurts = burden_lines(*beside.hurts) if beside.hurts else ()
    return "\n".join((*lines, *standing, *hurts, verdict(outcome).text)) + "\n"


def _num_level(outcome: Outcome) -> int:
    """Return how many rows are not clearly slower than the first."""
    seconds = [one.prediction.timing.iteration_s for one in outcome.rows]
    return sum(is_level(each, seconds[0]) for each in seconds)


def _lines(number: int, found: Candidate) -> list[str]:
    prediction = found.prediction
    timing, bandwidth = prediction.timing, prediction.bandwidth
    first = (
        f"{number:3}. {timing.iteration_s:9.3f} s  MFU {100 * prediction.mfu:5.2f} %  bubble "
        f"{100 * timing.bubble_of_makespan:5.1f} %  "
        f"exposed {max(timing.exposed_s):.3f} s  {describe(prediction.setup)}"
    )
    lines = [
        paint(first, BOLD),
        f"     GiB per rank, of {gib_text(prediction.memory[0].limit_bytes)}: {peaks_text(prediction.memory)}",
    ]
    if bandwidth:
        lines.append(
            f"     transfers of {bandwidth.transfer_bytes / 1e9:.2f} GB need "
            f"{bandwidth.required_bytes_per_s / 1e9:.1f} GB/s "
            f"({bandwidth.steady_bytes_per_s / 1e9:.1f} in the steady phase); the link has "
            f"{bandwidth.available_bytes_per_s / 1e9:.0f}"
        )
    remarks = (only_balanced(found), costly_halves(prediction), replicas_apart(prediction.setup))
    return [*lines, *(f"     {text}" for text in remarks if text)]


def peaks_text(memory: Sequence[RankMemory]) -> str:
    """Return the GiB of every rank; of many ranks, how many in a row hold as much."""
    peaks = [gib_text(rank.peak_bytes) for rank in memory]
    if len(peaks) <= _ALL_SHOWN:
        return " ".join(peaks)
    alike = ((value, len(tuple(run))) for value, run in groupby(peaks))
    return " ".join(value if number == 1 else f"{number} x {value}" for value, number in alike)


def flags_of(setup: Setup, launch: Reading | None) -> str:
    """Return the flags to change in the launch, or all chosen flags without a launch."""
    return shlex.join(chosen_flags(setup)) if launch is None else difference(setup, launch).text
