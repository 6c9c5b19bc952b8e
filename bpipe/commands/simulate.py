"""`bpipe simulate`: one configuration's time, bubble and memory, on request with a trace or a picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bpipe.balance.config import BALANCES
from bpipe.commands.launch import CONFIGURED, launch_document, lines, predicted_of, reading_of
from bpipe.commands.terminal import print_json, progress_of, table, tell
from bpipe.config.flags import outputs
from bpipe.config.flags.configurations import MEASURED
from bpipe.config.flags.flag import Options, Task, command, group
from bpipe.config.launch.megatron_command import Reading
from bpipe.plan.budget import Fit, plan_lines, plan_values, within_budget
from bpipe.plan.candidates import EXPOSED, cells, describe, document, legend
from bpipe.plan.explain import FP8, SLICES, calibration_lines, needs_of_setup, remarks
from bpipe.plan.options import filled
from bpipe.plan.predict import Candidate, predict, simulation_of
from bpipe.plan.refusals import refused_launch
from bpipe.predict.cluster import gib_text
from bpipe.predict.layout import Setup
from bpipe.predict.memory import RankMemory
from bpipe.predict.profile import Profile
from bpipe.predict.slices import lengths_of, slice_bounds

if TYPE_CHECKING:
    from rich.table import Table

# With more ranks, the totals are printed above them, too.
_MANY_RANKS = 16
_TOTALS = ("iteration s", "range s", "MFU %", "bubble %", "exposed s", "state")
_RANK_LEGEND = (
    "hosted: kept for other ranks; working: needed by one computation on top; fragm.: lost to fragmentation; "
    "overhead: CUDA context and communicators"
)
_RANK_TITLES = (
    *("rank", "layers", "weights", "gradients", "optimizer", "activations", "hosted", "working", "fragm.", "overhead"),
    *("peak", "evictions", "fits"),
)

COMMAND = command(
    *CONFIGURED,
    MEASURED,
    group("output", outputs.FORMAT, outputs.TRACE),
    Task(
        "predict a configuration",
        "bpipe simulate --model gpt3-96b --cluster a100-80g:4x8 --tp 4 --pp 8 --mbs 2 --gbs 128 --recompute selective",
        "model cluster tensor pipeline chunks micro_batch global_batch schedule recompute",
    ),
    Task("predict a launch as it stands", "bpipe simulate --cluster h100-80g --launch launch.json", "launch megatron"),
    Task(
        "balance it within a memory budget",
        "bpipe simulate --cluster h100-80g --launch launch.json --balance bpipe --memory 75",
        "balance memory",
    ),
    Task(
        "cut long sequences into slices",
        "bpipe simulate --model llama3-70b --seq 131072 --cluster h100-80g:8x8 --tp 8 --pp 8 --gbs 16 --recompute "
        "full --slices 8 --slice-lengths time",
        "slices slice_lengths",
    ),
    Task("draw it", "bpipe simulate --cluster h100-80g --launch launch.json --trace trace.json", "trace"),
)


class _Answer(NamedTuple):
    """A prediction, and what is shown with it."""

    row: Candidate
    reading: Reading | None
    plan: Fit | None


def run(options: Options) -> None:
    with progress_of("simulate"):
        answer = _answer(options)
    if options.format == "json":
        print_json(_answer_document(answer))
    else:
        tell(*lines(answer.reading), *(() if answer.plan is None else plan_lines(answer.plan)))
        tell(*_text(answer.row))


def _answer(options: Options) -> _Answer:
    reading = reading_of(options)
    options = filled(options, reading, ("pipeline", "global_batch"))
    setup, profile = predicted_of(options, reading)
    setup, plan = budgeted(options, setup, profile)
    # Timed as in plan, so that a configuration has one time; a picture needs the simulation of every action.
    simulation = simulation_of(setup, profile) if options.trace is not None else None
    row = predict(setup, profile, simulation)
    if simulation is not None:
        from bpipe.simulate.trace import write_trace

        Path(options.trace).write_text(write_trace(simulation))
    row = replace(row, refused=refused_launch(setup, reading))
    return _Answer(row, reading, plan)


def _answer_document(answer: _Answer) -> dict[str, Any]:
    return {
        **document(answer.row),
        "refused": list(answer.row.refused),
        **({} if answer.plan is None else {"plan": plan_values(answer.plan)}),
        **({} if answer.reading is None else {"launch": launch_document(answer.reading)}),
    }


def budgeted(options: Options, setup: Setup, profile: Profile | None = None) -> tuple[Setup, Fit | None]:
    """Return the setup and plan within the memory budget asked for. Raises ValueError if no plan keeps it."""
    if options.memory is None:
        return setup, None
    if options.balance == BALANCES[0] or options.bound is not None:
        wanted = (
            ": give --balance bpipe, too, or leave it out"
            if options.bound is None
            else ", and so does --bound: give one of them"
        )
        raise ValueError(f"--memory says how to balance{wanted}")
    try:
        return within_budget(setup, options.memory.budget_bytes or setup.limit_bytes, options.min_bytes, profile)
    except ValueError as error:
        raise ValueError(f"--memory: {error}") from None


def _text(row: Candidate) -> list[str | Table]:
    """Return totals, the GiB of one device of each rank, and remarks."""
    setup = row.setup
    lengths = "" if setup.slices == 1 else f", slices of {','.join(map(str, lengths_of(slice_bounds(setup))))} tokens"
    bounds = None if setup.balance is None else setup.balance.bounds
    head = (
        f"{setup.model.name}: {describe(setup)}, {setup.num_microbatches} micro-batches, attention {setup.attention}"
        f"{'' if setup.fp8 is None else f', FP8 {setup.fp8.recipe}'}{lengths}"
        f"{'' if bounds is None else ', bounds ' + ','.join(map(str, bounds))}"
    )
    flops = f"MFU of peak {setup.peak_flops_per_s / 1e12:g} TFLOP/s"
    ranks = [_rank_cells(row, memory) for memory in row.memory]
    needs = [need for need in needs_of_setup(setup) if need in (FP8, SLICES)]
    totals = table(_TOTALS, cells(_TOTALS, [row]))
    return [
        head,
        *([totals] if len(ranks) > _MANY_RANKS else ()),
        "",
        f"GiB of one device of each rank, of {gib_text(row.limit_bytes)}:",
        table(_RANK_TITLES, ranks, ["" if rank.fits else "red" for rank in row.memory]),
        _RANK_LEGEND,
        "",
        *calibration_lines(setup.cluster),
        *needs,
        *remarks(row),
        f"{legend([setup])}; {flops}; {EXPOSED}",
        totals,
    ]


def _rank_cells(row: Candidate, rank: RankMemory) -> list[str]:
    layers = sum(row.setup.layers[stage] for stage in row.setup.stages_of(rank.rank))
    names = ("weights", "gradients", "optimizer", "activations", "hosted", "working", "fragmentation", "overhead")
    sizes = (gib_text(getattr(rank, f"{name}_bytes")) for name in (*names, "peak"))
    return [str(rank.rank), str(layers), *sizes, str(row.transfers[rank.rank]), "" if rank.fits else "no"]
