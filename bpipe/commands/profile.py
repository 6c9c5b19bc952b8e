"""`bpipe profile`: time one stage of a model, or its kernels, on this machine's device.

In: flags. Out: JSON that other commands read.

A stage is Megatron's own model, timed by `megatron.scheduling.report.profile` in a process of its own, which gets
Megatron's flags; `--profile` reads it. Kernels are timed by `bpipe.runtime.kernel_times`, with as many processes as
they gather over; `--kernel-times` reads them. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from bpipe.commands.flags import add_model_arguments
from bpipe.extras import require
from bpipe.flag_types import positive
from bpipe.models.cluster import DEVICES, Cluster
from bpipe.models.kernel_shapes import kernel_shapes
from bpipe.models.layout import ATTENTION, PRECISIONS, Setup
from bpipe.models.recompute import RECOMPUTE
from bpipe.plan.megatron_flags import megatron_flags
from bpipe.plan.options import model_of

PROGRAM, KERNELS_PROGRAM = "megatron.scheduling.report.profile", "bpipe.runtime.kernel_times"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument_group("stage").add_argument
    alone = "time one rank of this tensor parallelism, without its collectives (default 1)"
    add("--tensor", type=positive, default=1, metavar="T", help=alone)
    add("--no-sequence-parallel", action="store_true", help="tensor parallelism leaves norms and dropout whole")
    add("--micro-batch", type=positive, nargs="+", default=[1, 2, 4], metavar="N", help="sizes to time (default 1 2 4)")
    add(
        "--layers",
        type=positive,
        default=1,
        metavar="N",
        help="layers to time; readers scale to a stage's own number (default 1)",
    )
    add("--recompute", choices=RECOMPUTE, default="none", help="default none")
    add(
        "--attention",
        choices=ATTENTION,
        default="flash",
        help="flash needs a GPU and Transformer Engine (default flash)",
    )
    add("--precision", choices=PRECISIONS, default="bf16", help="default bf16")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one, else cpu")
    add("--repeats", type=positive, default=5, metavar="N", help="the median of N runs counts (default 5)")
    kernels = "time products of matrices, the attention core and gathers over T processes by themselves, not a stage"
    add("--kernel-times", action="store_true", help=kernels)
    add("--output", metavar="FILE", help="write there instead of to standard output")


def run(options: argparse.Namespace) -> None:
    require("torch" if options.kernel_times else "megatron", "bpipe profile")
    program = _measuring_kernels(options) if options.kernel_times else ["-m", PROGRAM, *flags(options)]
    ended = subprocess.run(
        [sys.executable, *program], env=_environment(options.device, options.kernel_times), check=False
    )
    if ended.returncode:
        # The program has said why.
        sys.exit(ended.returncode)


def flags(options: argparse.Namespace) -> list[str]:
    """Return Megatron's flags for one replica and what to time of it."""
    setup = _of_one_rank(options, 1)
    chosen = [
        "--profile-layers",
        options.layers,
        "--profile-repeats",
        options.repeats,
        "--profile-micro-batches",
        *options.micro_batch,
    ]
    if options.output is not None:
        chosen += ["--profile-output", options.output]
    return [*megatron_flags(setup), "--vocab-size", str(setup.model.vocabulary), *map(str, chosen)]


def _measuring_kernels(options: argparse.Namespace) -> list[str]:
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


def _of_one_rank(options: argparse.Namespace, micro_batch: int) -> Setup:
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
