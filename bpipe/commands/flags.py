"""Flags that several commands share, and what they mean.

In: an argparse parser, later its options. Out: Model, Cluster, text.

Computes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bpipe.flag_types import factor, positive
from bpipe.models.calibration import read_calibration
from bpipe.models.cluster import DEVICES, RACKS, Cluster
from bpipe.models.cluster_file import cluster_named
from bpipe.models.flops import FORMULAS
from bpipe.models.fp8 import FORMATS, RECIPES
from bpipe.models.kernel_times import read_kernel_times
from bpipe.models.layout import ATTENTION, CP_COMM_TYPES, KERNELS, PRECISIONS
from bpipe.models.model import PRESETS
from bpipe.models.parts import DISPATCHERS
from bpipe.models.switches import HELP, flag_of
from bpipe.plan.megatron_command import Reading
from bpipe.plan.options import MODEL_SWITCHES, SIZES


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "model", "a preset or a config.json; sizes given besides replace its own, and do without it"
    )
    add = group.add_argument
    add("--model", metavar="NAME|PATH", help=f"{', '.join(PRESETS)}, or a config.json of Hugging Face on disk")
    add("--sequence", type=positive, metavar="N", help="sequence length (default: the model's)")
    add(
        "--vocabulary", type=positive, metavar="N", help="vocabulary, padded as Megatron pads it (default: the model's)"
    )
    for name in SIZES:
        add(f"--{name.replace('_', '-')}", type=positive, metavar="N")
    for name, (_, _, text) in MODEL_SWITCHES.items():
        add(f"--{name.replace('_', '-')}", action="store_true", help=text)


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    add = group.add_argument
    named = ", ".join((*DEVICES, *RACKS))
    add(
        "--cluster",
        required=True,
        metavar="DEVICE:NODESxGPUS|FILE",
        help=f"such as a100-80g:4x8, or a .json or .toml file; devices: {named}; a launch with torchrun may say "
        f"NODESxGPUS",
    )
    add("--global-batch", type=positive, metavar="B", help="sequences an iteration")
    add("--attention", choices=ATTENTION, help="default flash")
    exchange = (
        "with --context: how attention reaches the rest of a sequence, as Megatron's flag has it (default p2p, a ring)"
    )
    add("--cp-comm-type", choices=CP_COMM_TYPES, help=exchange)
    add("--precision", choices=PRECISIONS, help="bf16 has 32-bit gradients, fp16 16-bit ones (default bf16)")
    add(
        "--kernels",
        choices=KERNELS,
        default="gpu",
        help="cpu: what Megatron saves without a GPU, where nothing is fused (default gpu)",
    )
    add(
        "--no-distributed-optimizer",
        action="store_true",
        help="every replica holds the whole optimizer state (default: ZeRO-1)",
    )
    add("--fp8-format", choices=FORMATS, help="products of the layers' matrices in FP8, as Megatron's flag has it")
    add("--fp8-recipe", choices=RECIPES, help=f"with --fp8-format: where scales come from (default {RECIPES[0]})")
    add("--fp8-param-gather", action="store_true", help="with --fp8-format: weights are kept and gathered in FP8 alone")
    for name, text in HELP.items():
        add(flag_of(name), action="store_true", help=f"{text}, as Megatron's flag has it")
    add("--flops-formula", choices=FORMULAS, default="megatron", help="whose FLOPs MFU counts (default megatron)")


def add_routing_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("experts", "of a model that has them; their loads are taken to be even")
    add = group.add_argument
    add(
        "--expert",
        type=positive,
        metavar="N",
        help="expert parallel: so many devices share a layer's experts (default 1; plan tries all)",
    )
    add(
        "--expert-tensor",
        type=positive,
        metavar="N",
        help="so many devices divide each expert (default: tensor parallel; plan 1)",
    )
    add(
        "--dispatcher",
        choices=DISPATCHERS,
        help="how tokens come to experts, as Megatron's flag has it (default alltoall)",
    )
    add("--capacity-factor", type=factor, metavar="X", help="no expert takes more than so many times its even share")
    add("--pad-to-capacity", action="store_true", help="and each takes as many")


def add_calibration_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibration", metavar="FILE", help="how far this cluster is from predictions, as `bpipe calibrate` found it"
    )
    measured = "seconds of single kernels, as `bpipe profile --kernel-times` measured them, in place of formulas"
    parser.add_argument("--kernel-times", nargs="+", metavar="FILE", help=measured)


def cluster_of(options: argparse.Namespace, reading: Reading | None = None) -> Cluster:
    """Return the cluster; what its text does not say of nodes and their devices, the launch says."""
    cluster = cluster_named(options.cluster, None if reading is None else reading.devices)
    if options.kernel_times is not None:
        cluster = replace(cluster, kernels=read_kernel_times(options.kernel_times))
    if options.calibration is None:
        return cluster
    calibration = read_calibration(options.calibration)
    try:
        return calibration.of(cluster)
    except ValueError as error:
        raise ValueError(f"--calibration {options.calibration}: {error}") from None


def picture_file(name: str | None, suffixes: Sequence[str]) -> Path | None:
    """Return the file that --plot draws. Raises ValueError for a suffix that cannot be drawn."""
    if name is None or Path(name).suffix in suffixes:
        return None if name is None else Path(name)
    *others, last = suffixes
    raise ValueError(f"--plot {name}: the name must end in {', '.join(others)} or {last}")


def print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=1, allow_nan=False)
    print()
