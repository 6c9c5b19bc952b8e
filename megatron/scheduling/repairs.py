"""Mend defects of the installed Megatron that would stop a run, each only where the defect is present.

In: an imported Megatron. Out: the same, mended, and the list of what was done. Knows nothing of schedules.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


def apply() -> tuple[str, ...]:
    """Apply every repair whose defect is present; returns what was mended, one line each.

    Another version may not have a module at all that holds a defect here.
    """
    mended = []
    for repair in _REPAIRS:
        with contextlib.suppress(ModuleNotFoundError):
            mended.append(repair())
    return tuple(line for line in mended if line)


def _skip_compiling_helpers() -> str | None:
    """The wheel ships its dataset helpers compiled and no Makefile; calling `make` there fails and ends the process."""
    from megatron.core.datasets import utils

    if os.path.exists(os.path.join(os.path.dirname(utils.__file__), "Makefile")):
        return None
    utils.compile_helpers = lambda: None
    return "dataset helpers are shipped compiled and not built again"


def _torch_norm_with_sequence_parallelism() -> str | None:
    """Without Apex and Transformer Engine, Megatron's norm is torch's, and refuses sequence parallelism.

    All that is missing is a mark on its weights, which tells Megatron to sum their gradients over the tensor-parallel ranks.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    sample = SimpleNamespace(
        **dict.fromkeys(("layernorm_zero_centered_gamma", "persist_layer_norm", "memory_efficient_layer_norm"), False),
        sequence_parallel=True,
        normalization="LayerNorm",
    )
    try:
        WrappedTorchNorm(sample, 1)
    except AssertionError:
        pass
    else:
        return None
    plain = WrappedTorchNorm.__new__

    @functools.wraps(plain)
    def marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return plain(cls, config, *args, **kwargs)
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = plain(cls, without, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    WrappedTorchNorm.__new__ = marked
    return "torch's norm takes part in sequence parallelism"


def _recompute_norms_without_transformer_engine() -> str | None:
    """Recomputing a norm asks Transformer Engine whether FP8 is on, also where it is not installed: a NameError in the first forward."""
    from megatron.core.tensor_parallel import random

    if hasattr(random, "FP8GlobalStateManager"):
        return None
    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = random.fp8_autocast = lambda **_: contextlib.nullcontext()
    return "norms are recomputed without asking Transformer Engine for FP8"


def _resume_distributed_optimizer_with_torch_adam() -> str | None:
    """Without Apex and Transformer Engine the distributed optimizer wraps torch's Adam, and cannot resume with it.

    It asks for the common step of a state that torch makes only at the first step; it writes loaded values into parameters that require
    a gradient; it gives all parameters one tensor as their step, which torch counts up once for each of them, or the step from
    before the loading; and in the fully reshardable format it looks for that step where it was not put.
    """
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return None
    kind = distrib_optimizer.DistributedOptimizer
    plain_state_dict, plain_load = kind.state_dict, kind.load_state_dict

    @functools.wraps(plain_state_dict)
    def state_dict(self: Any) -> Any:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state.update({key: torch.zeros_like(parameter) for key in self.optimizer_state_keys})
        return plain_state_dict(self)

    @functools.wraps(plain_load)
    def load_state_dict(self: Any, loaded: Any) -> None:
        step = float(loaded["optimizer"]["param_groups"][0]["step"])
        plain_load(self, loaded)
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(step)

    plain_set = torch.no_grad()(kind._set_main_param_and_optimizer_states)

    @functools.wraps(plain_set)
    def set_states(self: Any, model_param: Any, tensors: Any) -> None:
        # What is no tensor is passed over.
        plain_set(self, model_param, {"step": None, **tensors})

    kind.state_dict, kind.load_state_dict = state_dict, load_state_dict
    kind._set_main_param_and_optimizer_states = set_states
    return "the distributed optimizer resumes with torch's Adam"


def _save_padded_buckets_by_layer() -> str | None:
    """Saved by layer, the distributed optimizer's state is put together without the padding behind each bucket, and then cut up as with it.

    So behind a padded bucket every weight's state is another's, and the last one's ends in zeros; Megatron warns of no more than that.
    """
    from megatron.core.optimizer import distrib_optimizer

    kind = distrib_optimizer.DistributedOptimizer
    plain = getattr(kind, "sharded_param_state_fully_reshardable", None)
    if plain is None or tuple(inspect.signature(plain).parameters) != ("self", "model_sharded_state_dict", "is_loading", "metadata"):
        return None
    if not _cuts_as_with_padding(plain):
        return None

    @functools.wraps(plain)
    def sharded(self: Any, *args: Any, **kwargs: Any) -> Any:
        padded = [buffer.param_index_map for buffer in self.buffers]
        try:
            for buffer in self.buffers:
                buffer.param_index_map = without_padding(buffer)
            return plain(self, *args, **kwargs)
        finally:
            for buffer, index in zip(self.buffers, padded, strict=True):
                buffer.param_index_map = index

    kind.sharded_param_state_fully_reshardable = sharded
    return "the distributed optimizer's state is saved by layer also behind padded buckets"


def without_padding(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """Where each parameter of a buffer begins and ends, and in which bucket, where buckets follow each other without padding."""
    sizes = [0, *itertools.accumulate(bucket.numel_unpadded for bucket in buffer.buckets)]
    moved = [buffer.bucket_indices[bucket][0] - before for bucket, before in enumerate(sizes[:-1])]
    return {param: (start - moved[at], end - moved[at], at) for param, (start, end, at) in buffer.param_index_map.items()}


def _cuts_as_with_padding(sharded: Callable[..., Any]) -> bool:
    """Of two parameters in buckets of 4 that each have 1, whose state is 1 and 2: whether the second's is found to be another."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.optimizer import distrib_optimizer

    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    buffer = SimpleNamespace(
        param_index_map={params[0]: (0, 1, 0), params[1]: (4, 5, 1)},
        bucket_indices=[(0, 4), (4, 8)],
        buckets=[SimpleNamespace(numel_unpadded=1)] * 2,
        numel_unpadded=2,
    )
    state = {0: {torch.float32: {"param": torch.tensor([1.0, 2.0]), "numel_unpadded": 2}}}
    optimizer = SimpleNamespace(gbuf_ranges=[{torch.float32: None}], buffers=[buffer], get_parameter_state_dp_zero=lambda **_: state)
    named = {str(number): ShardedTensor.from_rank_offsets(str(number), param) for number, param in enumerate(params)}
    logger = distrib_optimizer.logger
    said, logger.disabled = logger.disabled, True
    try:
        found = sharded(optimizer, named, False, {})
    finally:
        logger.disabled = said
    return float(found[1]["param"].data) != 2.0


_REPAIRS: tuple[Callable[[], str | None], ...] = (
    _skip_compiling_helpers,
    _torch_norm_with_sequence_parallelism,
    _recompute_norms_without_transformer_engine,
    _resume_distributed_optimizer_with_torch_adam,
    _save_padded_buckets_by_layer,
)
