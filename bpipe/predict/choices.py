"""Name the choices that a Setup has, by the words of commands and files."""

from __future__ import annotations

ATTENTION = ("unfused", "flash")
PRECISIONS = ("bf16", "fp16", "fp32")
KERNELS = ("gpu", "cpu")
# What of the weights' halves of split backwards is put off: the trainer's `--bpipe-keep-weights-halves`.
KEPT_HALVES = ("linear", "none")
# How attention reaches what other context-parallel ranks have of a sequence: Megatron's --cp-comm-type.
CP_COMM_TYPES = ("p2p", "all_gather", "a2a")

# By the name of a Setup's field.
CHOICES = {
    "attention": ATTENTION,
    "precision": PRECISIONS,
    "kernels": KERNELS,
    "keep_weights_halves": KEPT_HALVES,
    "cp_comm_type": CP_COMM_TYPES,
}
