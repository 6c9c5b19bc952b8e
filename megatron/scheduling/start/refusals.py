"""Refuse what `--bpipe` cannot do, before or while a training starts, by the table of `bpipe.config.features`.

Imports no Megatron.
"""

import sys
from collections.abc import Callable, Sequence

from bpipe.config.features.queries import reasons
from bpipe.config.features.table import Settings, has_experts
from bpipe.schedule.layout import EVEN

# Settings with which micro-batches of one stage save differing sizes: by the router's choices, packing, lengths of
# sequences, and which micro-batches recompute or offload.
_DIFFERING: tuple[Callable[[Settings], object], ...] = (
    lambda s: has_experts(s) and not s.moe_pad_expert_input_to_capacity,
    lambda s: s.sft or s.dataloader_inter_document_masking,
    lambda s: s.variable_seq_lengths,
    lambda s: s.num_microbatches_with_partial_activation_checkpoints is not None,
    # Groups whose backward comes soon stay on the device.
    lambda s: s.fine_grained_activation_offloading,
)


def differ(settings: object) -> bool:
    """Whether micro-batches of one stage may save differing sizes by these settings."""
    return any(applies(Settings(settings)) for applies in _DIFFERING)


def slices_differ(settings: object, slices: int) -> bool:
    """Whether slices of one stage save differing sizes: by their lengths, or by unfused scores of ever more keys."""
    even = getattr(settings, "bpipe_slice_lengths", EVEN) == EVEN
    s = Settings(settings)
    # By default, Megatron's selective recomputation is that of attention.
    selective = s.recompute_granularity == "selective" and "core_attn" in (s.recompute_modules or ("core_attn",))
    again = s.recompute_granularity == "full" or selective
    # The length of a slice is a multiple of the ranks that share it.
    unit = (s.tensor_model_parallel_size or 1) if s.sequence_parallel else 1
    return slices > 1 and (
        not even or bool((s.seq_length or 0) % (slices * unit)) or (s.transformer_impl == "local" and not again)
    )


def refuse(settings: object, balance: bool, executor: bool = False, strict: bool = False) -> None:
    """Raise ValueError with every reason against these arguments, or a model's configuration, which may set more."""
    problems = reasons(settings, balance, executor, strict)
    # Only a training with a session loads this module.
    guards = sys.modules.get("terra.run.guards")
    if balance and guards is not None and guards.is_any_open():
        problems.append(
            "a terra.Session is open: under it a stage saves placeholders without the memory that --bpipe would "
            "move; close the session, or train without --bpipe"
        )
    end_where(problems)


def end_where(problems: Sequence[str]) -> None:
    """Raise ValueError with all problems, if there are any."""
    if problems:
        raise ValueError("\n  ".join(["this run cannot start:", *problems]))
