"""Save and load weights that other ranks have than in a run without our flags, and those that one rank has twice.

A rank with both copies of a tied weight, and the optimizer's state of each, saves each shard once, and no two loaded
tensors share memory. Between two ranks Megatron's own rules ensure both.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory

from megatron.scheduling.hooks import patches


def first_replicas(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state to save: of shards that this rank has several times only the first replica.

    A fully parallel save would take all of them for the main one, and refuse to write one place of a file twice.
    """
    kept: dict[Any, ShardedTensor] = {}
    for leaf in nested_values(state):
        # Pieces are made only when they are saved, all at once; another leaf of the same pieces is left out.
        for shard in nested_values([leaf.build()]) if isinstance(leaf, ShardedTensorFactory) else (leaf,):
            if isinstance(shard, ShardedTensor):
                first = kept.setdefault(_place_of(shard), shard)
                if shard.replica_id < first.replica_id:
                    kept[_place_of(shard)] = shard

    def single(leaf: Any) -> Any:
        twin = isinstance(leaf, ShardedTensor) and kept[_place_of(leaf)] is not leaf
        return LocalNonpersistentObject(None) if twin else leaf

    return dict_list_map_outplace(single, state)  # type: ignore[no-any-return]


def _place_of(shard: ShardedTensor) -> tuple[Any, ...]:
    return shard.key, shard.global_offset, str(shard.flattened_range)


def separate_copies(state: dict[str, Any]) -> dict[str, Any]:
    """Return the loaded state, with memory of its own for every tensor.

    A fully parallel load gives the copies of a shard one tensor, which an optimizer keeps: it would update the moments of
    both copies in the same memory, twice per step.
    """
    seen: set[tuple[int, torch.Size]] = set()

    def separate(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.numel():
            return leaf
        memory = leaf.data_ptr(), leaf.shape
        if memory in seen:
            return leaf.clone()
        seen.add(memory)
        return leaf

    return dict_list_map_outplace(separate, state)  # type: ignore[no-any-return]


def _load(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    state = load(*args, **kwargs)
    # On request it also returns which keys did not match.
    return (separate_copies(state[0]), *state[1:]) if isinstance(state, tuple) else separate_copies(state)


def _refuse_files_by_rank(get_format: Callable[..., str], checkpoint_name: Any, args: Any) -> str:
    form = get_format(checkpoint_name, args)
    if form != "torch_dist":
        raise ValueError(
            f"{checkpoint_name} has the format {form}, which stores weights by rank, but here ranks have "
            "different weights from the run that saved it: convert it there with --ckpt-convert-format "
            "torch_dist --ckpt-convert-save FOLDER"
        )
    return form


def _refuse_state(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        "this checkpoint stores the distributed optimizer's state by the buffers of each rank, but here ranks "
        "have different weights from the run that saved it: save it there with "
        "--dist-ckpt-optim-fully-reshardable, or continue without it with --no-load-optim"
    )


# For a rank that may have a weight, or a part of it, twice.
ONCE: dict[patches.Patch, patches.Wrap] = {
    patches.SAVE: patches.replaced_by(
        lambda save, sharded_state_dict, *args, **kwargs: save(first_replicas(sharded_state_dict), *args, **kwargs)
    ),
    patches.LOAD: patches.replaced_by(_load),
}
# If ranks have other weights than without our flags, a checkpoint must store each weight by its name.
BY_LAYER: dict[patches.Patch, patches.Wrap] = {
    patches.CHECKPOINT_FORMAT: patches.replaced_by(_refuse_files_by_rank),
    patches.STATE_BY_BUFFER: patches.replaced_by(_refuse_state),
    patches.STATE_BY_RANK: patches.replaced_by(_refuse_state),
}
