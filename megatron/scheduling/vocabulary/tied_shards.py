"""Keep a weight that embedding and output layer share one weight where the output layer is in shards.

In: models of which one rank embeds with the whole weight, and every rank has some of its rows for the output layer.
Out: copies that stay equal: their gradients are added up row by row, as Megatron's all-reduce between the first rank
and the last does; a sum of two numbers has the same bits either way. In a checkpoint there is one weight, under the
embedding's key. Knows no schedule.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.utils import unwrap_model

from bpipe.runtime.vocabulary.rows import Rows
from bpipe.transport.distributed import gather_into

_OUTPUT, _EMBEDDING = "output_layer.", "embedding.word_embeddings."
# Rows on other ranks than the first are copies of its own.
_COPY = 1


def tie(first: Any, last: Any, weight: torch.nn.Parameter, rows: Rows) -> None:
    """Mark a rank's rows as Megatron marks the last rank's copy, so that the norm counts each number once; and let
    the embedding's weight be filed in as many pieces as there are shards. `first` and `last` are the rank's chunks,
    which may be one."""
    weight.shared = weight.shared_embedding = True  # type: ignore[attr-defined]
    # Megatron would take the output layer's entry for the whole weight.
    last.tie_embeddings_and_output_weights_state_dict = lambda *args, **kwargs: None
    if last.post_process:
        # There is no whole copy any more, for whoever keeps two of one rank equal.
        last.shared_embedding_or_output_weight = lambda: None
    if first.pre_process:
        _file_in_pieces(first.embedding.word_embeddings, first.pg_collection.tp.rank(), rows)


def entry(weight: torch.nn.Parameter, shard: int, rows: Rows, prefix: str, replica: int) -> ShardedTensor:
    """Return the sharded tensor that files a rank's rows: a copy of the embedding's.

    `replica` is the rank among those that have the same.
    """
    key = f"{prefix.removesuffix(_OUTPUT)}{_EMBEDDING}weight"
    return _piece(key, weight, shard, rows, (_COPY, 0, replica))


def add_up(chunks: Sequence[torch.nn.Module], weight: torch.nn.Parameter, embeds: int) -> None:
    """Give all copies of a row the sum of both layers' gradients, replicas' already in them.

    `weight` is in the last of the rank's chunks, `embeds` says which of the pipeline's ranks has the embedding.
    Collective over the model's pipeline. Frozen ones have none.
    """
    first: Any = unwrap_model(chunks[0])
    pipeline = first.pg_collection.pp
    there = dist.get_process_group_ranks(pipeline)[embeds]
    mine = _gradient(chunks[-1], weight)
    if mine is None:
        return
    whole = _gradient(chunks[0], first.embedding.word_embeddings.weight) if first.pre_process else None
    parts = None if whole is None else list(whole.chunk(pipeline.size()))
    others = torch.empty_like(mine)
    dist.scatter(others, parts, src=there, group=pipeline)
    mine.add_(others)
    # Rows of a matrix lie behind each other: what comes is written where it belongs.
    dist.gather(mine, parts, dst=there, group=pipeline)


def _gradient(chunk: Any, weight: Any) -> torch.Tensor | None:
    """Return all of a weight's gradient.

    Of the distributed optimizer's a replica has a part, and of other parts of the two layers' weights.
    """
    found: torch.Tensor | None = weight.main_grad if hasattr(weight, "main_grad") else weight.grad
    ddp = getattr(chunk, "ddp_config", None)
    if found is None or ddp is None or not ddp.use_distributed_optimizer:
        return found
    reduced_with = chunk.param_to_bucket_group[weight]
    (bucket,) = (one for one in reduced_with.buckets if weight in one.params)
    replicas = reduced_with.intra_distributed_optimizer_instance_group
    part = bucket.grad_data.view(replicas.size(), -1)[replicas.rank()]
    # The part lies in what is written.
    gather_into(bucket.grad_data, part.clone(), group=replicas)
    begin, end = bucket.param_to_index[weight]
    # Where it is added up in a memory of its own.
    found.copy_(bucket.grad_data[begin:end].view_as(found))
    return found


def _piece(key: str, data: torch.Tensor, shard: int, rows: Rows, replica_id: tuple[int, int, int]) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(
        key, data, (0, shard, rows.num_shards), replica_id=replica_id, allow_shape_mismatch=True
    )


def _file_in_pieces(embedding: Any, tensor_rank: int, rows: Rows) -> None:
    """All pieces of one weight have one size in a checkpoint's books, whoever files them."""
    file_whole = embedding.sharded_state_dict

    def build(key: str, whole: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        parts = whole.chunk(rows.pipeline)
        return [_piece(key, part, rows.shard(tensor_rank, place), rows, replica_id) for place, part in enumerate(parts)]

    def merge(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def file(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = file_whole(*args, **kwargs)
        return {
            name: ShardedTensorFactory(whole.key, whole.data, build, merge, whole.replica_id)
            if name.endswith("weight")
            else whole
            for name, whole in found.items()
        }

    embedding.sharded_state_dict = types.MethodType(file, embedding)
