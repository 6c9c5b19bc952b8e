"""`bpipe simulate`: one configuration's time, bubble and memory.

In: flags. Out: a table or JSON; on request a trace, a picture and a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bpipe.balance.config import BALANCES, name_of
from bpipe.commands.launch import launch_document, lines, reading_of
from bpipe.commands.shared import CONFIGURED, cluster_of, measured_of, picture_file, print_json, with_trace
from bpipe.commands.side_by_side import Compared, laid_over, lines_of, values_of
from bpipe.commands.terminal import BOLD, RED, columns, paint, progress_of
from bpipe.config.flags import outputs
from bpipe.config.flags.configurations import MEASURED
from bpipe.config.flags.flag import Command, Group, Options, Task
from bpipe.config.launch.megatron_command import Reading
from bpipe.plan import fit
from bpipe.plan.budget_fit import within_budget
from bpipe.plan.document import document
from bpipe.plan.explain import (
    HOSTS,
    calibration_lines,
    costly_halves,
    describe,
    pairs_apart,
    replicas_apart,
    tightness_warning,
    uneven_by_counts,
)
from bpipe.plan.options import filled, setup_of
from bpipe.plan.predict import SetupPrediction, predict, simulation_of
from bpipe.plan.refusals import refused_launch
from bpipe.plan.standings import FP8, SLICES, needs_of_setup
from bpipe.predict.cluster import gib_text
from bpipe.predict.error_bars import range_text
from bpipe.predict.layout import Setup
from bpipe.predict.memory import RankMemory
from bpipe.predict.profile import Profile
from bpipe.predict.slice_lengths import lengths_of
from bpipe.predict.slices import slice_bounds
from bpipe.simulate.report import Simulation

SUFFIXES = (".svg", ".png")

COMMAND = Command(
    (
        *CONFIGURED,
        MEASURED,
        Group("output", (outputs.COMPARED, outputs.FORMAT, outputs.TRACE, outputs.PLOT, outputs.HTML)),
    ),
    (
        Task(
            "predict a configuration",
            "bpipe simulate --model gpt3-96b --cluster a100-80g:4x8 --tp 4 --pp 8 --mbs 2 --gbs 128 --recompute "
            "selective",
            (
                "model",
                "cluster",
                "tensor",
                "pipeline",
                "chunks",
                "micro_batch",
                "global_batch",
                "schedule",
                "recompute",
            ),
        ),
        Task(
            "predict a launch as it stands",
            "bpipe simulate --cluster h100-80g --launch launch.json",
            ("launch", "megatron"),
        ),
        Task(
            "balance it within a memory budget",
            "bpipe simulate --cluster h100-80g --launch launch.json --balance bpipe --memory 75",
            ("balance", "memory"),
        ),
        Task(
            "cut long sequences into slices",
            "bpipe simulate --model llama3-70b --seq 131072 --cluster h100-80g:8x8 --tp 8 --pp 8 --gbs 16 --recompute "
            "full --slices 8 --slice-lengths time",
            ("slices", "slice_lengths"),
        ),
        Task(
            "compare two settings, or two launches",
            "bpipe simulate --cluster h100-80g --launch launch.json --compare '' '--tp 8 --pp 4'",
            ("compare",),
        ),
        Task(
            "write a page with charts",
            "bpipe simulate --cluster h100-80g --launch launch.json --html run.html",
            ("html",),
        ),
    ),
)


class _Answer(NamedTuple):
    """A prediction, and what is said beside it."""

    prediction: SetupPrediction
    reading: Reading | None
    plan: fit.Fit | None
    apart: str | None
    reasons: Sequence[str]


def run(options: Options) -> None:
    if options.compare is not None:
        _compare(options)
        return
    with progress_of("simulate"):
        answer = _answer(options)
    if options.format == "json":
        print_json(_answer_document(answer))
    else:
        print("\n".join(_answer_lines(answer)))


def _compare(options: Options) -> None:
    """Print two predictions side by side."""
    if _is_drawn(options):
        raise ValueError("--compare predicts twice, and --trace, --plot and --html draw one: leave one of the two out")
    with progress_of("simulate"):
        answers = [_answer(laid_over(options, settings, COMMAND)) for settings in options.compare]
    sides = [
        Compared(settings, one.prediction, one.apart, one.reasons)
        for settings, one in zip(options.compare, answers, strict=True)
    ]
    if options.format == "json":
        print_json(values_of(sides, [_answer_document(one) for one in answers]))
    else:
        print("\n".join(lines_of(sides)))


def _is_drawn(options: Options) -> bool:
    return any(file is not None for file in (options.trace, options.plot, options.html))


def _answer(options: Options) -> _Answer:
    reading = reading_of(options)
    options = filled(options, reading, ("pipeline", "global_batch"))
    profile, traced = measured_of(options)
    setup = with_trace(setup_of(options, cluster_of(options, reading)), traced, options.profile)
    setup, plan = budgeted(options, setup, profile)
    plot = picture_file(options.plot, SUFFIXES)
    # As plan times its rows, so that one configuration has one time; a picture shows every action, and times are its.
    simulation = simulation_of(setup, profile) if _is_drawn(options) else None
    prediction = predict(setup, profile, simulation, options.flops_formula)
    if simulation is not None:
        _draw(simulation, setup, options.trace, plot)
        if options.html is not None:
            from bpipe.commands.simulate_page import page

            Path(options.html).write_bytes(page(prediction, simulation))
    apart = pairs_apart(prediction, profile)
    return _Answer(prediction, reading, plan, apart, refused_launch(setup, reading))


def _answer_document(answer: _Answer) -> dict[str, Any]:
    found = {**document(answer.prediction), "pairs_apart": answer.apart, "refused": list(answer.reasons)}
    if answer.plan is not None:
        found["plan"] = fit.plan_values(answer.plan)
    if answer.reading is not None:
        found["launch"] = launch_document(answer.reading)
    return found


def _answer_lines(answer: _Answer) -> list[str]:
    return [
        *lines(answer.reading),
        *(() if answer.plan is None else fit.plan_lines(answer.plan)),
        table(answer.prediction).removesuffix("\n"),
        *([answer.apart] if answer.apart else ()),
        *(f"the trainer refuses this: {reason}" for reason in answer.reasons),
    ]


def _draw(simulation: Simulation, setup: Setup, trace: str | None, plot: Path | None) -> None:
    """Write the trace and the picture that are asked for."""
    if trace is not None:
        from bpipe.simulate.trace import write_trace

        Path(trace).write_text(write_trace(simulation))
    if plot is not None:
        plot.write_bytes(_picture(simulation, plot.suffix, f"{setup.model.name}: {describe(setup)}"))


def budgeted(options: Options, setup: Setup, profile: Profile | None = None) -> tuple[Setup, fit.Fit | None]:
    """Return the setup and plan within the memory budget asked for. Raises ValueError where no plan keeps it."""
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


def _picture(simulation: Simulation, suffix: str, name: str) -> bytes:
    from bpipe.draw.timeline import lay_out_simulation

    picture = lay_out_simulation(simulation, name)
    if suffix == ".svg":
        from bpipe.draw.svg import render_svg

        return render_svg(picture).encode()
    from bpipe.draw.png import render_png

    return render_png(picture)


def _context(setup: Setup) -> str:
    return f"context {setup.context} by {setup.cp_comm_type}, " if setup.context > 1 else ""


def _lengths(setup: Setup) -> str:
    lengths = lengths_of(slice_bounds(setup))
    return str(lengths[0]) if len(set(lengths)) == 1 else ",".join(map(str, lengths))


def _chosen(setup: Setup) -> str:
    """What only some schedules take, where it is another than usual."""
    texts = (
        (setup.group_size is not None, f"group {setup.group_size}"),
        (setup.delay > 0, f"delay {setup.delay}"),
        (setup.splits and not setup.keeps_halves, "W at once"),
        (setup.slices > 1, f"{setup.slices} slices of {_lengths(setup)} tokens"),
    )
    return "".join(f" ({text})" for said, text in texts if said)


def table(prediction: SetupPrediction) -> str:
    """Return totals as text, then a line for each rank in GiB of one device."""
    setup, timing, bandwidth = prediction.setup, prediction.timing, prediction.bandwidth
    bounds = None if setup.balance is None else setup.balance.bounds
    lines = [
        f"{setup.model.name}: tensor {setup.tensor}, {_context(setup)}pipeline {setup.pipeline}, data {setup.data}, "
        f"micro-batch {setup.micro_batch}, {'' if setup.fp8 is None else f'FP8 {setup.fp8.recipe}, '}"
        f"{setup.num_microbatches} micro-batches, recompute {setup.recompute}, attention {setup.attention}, "
        f"{setup.schedule}{_chosen(setup)}, balance {name_of(setup.balance)}{HOSTS[setup.hosts]}"
        f"{'' if bounds is None else ' to ' + ','.join(map(str, bounds))}",
        f"iteration {timing.iteration_s:.3f} s{range_text(setup, timing.iteration_s)}   MFU "
        f"{100 * prediction.mfu:.2f} % ({prediction.formula} FLOPs, peak {setup.peak_flops_per_s / 1e12:g} TFLOP/s)   "
        f"bubble {100 * timing.bubble_of_pipeline:.1f} % of the pipeline, {100 * timing.bubble_of_span:.1f} % of the "
        f"ranks' spans   exposed transfers {max(timing.exposed_s):.3f} s",
    ]
    lines += calibration_lines(setup.cluster)
    if bandwidth:
        lines.append(
            f"each transfer moves {bandwidth.transfer_bytes / 1e9:.2f} GB: to hide behind one forward it needs "
            f"{bandwidth.required_bytes_per_s / 1e9:.2f} GB/s ({bandwidth.steady_bytes_per_s / 1e9:.2f} in the steady "
            f"phase); the link has {bandwidth.available_bytes_per_s / 1e9:.0f}"
        )
    lines += [
        remark
        for remark in (
            costly_halves(prediction),
            replicas_apart(setup),
            uneven_by_counts(setup),
            tightness_warning(prediction),
        )
        if remark
    ]
    needs = needs_of_setup(setup)
    lines += [need for need in (FP8, SLICES) if need in needs]
    titles = (
        "rank",
        "layers",
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "hosted",
        "working",
        "fragm.",
        "overhead",
        "peak",
        "evictions",
    )
    rows: list[tuple[str, ...]] = [titles, *(_cells(prediction, row) for row in prediction.memory)]
    head, *drawn = columns(rows)
    lines.append(paint(f"{head}  GiB, of {gib_text(prediction.memory[0].limit_bytes)}", BOLD))
    lines += [
        line if row.fits else paint(f"{line}  does not fit", RED)
        for line, row in zip(drawn, prediction.memory, strict=True)
    ]
    return "\n".join(lines) + "\n"


def _cells(prediction: SetupPrediction, row: RankMemory) -> tuple[str, ...]:
    """Write what one rank holds, in the order of the titles."""
    setup = prediction.setup
    layers = sum(setup.layers[stage] for stage in setup.stages_of(row.rank))
    sizes = (
        row.weights_bytes,
        row.gradients_bytes,
        row.optimizer_bytes,
        row.activations_bytes,
        row.hosted_bytes,
        row.working_bytes,
    )
    held = map(gib_text, (*sizes, row.fragmentation_bytes, row.overhead_bytes, row.peak_bytes))
    return (str(row.rank), str(layers), *held, str(prediction.transfers[row.rank]))
