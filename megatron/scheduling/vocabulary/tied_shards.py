"""Keep a weight that embedding and output layer share one weight if the output layer is in shards.

One rank embeds with the whole weight, and every rank has some of its rows for the output layer. The gradients of the copies
are summed row by row, as in Megatron's all-reduce between the first rank and the last: a sum of two numbers has the same
bits either way. A checkpoint has one weight, under the embedding's key.
"""

import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.utils import unwrap_model

from bpipe.runtime.vocabulary import Rows
from bpipe.transport.distributed import gather_into
from megatron.scheduling.vocabulary.input_shards import piece

_OUTPUT, _EMBEDDING = "output_layer.", "embedding.word_embeddings."
# Rows on other ranks than the first are copies of its own.
_COPY = 1


def tie(first: Any, last: Any, weight: torch.nn.Parameter, rows: Rows) -> None:
    """Mark a rank's rows as Megatron marks the last rank's copy, so that the norm counts each number once, and save the
    embedding's weight in as many pieces as there are shards. The chunks `first` and `last` may be one."""
    weight.shared = weight.shared_embedding = True  # type: ignore[attr-defined]
    # Megatron would take the output layer's entry for the whole weight.
    last.tie_embeddings_and_output_weights_state_dict = lambda *args, **kwargs: None
    if last.post_process:
        # There is no whole copy any more that must be kept equal on one rank.
        last.shared_embedding_or_output_weight = lambda: None
    if first.pre_process:
        _file_in_pieces(first.embedding.word_embeddings, first.pg_collection.tp.rank(), rows)


def entry(weight: torch.nn.Parameter, shard: int, rows: Rows, prefix: str, replica: int) -> ShardedTensor:
    """Return the sharded tensor of a rank's rows, a copy of the embedding's; `replica` is the rank among equal ones."""
    key = f"{prefix.removesuffix(_OUTPUT)}{_EMBEDDING}weight"
    return piece(key, weight, shard, rows, (_COPY, 0, replica))


def sum_gradients(chunks: Sequence[torch.nn.Module], weight: torch.nn.Parameter, embeds: int) -> None:
    """Give all copies of a row the sum of both layers' gradients, which are already reduced over replicas.

    `weight` is in the last of the rank's chunks, and `embeds` is the rank in the pipeline with the embedding. A frozen
    weight has no gradients. Collective over the model's pipeline.
    """
    first: Any = unwrap_model(chunks[0])
    pipeline = first.pg_collection.pp
    root = dist.get_process_group_ranks(pipeline)[embeds]
    gradient = _gradient(chunks[-1], weight)
    if gradient is None:
        return
    whole = _gradient(chunks[0], first.embedding.word_embeddings.weight) if first.pre_process else None
    parts = None if whole is None else list(whole.chunk(pipeline.size()))
    others = torch.empty_like(gradient)
    dist.scatter(others, parts, src=root, group=pipeline)
    gradient.add_(others)
    # Rows of a matrix are contiguous, so the parts are views: the sums are written in place.
    dist.gather(gradient, parts, dst=root, group=pipeline)


def _gradient(chunk: Any, weight: Any) -> torch.Tensor | None:
    """Return a weight's whole gradient.

    With the distributed optimizer a replica has only a part of it, and other parts for the two layers.
    """
    gradient: torch.Tensor | None = weight.main_grad if hasattr(weight, "main_grad") else weight.grad
    ddp = getattr(chunk, "ddp_config", None)
    if gradient is None or ddp is None or not ddp.use_distributed_optimizer:
        return gradient
    group = chunk.param_to_bucket_group[weight]
    (bucket,) = (bucket for bucket in group.buckets if weight in bucket.params)
    replicas = group.intra_distributed_optimizer_instance_group
    part = bucket.grad_data.view(replicas.size(), -1)[replicas.rank()]
    # The part is in the memory that is written.
    gather_into(bucket.grad_data, part.clone(), group=replicas)
    begin, end = bucket.param_to_index[weight]
    # The gradient may have memory of its own.
    gradient.copy_(bucket.grad_data[begin:end].view_as(gradient))
    return gradient


def _file_in_pieces(embedding: Any, tensor_rank: int, rows: Rows) -> None:
    """A checkpoint has all pieces of one weight in one size, whichever rank saves them."""
    state_of_whole = embedding.sharded_state_dict

    def build(key: str, whole: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        parts = whole.chunk(rows.pipeline)
        return [piece(key, part, rows.shard(tensor_rank, place), rows, replica_id) for place, part in enumerate(parts)]

    def in_pieces(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {
            name: ShardedTensorFactory(
                whole.key, whole.data, build, lambda parts: torch.cat(list(parts)), whole.replica_id
            )
            if name.endswith("weight")
            else whole
            for name, whole in state_of_whole(*args, **kwargs).items()
        }

    embedding.sharded_state_dict = types.MethodType(in_pieces, embedding)
