"""Save and load what one rank has twice: both copies of a tied weight, and the optimizer's state of each.

In: the state that Megatron gives to its distributed checkpointing, or gets from it. Out: the same, each shard saved
once from a rank, and no two loaded tensors in one memory. Between two ranks Megatron's own rules see to both.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory


def first_replicas(state: dict[str, Any]) -> dict[str, Any]:
    """Return what to save: of shards that this rank has several times only the first replica.

    A fully parallel save would take all of them for the main one, and refuse to write one place of a file twice.
    """
    kept: dict[Any, ShardedTensor] = {}
    for found in nested_values(state):
        # Pieces are made only when they are saved, all of them; what another leaf has of them too goes.
        for one in nested_values([found.build()]) if isinstance(found, ShardedTensorFactory) else (found,):
            if isinstance(one, ShardedTensor):
                known = kept.setdefault(_shard(one), one)
                if one.replica_id < known.replica_id:
                    kept[_shard(one)] = one

    def single(leaf: Any) -> Any:
        twin = isinstance(leaf, ShardedTensor) and kept[_shard(leaf)] is not leaf
        return LocalNonpersistentObject(None) if twin else leaf

    return dict_list_map_outplace(single, state)  # type: ignore[no-any-return]


def _shard(tensor: ShardedTensor) -> tuple[Any, ...]:
    return tensor.key, tensor.global_offset, str(tensor.flattened_range)


def separate_copies(state: dict[str, Any]) -> dict[str, Any]:
    """Return what was loaded, with memory of its own for every tensor.

    A fully parallel load gives the copies of a shard one tensor, and an optimizer keeps what it is given: it would
    update the moments of both copies in the same memory, twice a step.
    """
    seen: set[tuple[int, torch.Size]] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.numel():
            return leaf
        memory = leaf.data_ptr(), leaf.shape
        if memory in seen:
            return leaf.clone()
        seen.add(memory)
        return leaf

    return dict_list_map_outplace(own, state)  # type: ignore[no-any-return]
