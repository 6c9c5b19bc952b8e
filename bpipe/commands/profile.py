"""`bpipe profile`: time one stage of a model on this machine's device, for `--profile` of other commands.

A stage is Megatron's own model, timed by `megatron.scheduling.record.profile` in a process of its own. This one imports
neither torch nor Megatron.
"""

import os
import subprocess
import sys
from dataclasses import replace

from bpipe.config.flags import configurations, outputs
from bpipe.config.flags.flag import Options, Task, command, group
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.extras import require
from bpipe.plan.options import model_of
from bpipe.predict.cluster import DEVICES, Cluster
from bpipe.predict.layout import Setup
from bpipe.predict.recompute import RECOMPUTE

PROGRAM = "megatron.scheduling.record.profile"


COMMAND = command(
    configurations.MODEL,
    group(
        "stage",
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
        outputs.OUTPUT,
    ),
    Task(
        "time a stage for --profile of simulate and plan",
        "bpipe profile --model gpt3-13b --tp 2 --mbs 1 2 4 --output profile.json",
        "model tensor micro_batch recompute attention output",
    ),
)


def run(options: Options) -> None:
    require("megatron", "bpipe profile")
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {})}
    ended = subprocess.run([sys.executable, "-m", PROGRAM, *flags(options)], env=environment, check=False)
    if ended.returncode:
        # The program has printed the reason.
        sys.exit(ended.returncode)


def flags(options: Options) -> list[str]:
    """Return Megatron's flags for one replica and what to time of it."""
    model = model_of(options)
    # One pipeline stage with all layers; nothing of the device goes into what is measured.
    cluster = Cluster(next(iter(DEVICES.values())), 1, options.tensor)
    cut = (model, cluster, options.tensor, 1, 1, 1, model.sequence, (model.num_layers,))
    setup = Setup(
        *(*cut, options.recompute, options.attention),
        precision=options.precision,
        sequence_parallel=not options.no_sequence_parallel,
    )
    chosen = ["--profile-layers", options.timed_layers, "--profile-repeats", options.repeats]
    chosen += ["--profile-micro-batches", *options.micro_batch]
    chosen += [] if options.output is None else ["--profile-output", options.output]
    return [*megatron_flags(setup), *map(str, chosen)]
