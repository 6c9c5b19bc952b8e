"""`bpipe profile`: time one stage of a model on this machine's device. In: flags. Out: JSON that `--profile` of other commands reads.

What is timed is Megatron's own model, by `megatron.scheduling.profile` in a process of its own, which gets Megatron's flags. Imports
neither torch nor Megatron.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from bpipe.commands.flags import add_model_arguments
from bpipe.flag_types import positive
from bpipe.models.cluster import DEVICES, Cluster
from bpipe.models.layout import ATTENTION, PRECISIONS, RECOMPUTE, Setup
from bpipe.plan.megatron_flags import megatron_flags
from bpipe.plan.options import model_of

PROGRAM = "megatron.scheduling.profile"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument_group("stage").add_argument
    alone = "time one rank of this tensor parallelism, without its collectives (default 1)"
    add("--tensor", type=positive, default=1, metavar="T", help=alone)
    add("--no-sequence-parallel", action="store_true", help="tensor parallelism leaves norms and dropout whole")
    add("--micro-batch", type=positive, nargs="+", default=[1, 2, 4], metavar="N", help="sizes to time (default 1 2 4)")
    add("--layers", type=positive, default=1, metavar="N", help="layers to time; readers scale to a stage's own number (default 1)")
    add("--recompute", choices=RECOMPUTE, default="none", help="default none")
    add("--attention", choices=ATTENTION, default="flash", help="flash needs a GPU and Transformer Engine (default flash)")
    add("--precision", choices=PRECISIONS, default="bf16", help="default bf16")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one, else cpu")
    add("--repeats", type=positive, default=5, metavar="N", help="the median of N runs counts (default 5)")
    add("--output", metavar="FILE", help="write there instead of to standard output")


def run(options: argparse.Namespace) -> None:
    ended = subprocess.run([sys.executable, "-m", PROGRAM, *flags(options)], env=_environment(options.device), check=False)
    if ended.returncode:
        # The program has said why.
        sys.exit(ended.returncode)


def flags(options: argparse.Namespace) -> list[str]:
    """For the program: Megatron's flags of one replica, and what to time of it."""
    model = model_of(options)
    # Nothing of the device goes into the flags.
    cluster = Cluster(next(iter(DEVICES.values())), 1, options.tensor)
    setup = Setup(
        model=model,
        cluster=cluster,
        tensor=options.tensor,
        pipeline=1,
        micro_batch=1,
        global_batch=1,
        sequence=model.sequence,
        layers=(model.num_layers,),
        recompute=options.recompute,
        attention=options.attention,
        precision=options.precision,
        sequence_parallel=not options.no_sequence_parallel,
    )
    chosen = ["--profile-layers", options.layers, "--profile-repeats", options.repeats, "--profile-micro-batches", *options.micro_batch]
    if options.output is not None:
        chosen += ["--profile-output", options.output]
    return [*megatron_flags(setup), "--vocab-size", str(model.vocabulary), *map(str, chosen)]


def _environment(device: str | None) -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {**os.environ}
