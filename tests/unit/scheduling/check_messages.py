"""Print, as JSON, what is wrong with the messages of Megatron's own loops: as they are, and where something that orders
their messages is taken away. Run in a process of its own, because it imports Megatron without a GPU."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from bpipe.schedule.check.exchanges import faults
from megatron.scheduling.start import exchanges, validation

OVERLAPPED = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
BATCHED = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
FLUSH = {**OVERLAPPED, "overlap_p2p_comm_warmup_flush": True}
VARIABLE = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}


def config_of(ranks: int, chunks: int, values: dict[str, Any]) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=ranks * chunks,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
        **values,
    )


def judged(ranks: int, chunks: int, microbatches: int, **values: Any) -> list[str]:
    return faults(exchanges.loops_of(config_of(ranks, chunks, values), microbatches))


def both_send_first() -> list[str]:
    """Two ranks whose messages in both directions share a communicator, and that both send before they receive."""
    from megatron.core.pipeline_parallel import p2p_communication

    plain = p2p_communication._p2p_ops

    def alike(*, group: Any, **tensors: Any) -> Any:
        return plain(group=SimpleNamespace(size=lambda: 3, rank=lambda: 0, name=group.name), **tensors)

    p2p_communication._p2p_ops = alike
    try:
        return judged(2, 2, 4, **OVERLAPPED)
    finally:
        p2p_communication._p2p_ops = plain


def some_tell_shapes() -> list[str]:
    """A script that sets variable lengths on the first rank only."""
    configs = [config_of(2, 1, {**BATCHED, **(VARIABLE if rank == 0 else {})}) for rank in range(2)]
    return faults([exchanges.loop_of(config, rank, 2) for rank, config in enumerate(configs)])


def fewer_microbatches() -> list[str]:
    """A rank that counts one micro-batch less."""
    config = config_of(3, 1, BATCHED)
    return faults([exchanges.loop_of(config, rank, 4 - (rank == 1)) for rank in range(3)])


STYLES: dict[str, Callable[[], list[str]]] = {
    "1f1b": lambda: judged(4, 1, 8, **BATCHED),
    "1f1b of two": lambda: judged(2, 1, 3, **BATCHED),
    "1f1b with shapes": lambda: judged(4, 1, 8, **BATCHED, **VARIABLE),
    "interleaved": lambda: judged(4, 2, 8, **OVERLAPPED),
    "interleaved of two": lambda: judged(2, 2, 8, **OVERLAPPED),
    "interleaved of three": lambda: judged(3, 3, 9, **OVERLAPPED),
    "interleaved in larger groups": lambda: judged(4, 2, 15, **OVERLAPPED, microbatch_group_size_per_vp_stage=5),
    "interleaved with shapes": lambda: judged(4, 2, 8, **OVERLAPPED, **VARIABLE),
    "flush": lambda: judged(4, 2, 8, **FLUSH),
    "flush of two with shapes": lambda: judged(2, 2, 4, **FLUSH, **VARIABLE),
    "turns": lambda: judged(4, 2, 8, **BATCHED),
    "turns of three": lambda: judged(3, 2, 6, **BATCHED),
}
FAULTS: dict[str, Callable[[], list[str]]] = {
    "batches between two": lambda: judged(2, 2, 4, **BATCHED),
    "both send first": both_send_first,
    "some tell shapes": some_tell_shapes,
    "fewer micro-batches": fewer_microbatches,
}

if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        validation.prepare()
        answers = {name: case() for name, case in {**STYLES, **FAULTS}.items()}
    print(json.dumps(answers))
