"""`bpipe trace`: what every stage of a launch holds, by Megatron's own model at true size, without a GPU or its memory.

In: flags, or a launch. Out: a table or JSON, and a profile that `simulate` and `plan` read. A process of its own builds
the model (`megatron.scheduling.trace.stages`); this one imports neither torch nor Megatron.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bpipe.commands.launch import CONFIGURED, flags_of, words_of
from bpipe.commands.terminal import print_json, progress_of, table, tell
from bpipe.config.flags import outputs, schedules
from bpipe.config.flags.flag import Flag, Options, Task, command, group
from bpipe.config.launch.megatron_command import Reading, read_command, split_command
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.config.launch.megatron_settings import unknown_flags
from bpipe.extras import require
from bpipe.plan.options import filled, routing_of, setup_of
from bpipe.predict.activations import stage_bytes
from bpipe.predict.cluster import DEVICES, Cluster
from bpipe.predict.layout import Setup
from bpipe.predict.states import stage_parameters
from bpipe.predict.training import beyond_traces

PROGRAM = "megatron.scheduling.trace.stages"
OF_TORCH = "bpipe.torch.trace"
MIB = 2**20
# What is held does not depend on the devices.
_OF_DEVICES = ("cluster", "memory")

COMMAND = command(
    *(own._replace(flags=tuple(flag for flag in own.flags if flag.field not in _OF_DEVICES)) for own in CONFIGURED),
    group(
        "stages for torch.distributed.pipelining",
        Flag(
            "module",
            "--module",
            "function that makes the stages for torch.distributed.pipelining: it returns a list of "
            "their modules in order, and a tuple of the first stage's inputs for one micro-batch; "
            "after these optionally the loss function and its target",
            "FILE:FUNCTION",
        ),
        schedules.MICROBATCHES,
        Flag(
            "device",
            "--device",
            "device whose kernels decide what is saved; it need not be present (default cuda)",
            default="cuda",
            choices=("cuda", "cpu"),
        ),
    ),
    group("output", outputs.FORMAT, outputs.OUTPUT),
    Task(
        "trace stages for torch.distributed.pipelining",
        "bpipe trace --module model.py:stages --pp 4 --microbatches 8",
        "module pipeline microbatches schedule bound hosts device",
    ),
    Task(
        "trace the stages of a launch",
        "bpipe trace --launch launch.json --output traced.json",
        "launch megatron vocabulary attention output",
    ),
    Task(
        "trace a configuration of a model",
        "bpipe trace --model gpt3-96b --tp 8 --pp 8 --mbs 1",
        "model tensor pipeline micro_batch recompute",
    ),
)


class TracedLaunch(NamedTuple):
    """Launch to trace."""

    flags: Sequence[str]

    setup: Setup | None
    """Its setup for the formulas; None if they do not cover it."""

    unknown: str | None = None
    """Why the formulas do not cover it."""


def run(options: Options) -> None:
    if options.module is not None:
        _run_module(options)
        return
    require("megatron", "bpipe trace")
    launch = _launch(options)
    traced = _answer_of(PROGRAM, launch.flags, "building Megatron's stages without memory, about ten seconds")
    if options.output is not None:
        write_profile(options.output, traced, launch)
    if options.format != "json":
        _tell(traced["stages"], launch)
        return
    formulas: dict[str, Any] = {"unknown": launch.unknown}
    if launch.setup is not None:
        formulas = {"parameters": stage_parameters(launch.setup), "saved_bytes": stage_bytes(launch.setup)}
    print_json({**traced, "formulas": formulas})


def _run_module(options: Options) -> None:
    """Print what torch's stages hold, and what each rank holds by the schedule, unbalanced and balanced."""
    require("torch", "bpipe trace --module")
    if options.pipeline is None or options.microbatches is None:
        raise ValueError("--module: what ranks hold depends on how many there are: give --pp and --microbatches")
    if options.output is not None:
        raise ValueError("--output: simulate and plan read only profiles of Megatron's stages: leave one of them out")
    asked = {
        "module": options.module,
        "device": options.device,
        "ranks": options.pipeline,
        "microbatches": options.microbatches,
        "schedule": options.schedule,
        "bounds": options.bound,
        "hosts": options.hosts,
        "group_size": options.group_size,
    }
    traced = _answer_of(OF_TORCH, [json.dumps(asked)], "running the stages on fake tensors")
    if options.format == "json":
        print_json(traced)
        return
    stages = [
        (str(number), f"{stage['parameters']:,}", _mib(stage["saved_bytes"]), _mib(stage["moved_bytes"]))
        for number, stage in enumerate(traced["stages"])
    ]
    both = zip(traced["alone_bytes"], traced["balanced_bytes"], strict=True)
    ranks = [(str(number), *map(_mib, sizes)) for number, sizes in enumerate(both)]
    tell(table(("stage", "parameters", "saved MiB", "movable MiB"), stages), "")
    tell(table(("rank", "peak MiB", "balanced MiB"), ranks))
    tell("peak: micro-batches and host buffers, without weights")


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:.1f}"


def write_profile(file: str, traced: Mapping[str, Any], launch: TracedLaunch) -> None:
    """Write the profile that `simulate` and `plan` read with --profile.

    Raises ValueError for a launch without a setup, or with one that a profile does not describe.
    """
    setup = launch.setup
    if setup is None:
        raise ValueError(f"--output: simulate and plan cannot use a trace of this launch: {launch.unknown}")
    for name in beyond_traces(setup):
        raise ValueError(f"--output: a profile does not record {name}, so it would fit other launches: leave it out")
    # What is saved depends on recomputation and on how layers are cut, which the program does not say.
    cut = {"recompute": setup.recompute, "sequence_parallel": setup.sequence_parallel, "layers": setup.layers}
    measured = {**traced["measured"], **cut}
    stages = [
        {name: stage[name] for name in ("micro_batch", "saved_bytes", "parameters")} for stage in traced["stages"]
    ]
    Path(file).write_text(json.dumps({"stages": stages, "measured": measured}, indent=1) + "\n")


def _launch(options: Options) -> TracedLaunch:
    words = words_of(options)
    if words is None:
        setup = _setup(filled(options, None, ("pipeline",)), None)
        return TracedLaunch([*megatron_flags(setup), *_assumed(setup)], setup)
    # The program that builds the stages has flags of its own.
    unknown = [flag for flag in unknown_flags(split_command(words)[1]) if not flag.startswith("--trace-")]
    flags = flags_of(words, unknown)
    try:
        reading = read_command(words)
        setup = _setup(filled(options, reading, ("pipeline",)), reading)
    except ValueError as error:
        # The launch's tokenizer knows it, and nobody here reads that.
        vocabulary = [] if options.vocabulary is None else ["--vocab-size", str(options.vocabulary)]
        return TracedLaunch([*flags, *vocabulary], None, str(error))
    return TracedLaunch([*flags, *_assumed(setup)], setup)


def _assumed(setup: Setup) -> list[str]:
    """Return flags for what a launch does not say by itself."""
    return ["--vocab-size", str(setup.padded_vocabulary), "--trace-attention", setup.attention]


def _setup(options: Options, reading: Reading | None) -> Setup:
    """Return the setup on one node of some device."""
    # Experts may lie on more than one replica of the other layers.
    routing, replica = routing_of(options), options.tensor * options.context
    num_devices = math.lcm(replica, routing.expert * (routing.expert_tensor or options.tensor)) * options.pipeline
    if options.global_batch is None:
        options = Options(**{**vars(options), "global_batch": options.micro_batch * num_devices // replica})
    if reading is not None and reading.devices is not None:
        num_devices = max(num_devices, reading.devices[0] * reading.devices[1])
    return setup_of(options, Cluster(next(iter(DEVICES.values())), 1, num_devices))


def _answer_of(program: str, words: Sequence[str], doing: str) -> dict[str, Any]:
    """Run a program and return the JSON of its last line. Exits with the program's status if it fails."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with progress_of(doing):
        command = [sys.executable, "-m", program, *words]
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        sys.exit(ended.returncode)
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def _tell(stages: Sequence[dict[str, Any]], launch: TracedLaunch) -> None:
    titles = ("stage", "parameters", "saved MiB", "by formula", "off by", "stays MiB", "held MiB", "peak MiB")
    formulas: Sequence[int | None] = [None] * len(stages) if launch.setup is None else stage_bytes(launch.setup)
    rows = []
    for number, (stage, formula) in enumerate(zip(stages, formulas, strict=True)):
        saved = stage["saved_bytes"]
        by_formula = ("", "") if formula is None else (_mib(formula), f"{(formula - saved) / saved:+.2%}")
        sizes = (_mib(stage[name]) for name in ("shared_bytes", "held_bytes", "peak_bytes"))
        rows.append((str(number), f"{stage['parameters']:,}", _mib(saved), *by_formula, *sizes))
    lines = [
        "saved: what one micro-batch keeps for its backward and can be moved; stays: what other code holds, too; held: all "
        "that its forward allocated and kept; peak: the most at once, its backward included. Megatron's own modules stand "
        "in for Transformer Engine's, and save as much as fused kernels do."
    ]
    if launch.unknown is not None:
        lines.append(f"the formulas do not cover this launch: {launch.unknown}")
    hidden = sorted({kind for stage in stages for kind in stage["hidden"]})
    if hidden:
        lines.append(f"what these autograd nodes saved cannot be seen, and stays: {', '.join(hidden)}")
    tell(table(titles, rows), *lines)
