"""`bpipe simulate`: one configuration's time, bubble and memory.

In: flags. Out: a table or JSON; on request a trace and a picture.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bpipe.build import BALANCES
from bpipe.commands.flags import (
    add_calibration_argument,
    add_model_arguments,
    add_routing_arguments,
    add_training_arguments,
    cluster_of,
    picture_file,
    print_json,
)
from bpipe.commands.launch import add_launch_arguments, launch_document, lines, reading_of
from bpipe.flag_types import HOSTS_SAID, numbers, positive
from bpipe.generate.families import DEFAULTS, FAMILIES, families_with_deferral, families_with_groups
from bpipe.ir.hosts import ARRANGEMENTS
from bpipe.ir.layout import Vocabulary
from bpipe.models.cluster import gib_text
from bpipe.models.layout import KEPT_HALVES, Setup
from bpipe.models.profile import Profile, read_profile
from bpipe.models.recompute import FORMS
from bpipe.plan import budget, fit
from bpipe.plan.document import document
from bpipe.plan.explain import (
    HOSTS,
    by_kernel_times,
    calibration_lines,
    costly_halves,
    describe,
    pairs_apart,
    replicas_apart,
    tightness_warning,
)
from bpipe.plan.megatron_command import Reading
from bpipe.plan.megatron_flags import is_unproven
from bpipe.plan.options import filled, memory, recomputation, setup_of
from bpipe.plan.predict import SetupPrediction, predict, simulation_of
from bpipe.plan.refused import refused
from bpipe.plan.standings import FP8
from bpipe.plan.state_hosts import StateHosts, describe_moves, moves_values, state_hosts
from bpipe.simulate.report import Simulation

# Some seconds. Beyond, the steady phase is continued, unless a trace or picture needs every action.
MOST_COMPUTATIONS = 100_000

SUFFIXES = (".svg", ".png")

RECOMPUTED = (
    f"{FORMS}: what is computed again in the backward. selective: the attention core; full: whole layers (default none)"
)

MEMORY = (
    "with --balance bpipe: all that a device may hold, for all ranks or each; only what must leaves. auto: what "
    "the device has"
)


def add_configuration_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags that describe one configuration, or a launch to read it from."""
    add_model_arguments(parser)
    add_training_arguments(parser)
    add_routing_arguments(parser)
    add = parser.add_argument_group("configuration").add_argument
    add("--tensor", type=positive, metavar="T", help="tensor parallel (default 1)")
    add(
        "--context",
        type=positive,
        metavar="C",
        help="context parallel: so many devices have a part of every sequence each (default 1)",
    )
    add("--pipeline", type=positive, metavar="P", help="pipeline ranks; data parallel follows from the cluster")
    add("--micro-batch", type=positive, metavar="N", help="sequences a micro-batch (default 1)")
    add("--recompute", type=recomputation, metavar="TEXT", help=RECOMPUTED)
    add("--schedule", choices=tuple(FAMILIES), help=f"default {', with chunks '.join(DEFAULTS)}")
    add(
        "--chunks",
        type=positive,
        metavar="V",
        help="model chunks a rank (default: the fewest that the schedule has, 1 or 2)",
    )
    add(
        "--group",
        type=positive,
        metavar="G",
        help=f"of {families_with_groups()}: micro-batches that go through a chunk before the next",
    )
    add(
        "--delay",
        type=positive,
        metavar="N",
        help=f"of {families_with_deferral()}: micro-batches whose I stands before a W",
    )
    add(
        "--keep-weights-halves",
        choices=KEPT_HALVES,
        help="none: where backwards are split, compute W with I (default linear)",
    )
    add("--balance", choices=BALANCES, help="default none")
    add(
        "--bound",
        type=numbers,
        metavar="N|N,N,...",
        help="with --balance bpipe: most micro-batches of a chunk, for all ranks or each",
    )
    add("--memory", type=memory, metavar="GIB|GIB,GIB,...|auto", help=MEMORY)
    add("--hosts", choices=ARRANGEMENTS, help=f"with --balance bpipe, where what leaves goes: {HOSTS_SAID}")
    add(
        "--layers",
        type=_layers,
        metavar="N,N,...",
        help="layers of every stage (default: equal, else one more on those before the last)",
    )
    add(
        "--vocabulary-parallel",
        choices=tuple(one.value for one in Vocabulary),
        help="the output layer in shards on all pipeline ranks, by algorithm 1 or 2, or interlaced (default none)",
    )
    add("--input-shards", action="store_true", help="with --vocabulary-parallel: the embedding in shards, too")
    add("--no-sequence-parallel", action="store_true", help="tensor parallelism leaves norms and dropout whole")
    add_launch_arguments(parser)


class _Answer(NamedTuple):
    """A prediction, and what is said beside it."""

    prediction: SetupPrediction
    reading: Reading | None
    plan: fit.Fit | None
    hosted: StateHosts | None
    apart: str | None
    reasons: Sequence[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_configuration_arguments(parser)
    add_calibration_argument(parser)
    output = parser.add_argument_group("output").add_argument
    parser.add_argument(
        "--profile", metavar="FILE", help="seconds measured by `bpipe profile` or given; the rest is predicted"
    )
    output("--format", choices=("table", "json"), default="table")
    output("--trace", metavar="FILE", help="write the simulation as Chrome trace JSON, for ui.perfetto.dev")
    output("--plot", metavar="FILE", help="draw the simulation to scale, .svg or .png")


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 7,8,8,7") from None


def run(options: argparse.Namespace) -> None:
    reading = reading_of(options)
    options = filled(options, reading, ("pipeline", "global_batch"))
    setup = setup_of(options, cluster_of(options, reading))
    profile = None if options.profile is None else read_profile(options.profile)
    setup, plan = budgeted(options, setup, profile)
    plot = picture_file(options.plot, SUFFIXES)
    drawn = options.trace is not None or plot is not None
    simulation = simulation_of(setup, profile) if drawn or _num_computations(setup) <= MOST_COMPUTATIONS else None
    prediction = predict(setup, profile, simulation, options.flops_formula)
    if simulation is not None:
        _draw(simulation, setup, options.trace, plot)
    reasons = refused(setup, () if reading is None else reading.others)
    answer = _Answer(prediction, reading, plan, state_hosts(prediction), pairs_apart(prediction, profile), reasons)
    if options.format == "json":
        print_json(_answer_document(answer))
    else:
        print("\n".join(_answer_lines(answer)))


def _answer_document(answer: _Answer) -> dict[str, Any]:
    found = {**document(answer.prediction), "pairs_apart": answer.apart, "refused": list(answer.reasons)}
    if answer.plan is not None:
        found["plan"] = fit.plan_values(answer.plan)
    if answer.hosted is not None:
        found["optimizer_state_hosts"] = moves_values(answer.hosted)
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
        *(() if answer.hosted is None else [describe_moves(answer.hosted)]),
    ]


def _draw(simulation: Simulation, setup: Setup, trace: str | None, plot: Path | None) -> None:
    """Write the trace and the picture that are asked for."""
    if trace is not None:
        from bpipe.simulate.trace import write_trace

        Path(trace).write_text(write_trace(simulation))
    if plot is not None:
        plot.write_bytes(_picture(simulation, plot.suffix, f"{setup.model.name}: {describe(setup)}"))


def budgeted(options: argparse.Namespace, setup: Setup, profile: Profile | None = None) -> tuple[Setup, fit.Fit | None]:
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
    minimum = options.min_bytes or budget.MINIMUM_BYTES
    try:
        return budget.within_budget(setup, options.memory.budget_bytes or setup.limit_bytes, minimum, profile)
    except ValueError as error:
        raise ValueError(f"--memory: {error}") from None


def _num_computations(setup: Setup) -> int:
    shards = 2 * setup.pipeline * (setup.is_sharded + setup.input_shards)
    return ((3 if setup.splits else 2) * setup.num_stages + shards) * setup.num_microbatches


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


def _chosen(setup: Setup) -> str:
    """What only some schedules take, where it is another than usual."""
    texts = (
        (setup.group is not None, f"group {setup.group}"),
        (setup.delay > 0, f"delay {setup.delay}"),
        (setup.splits and not setup.keeps_halves, "W at once"),
    )
    return "".join(f" ({text})" for said, text in texts if said)


def table(prediction: SetupPrediction) -> str:
    """Return totals as text, then a line for each rank in GiB of one device."""
    setup, timing, bandwidth = prediction.setup, prediction.timing, prediction.bandwidth
    lines = [
        f"{setup.model.name}: tensor {setup.tensor}, {_context(setup)}pipeline {setup.pipeline}, data {setup.data}, "
        f"micro-batch {setup.micro_batch}, {'' if setup.fp8 is None else f'FP8 {setup.fp8.recipe}, '}"
        f"{setup.num_microbatches} micro-batches, recompute {setup.recompute}, attention {setup.attention}, "
        f"{setup.schedule}{_chosen(setup)}, balance {setup.balance}{HOSTS[setup.how.hosts]}"
        f"{'' if setup.how.bounds is None else ' to ' + ','.join(map(str, setup.how.bounds))}",
        f"iteration {timing.iteration_s:.3f} s   MFU {100 * prediction.mfu:.2f} % ({prediction.formula} FLOPs, peak "
        f"{setup.peak_flops_per_s / 1e12:g} TFLOP/s)   bubble {100 * timing.bubble_of_pipeline:.1f} % of the pipeline, "
        f"{100 * timing.bubble_of_span:.1f} % of the ranks' spans   exposed transfers {max(timing.exposed_s):.3f} s",
    ]
    if timing.simulated < setup.num_microbatches:
        others = setup.num_microbatches - timing.simulated
        lines.append(
            f"simulated are the first {timing.simulated} micro-batches; the other {others} continue their steady phase"
        )
    lines += [*calibration_lines(setup.cluster), *by_kernel_times(setup)]
    if bandwidth:
        lines.append(
            f"a transfer moves {bandwidth.transfer_bytes / 1e9:.2f} GB: within a forward it needs "
            f"{bandwidth.required_bytes_per_s / 1e9:.2f} GB/s ({bandwidth.steady_bytes_per_s / 1e9:.2f} in the steady "
            f"phase), "
            f"the link has {bandwidth.available_bytes_per_s / 1e9:.0f}"
        )
    lines += [
        remark for remark in (costly_halves(prediction), replicas_apart(setup), tightness_warning(prediction)) if remark
    ]
    lines += [FP8] if is_unproven(setup) else []
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
    lines.append("  ".join(titles) + f"  GiB, of {gib_text(prediction.memory[0].limit_bytes)}")
    for row in prediction.memory:
        layers = sum(setup.layers[stage] for stage in setup.stages_of(row.rank))
        sizes = (
            row.weights_bytes,
            row.gradients_bytes,
            row.optimizer_bytes,
            row.activations_bytes,
            row.hosted_bytes,
            row.working_bytes,
        )
        cells = [
            str(row.rank),
            str(layers),
            *map(gib_text, (*sizes, row.fragmentation_bytes, row.overhead_bytes, row.peak_bytes)),
        ]
        cells.append(str(prediction.transfers[row.rank]))
        line = "  ".join(cell.rjust(len(title)) for cell, title in zip(cells, titles, strict=True))
        lines.append(line + ("" if row.fits else "  does not fit"))
    return "\n".join(lines) + "\n"
