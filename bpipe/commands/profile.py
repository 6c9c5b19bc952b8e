"""`bpipe profile`: time one stage of a model, or its kernels, on this machine's device.

In: flags. Out: JSON that other commands read.

A stage is Megatron's own model, timed by `megatron.scheduling.report.profile` in a process of its own, which gets
Megatron's flags; `--profile` reads it. Kernels are timed by `bpipe.runtime.kernel_times`, with as many processes as
they gather over; `--kernel-times` reads them. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

from bpipe.extras import require
from bpipe.flags import configurations, outputs
from bpipe.flags.flag import Command, Group, Options, Task
from bpipe.launch.megatron_flags import megatron_flags
from bpipe.models.cluster import DEVICES, Cluster
from bpipe.models.kernel_shapes import kernel_shapes
from bpipe.models.layout import Setup
from bpipe.models.recompute import RECOMPUTE
from bpipe.plan.options import model_of

PROGRAM, KERNELS_PROGRAM = "megatron.scheduling.report.profile", "bpipe.runtime.kernel_times"


COMMAND = Command(
    (
        configurations.MODEL,
        Group(
            "stage",
            (
                replace(
                    configurations.TENSOR,
                    help="time one rank of this tensor-parallel size, without its collectives (default 1)",
                ),
                configurations.NO_SEQUENCE_PARALLEL,
                configurations.MICRO_BATCH.several("micro-batch sizes to time (default 1 2 4)", (1, 2, 4)),
                outputs.TIMED_LAYERS,
                replace(
                    configurations.RECOMPUTED,
                    help="what the backward computes again (default none)",
                    value="",
                    read=None,
                    choices=RECOMPUTE,
                ),
                configurations.ATTENTION_KIND,
                configurations.PRECISION,
                outputs.DEVICE,
                outputs.REPEATS,
                outputs.TIME_KERNELS,
                outputs.OUTPUT,
            ),
        ),
    ),
    (
        Task(
            "time a stage for --profile of simulate and plan",
            "bpipe profile --model gpt3-13b --tp 2 --mbs 1 2 4 --output profile.json",
            ("model", "tensor", "micro_batch", "recompute", "attention", "output"),
        ),
        Task(
            "time single kernels for --kernel-times",
            "bpipe profile --model gpt3-13b --time-kernels --output kernels.json",
            ("time_kernels",),
        ),
    ),
)


def run(options: Options) -> None:
    require("torch" if options.time_kernels else "megatron", "bpipe profile")
    program = _measuring_kernels(options) if options.time_kernels else ["-m", PROGRAM, *flags(options)]
    ended = subprocess.run(
        [sys.executable, *program], env=_environment(options.device, options.time_kernels), check=False
    )
    if ended.returncode:
        # The program has said why.
        sys.exit(ended.returncode)


def flags(options: Options) -> list[str]:
    """Return Megatron's flags for one replica and what to time of it."""
    setup = _of_one_rank(options, 1)
    chosen = [
        "--profile-layers",
        options.timed_layers,
        "--profile-repeats",
        options.repeats,
        "--profile-micro-batches",
        *options.micro_batch,
    ]
    if options.output is not None:
        chosen += ["--profile-output", options.output]
    return [*megatron_flags(setup), *map(str, chosen)]


def _measuring_kernels(options: Options) -> list[str]:
    shapes = kernel_shapes([_of_one_rank(options, micro_batch) for micro_batch in options.micro_batch])
    program = ["-m", KERNELS_PROGRAM, "--shapes", json.dumps(shapes._asdict()), "--precision", options.precision]
    program += [
        "--repeats",
        str(options.repeats),
        *(["--output", options.output] if options.output is not None else []),
    ]
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.tensor)]
        if shapes.gathers
        else []
    )
    return [*launcher, *program]


def _of_one_rank(options: Options, micro_batch: int) -> Setup:
    """One pipeline stage with all layers; nothing of the device goes into what is measured."""
    model = model_of(options)
    return Setup(
        model=model,
        cluster=Cluster(next(iter(DEVICES.values())), 1, options.tensor),
        tensor=options.tensor,
        pipeline=1,
        micro_batch=micro_batch,
        global_batch=micro_batch,
        sequence=model.sequence,
        layers=(model.num_layers,),
        recompute=options.recompute,
        attention=options.attention,
        precision=options.precision,
        sequence_parallel=not options.no_sequence_parallel,
    )


def _environment(device: str | None, kernels: bool) -> dict[str, str]:
    # As torchrun would choose, and say so in four lines.
    chosen = {"OMP_NUM_THREADS": "1"} if kernels else {}
    return {**chosen, **os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}
