"""A core attention in plain torch for what Megatron's own cannot do on a CPU: context parallelism, latent attention.

Keys and values are gathered over the context-parallel ranks; the mask is causal in the positions of the whole sequence.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule


def positions(length: int, ranks: int, rank: int) -> torch.Tensor:
    """Return the positions of a rank's tokens: each rank has two of the sequence's `2 * ranks` pieces."""
    if ranks == 1:
        return torch.arange(length)
    piece = length // 2
    starts = (rank * piece, (2 * ranks - 1 - rank) * piece)
    return torch.cat([torch.arange(start, start + piece) for start in starts])


class PlainAttention(MegatronModule):
    """Textbook attention: softmax(q k^T / sqrt(d)) v, with dropout."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.dropout = torch.nn.Dropout(config.attention_dropout)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        packed_seq_params: Any = None,
        **__: Any,
    ) -> torch.Tensor:
        """Take (sequence, batch, heads, channels), or without batch if packed; the result joins heads and channels."""
        if packed_seq_params is not None:
            ends = packed_seq_params.cu_seqlens_q.tolist()
            parts = [
                [tensor[None, begin:end].transpose(0, 1) for tensor in (query, key, value)]
                for begin, end in itertools.pairwise(ends)
            ]
            return torch.cat([self._attend(*part) for part in parts]).squeeze(1)
        return self._attend(query, key, value)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        here = positions(query.size(0), group.size(), group.rank())
        everywhere = torch.cat([positions(query.size(0), group.size(), rank) for rank in range(group.size())])
        if group.size() > 1:
            key, value = (gather_from_sequence_parallel_region(tensor, group=group) for tensor in (key, value))
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.scale
        scores = scores.masked_fill(everywhere[None, :] > here[:, None], float("-inf"))
        with tensor_parallel.get_cuda_rng_tracker().fork():
            weights = self.dropout(scores.softmax(dim=-1))
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)
