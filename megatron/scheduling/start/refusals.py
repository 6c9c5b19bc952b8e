"""Refuse what `--bpipe` cannot do, before or while a training starts. The table is `bpipe.config.features`.

In: Megatron's parsed arguments, or the configuration of a model that is about to train. Out: nothing, or a ValueError
with a line a reason. Knows no tensors and imports no Megatron.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from bpipe.config.features.feature import Settings, has_experts
from bpipe.config.features.queries import reasons
from bpipe.schedule.layout import EVEN

# What makes micro-batches of one stage save differing sizes: where the router sends tokens, what was packed together,
# how long sequences are, which micro-batches recompute, and what of them is offloaded.
_DIFFERING: tuple[Callable[[Settings], object], ...] = (
    lambda s: has_experts(s) and not s.moe_pad_expert_input_to_capacity,
    lambda s: s.sft or s.dataloader_inter_document_masking,
    lambda s: s.variable_seq_lengths,
    lambda s: s.num_microbatches_with_partial_activation_checkpoints is not None,
    # Groups whose backward comes soon stay on the device.
    lambda s: s.fine_grained_activation_offloading,
)


def differ(settings: object) -> bool:
    """Return whether micro-batches of one stage may save differing sizes by these settings."""
    return any(applies(Settings(settings)) for applies in _DIFFERING)


def slices_differ(settings: object, slices: int) -> bool:
    """Return whether slices of one stage save differing sizes: by their lengths, or by scores of ever more keys,
    which are not fused."""
    even = getattr(settings, "bpipe_slice_lengths", EVEN) == EVEN
    s = Settings(settings)
    # Megatron's selective recomputation is that of attention where nothing is named.
    selective = s.recompute_granularity == "selective" and "core_attn" in (s.recompute_modules or ("core_attn",))
    again = s.recompute_granularity == "full" or selective
    # Each slice is a multiple of the ranks that have a part of it.
    unit = (s.tensor_model_parallel_size or 1) if s.sequence_parallel else 1
    return slices > 1 and (
        not even or bool((s.seq_length or 0) % (slices * unit)) or (s.transformer_impl == "local" and not again)
    )


def refuse(settings: object, balance: bool, executor: bool = False, strict: bool = False) -> None:
    """Raise ValueError with every reason.

    A script of one's own may set in its model what no flag says: give that model's configuration.
    """
    end_where([*reasons(settings, balance, executor, strict), *(_of_sessions() if balance else ())])


def _of_sessions() -> Iterator[str]:
    """Asked of what is loaded: whoever trains without a session never loads it."""
    guards = sys.modules.get("terra.run.guards")
    if guards is not None and guards.is_any_open():
        yield (
            "a terra.Session is open: under it a stage saves placeholders without the memory that --bpipe would "
            "move; close the session, or train without --bpipe"
        )


def end_where(problems: Sequence[str]) -> None:
    """Raise ValueError with all of them at once, if there are any."""
    if problems:
        raise ValueError("\n  ".join(["this run cannot start:", *problems]))
