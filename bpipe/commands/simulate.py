"""`bpipe simulate`: one configuration's time, bubble and memory, on request with a trace or a picture."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bpipe.balance.config import BALANCES, name_of
from bpipe.commands.launch import CONFIGURED, launch_document, lines, predicted_of, reading_of
from bpipe.commands.terminal import print_json, progress_of, table, tell
from bpipe.config.flags import outputs
from bpipe.config.flags.configurations import MEASURED
from bpipe.config.flags.flag import Options, Parser, Task, command, group
from bpipe.config.flags.schedules import ORDER
from bpipe.config.launch.megatron_command import Reading
from bpipe.plan import fit
from bpipe.plan.budget import within_budget
from bpipe.plan.candidates import CLEARLY, EXPOSED, HOSTS, cells, document, is_level
from bpipe.plan.explain import FP8, SLICES, calibration_lines, needs_of_setup, pairs_apart, refusals, remarks
from bpipe.plan.options import filled
from bpipe.plan.predict import Candidate, predict, simulation_of
from bpipe.plan.refusals import refused_launch
from bpipe.predict.cluster import gib_text
from bpipe.predict.layout import Setup
from bpipe.predict.memory import RankMemory
from bpipe.predict.profile import Profile
from bpipe.predict.slice_lengths import lengths_of
from bpipe.predict.slices import slice_bounds
from bpipe.schedule.families.family import TAKEN

if TYPE_CHECKING:
    from rich.table import Table

# With more ranks, the totals are printed above them, too.
_MANY_RANKS = 16
_SIDES = ("A", "B")
_TOTALS = ("iteration s", "range s", "MFU %", "bubble, % of pipeline", "bubble, % of spans", "exposed s", "state")
_COMPARED = (
    *("configuration", "iteration s", "range s", "MFU %", "bubble, % of pipeline", "exposed s", "peak GiB", "of GiB"),
    *("state", "least full GiB", "evictions"),
)
_RANK_LEGEND = (
    "hosted: kept for other ranks; working: needed by one computation on top; fragm.: lost to fragmentation; "
    "overhead: CUDA context and communicators"
)
_TOTALS_LEGEND = f"span: from a rank's first computation to its last; {EXPOSED}"
_RANK_TITLES = (
    *("rank", "layers", "weights", "gradients", "optimizer", "activations", "hosted", "working", "fragm.", "overhead"),
    *("peak", "evictions", "fits"),
)

COMMAND = command(
    *CONFIGURED,
    MEASURED,
    group("output", outputs.COMPARED, outputs.FORMAT, outputs.TRACE),
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
    Task(
        "compare two settings, or two launches",
        "bpipe simulate --cluster h100-80g --launch launch.json --compare '' '--tp 8 --pp 4'",
        "compare",
    ),
    Task("draw it", "bpipe simulate --cluster h100-80g --launch launch.json --trace trace.json", "trace"),
)


class _Answer(NamedTuple):
    """A prediction, and what is shown with it."""

    row: Candidate
    reading: Reading | None
    plan: fit.Fit | None
    apart: str | None


def run(options: Options) -> None:
    if options.compare is not None:
        _compare(options)
        return
    with progress_of("simulate"):
        answer = _answer(options)
    if options.format == "json":
        print_json(_answer_document(answer))
    else:
        tell(*lines(answer.reading), *(() if answer.plan is None else fit.plan_lines(answer.plan)))
        tell(*_text(answer.row, answer.apart))


def _compare(options: Options) -> None:
    """Print two predictions side by side."""
    if options.trace is not None:
        raise ValueError("--compare predicts twice, and --trace draws one: leave one of the two out")
    with progress_of("simulate"):
        answers = [_answer(_laid_over(options, settings)) for settings in options.compare]
    sides = [answer.row for answer in answers]
    if options.format == "json":
        documents = (_answer_document(answer) for answer in answers)
        print_json({**dict(zip(_SIDES, documents, strict=True)), "verdict": _verdict(sides)})
        return
    columns = zip(*cells(_COMPARED, sides), strict=True)
    settings = [("settings", *(given or "as it stands" for given in options.compare))]
    tell(table(("", *_SIDES), [*settings, *((title, *pair) for title, pair in zip(_COMPARED, columns, strict=True))]))
    for name, answer in zip(_SIDES, answers, strict=True):
        notes = [answer.apart] if answer.apart else []
        tell(*(f"{name}: {text}" for text in (*notes, *refusals(answer.row))))
    tell(_verdict(sides))


def _laid_over(options: Options, settings: str) -> Options:
    """Return the options replaced by settings, a launch by another launch. One word that is no flag names a launch."""
    words = shlex.split(settings)
    if len(words) == 1 and not words[0].startswith("-"):
        words = ["--launch", *words]
    base = Options(**{**vars(options), "compare": None})
    if {"--", "--launch"} & set(words):
        base = Options(**{**vars(base), "megatron": [], "launch": None})
    groups = (
        group._replace(flags=tuple(replace(flag, required=False) for flag in group.flags)) for group in COMMAND[0]
    )
    parser = Parser(prog="bpipe simulate --compare", add_help=False)
    parser.declare(COMMAND._replace(groups=tuple(groups)))
    parser.check_flags(words)
    return parser.parse_args(words, base)


def _verdict(sides: Sequence[Candidate]) -> str:
    unable = [name for name, side in zip(_SIDES, sides, strict=True) if not side.can_run]
    first, second = (side.iteration_s for side in sides)
    percent = 100 * (second / first - 1)
    apart = f"B takes {abs(percent):.1f} % {'longer' if percent > 0 else 'less'} than A"
    if is_level(max(first, second), min(first, second)):
        apart += f", which is level: predictions tell no less than {100 * (CLEARLY - 1):.0f} % apart"
    return f"{apart}; {' and '.join(unable)} cannot run." if unable else f"{apart}."


def _answer(options: Options) -> _Answer:
    reading = reading_of(options)
    options = filled(options, reading, ("pipeline", "global_batch"))
    setup, profile = predicted_of(options, reading)
    setup, plan = budgeted(options, setup, profile)
    # Timed as in plan, so that a configuration has one time; a picture needs the simulation of every action.
    simulation = simulation_of(setup, profile) if options.trace is not None else None
    row = predict(setup, profile, simulation, options.flops_formula)
    if simulation is not None:
        from bpipe.simulate.trace import write_trace

        Path(options.trace).write_text(write_trace(simulation))
    row = replace(row, refused=refused_launch(setup, reading))
    return _Answer(row, reading, plan, pairs_apart(row, profile))


def _answer_document(answer: _Answer) -> dict[str, Any]:
    return {
        **document(answer.row),
        "pairs_apart": answer.apart,
        "refused": list(answer.row.refused),
        **({} if answer.plan is None else {"plan": fit.plan_values(answer.plan)}),
        **({} if answer.reading is None else {"launch": launch_document(answer.reading)}),
    }


def budgeted(options: Options, setup: Setup, profile: Profile | None = None) -> tuple[Setup, fit.Fit | None]:
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


def _options(setup: Setup) -> str:
    """Write the options that only some schedules take, if they differ from the defaults."""
    values = {flag: getattr(setup, flag.field) for flag in ORDER if flag.field != "slices"}
    texts = [f"{flag.name[2:]} {value}" for flag, value in values.items() if value != TAKEN[flag.field].default]
    texts += ["W at once"] if setup.splits and not setup.keeps_halves else []
    if setup.slices > 1:
        lengths = lengths_of(slice_bounds(setup))
        tokens = str(lengths[0]) if len(set(lengths)) == 1 else ",".join(map(str, lengths))
        texts.append(f"{setup.slices} slices of {tokens} tokens")
    return "".join(f" ({text})" for text in texts)


def _text(row: Candidate, apart: str | None) -> list[str | Table]:
    """Return totals, the GiB of one device of each rank, and remarks."""
    setup = row.setup
    context = f"context {setup.context} by {setup.cp_comm_type}, " if setup.context > 1 else ""
    bounds = None if setup.balance is None else setup.balance.bounds
    head = (
        f"{setup.model.name}: tensor {setup.tensor}, {context}pipeline {setup.pipeline}, data {setup.data}, "
        f"micro-batch {setup.micro_batch}, {'' if setup.fp8 is None else f'FP8 {setup.fp8.recipe}, '}"
        f"{setup.num_microbatches} micro-batches, recompute {setup.recompute}, attention {setup.attention}, "
        f"{setup.schedule}{_options(setup)}, balance {name_of(setup.balance)}{HOSTS[setup.hosts]}"
        f"{'' if bounds is None else ' to ' + ','.join(map(str, bounds))}"
    )
    flops = f"MFU of {row.formula} FLOPs, peak {setup.peak_flops_per_s / 1e12:g} TFLOP/s"
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
        *remarks(row, apart),
        f"{flops}; {_TOTALS_LEGEND}",
        totals,
    ]


def _rank_cells(row: Candidate, rank: RankMemory) -> list[str]:
    layers = sum(row.setup.layers[stage] for stage in row.setup.stages_of(rank.rank))
    names = ("weights", "gradients", "optimizer", "activations", "hosted", "working", "fragmentation", "overhead")
    sizes = (gib_text(getattr(rank, f"{name}_bytes")) for name in (*names, "peak"))
    return [str(rank.rank), str(layers), *sizes, str(row.transfers[rank.rank]), "" if rank.fits else "no"]
