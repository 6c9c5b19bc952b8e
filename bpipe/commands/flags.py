"""Flags that several commands share, and what they mean. In: an argparse parser, later its options. Out: Model, Cluster, text.

Computes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from bpipe.flag_types import positive
from bpipe.models.cluster import DEVICES, Cluster, parse_cluster
from bpipe.models.cluster_file import SUFFIXES, read_cluster
from bpipe.models.flops import FORMULAS
from bpipe.models.layout import ATTENTION, KERNELS, PRECISIONS
from bpipe.models.model import PRESETS, Model, find_model
from bpipe.models.switches import HELP, SWITCHES, Switches, flag_of

_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size")
_SWITCHES = {
    "swiglu": ("gated", True, "the MLP is a SwiGLU"),
    "rms_norm": ("rms_norm", True, "norms have a weight and no bias"),
    "disable_bias_linear": ("linear_bias", False, "linear layers have no bias"),
    "rotary": ("learned_positions", False, "positions are not learned"),
    "untie_embeddings_and_output_weights": ("tied_embedding", False, "the output layer has weights of its own"),
    "no_dropout": ("dropout", False, "no dropout, and so no masks to save"),
}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model", "a preset or a config.json; sizes given besides replace its own, and do without it")
    add = group.add_argument
    add("--model", metavar="NAME|PATH", help=f"{', '.join(PRESETS)}, or a config.json of Hugging Face on disk")
    add("--sequence", type=positive, metavar="N", help="sequence length (default: the model's)")
    add("--vocabulary", type=positive, metavar="N", help="vocabulary, padded as Megatron pads it (default: the model's)")
    for name in _SIZES:
        add(f"--{name.replace('_', '-')}", type=positive, metavar="N")
    for name, (_, _, text) in _SWITCHES.items():
        add(f"--{name.replace('_', '-')}", action="store_true", help=text)


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    add = group.add_argument
    add(
        "--cluster",
        required=True,
        metavar="DEVICE:NODESxGPUS|FILE",
        help=f"such as a100-80g:4x8, or a .json or .toml file; devices: {', '.join(DEVICES)}; a launch with torchrun may say NODESxGPUS",
    )
    add("--global-batch", type=positive, metavar="B", help="sequences an iteration")
    add("--attention", choices=ATTENTION, help="default flash")
    add("--precision", choices=PRECISIONS, help="bf16 has 32-bit gradients, fp16 16-bit ones (default bf16)")
    add("--kernels", choices=KERNELS, default="gpu", help="cpu: what Megatron saves without a GPU, where nothing is fused (default gpu)")
    add("--no-distributed-optimizer", action="store_true", help="every replica holds the whole optimizer state (default: ZeRO-1)")
    for name, text in HELP.items():
        add(flag_of(name), action="store_true", help=f"{text}, as Megatron's flag has it")
    add("--flops-formula", choices=FORMULAS, default="megatron", help="whose FLOPs MFU counts (default megatron)")


def model_of(options: argparse.Namespace) -> Model:
    """The model the flags describe. Raises ValueError where they describe none."""
    changes: dict[str, Any] = {
        name: getattr(options, name) for name in (*_SIZES, "sequence", "vocabulary") if getattr(options, name) is not None
    }
    changes |= {field: value for name, (field, value, _) in _SWITCHES.items() if getattr(options, name)}
    if options.model is not None:
        return replace(find_model(options.model), **changes)
    needed = ("num_layers", "hidden_size", "num_attention_heads", "sequence", "vocabulary")
    missing = [f"--{name.replace('_', '-')}" for name in needed if name not in changes]
    if missing:
        raise ValueError(f"no --model, and {', '.join(missing)} missing: name a model, or give all of its sizes")
    heads, hidden = changes["num_attention_heads"], changes["hidden_size"]
    if hidden % heads and "kv_channels" not in changes:
        raise ValueError(
            f"--num-attention-heads {heads} do not divide --hidden-size {hidden}: give other numbers, or --kv-channels, the size of a head"
        )
    sizes = {"name": "custom", "num_query_groups": heads, "kv_channels": hidden // heads, "ffn_hidden_size": 4 * hidden, **changes}
    return Model(**{field.name: sizes[field.name] for field in fields(Model) if field.name in sizes})


def switches_of(options: argparse.Namespace) -> Switches:
    return Switches(**{name: getattr(options, name) for name in SWITCHES})


def cluster_of(options: argparse.Namespace, devices: tuple[int, int] | None = None) -> Cluster:
    """`devices` are nodes and GPUs of one, for a cluster that says none."""
    path = Path(options.cluster)
    return read_cluster(path, devices) if path.suffix in SUFFIXES else parse_cluster(options.cluster, devices)


def print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=1, allow_nan=False)
    print()


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"
