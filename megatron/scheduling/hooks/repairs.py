"""Repair defects of the installed Megatron that would stop a run, in memory, and only where they are present."""

import contextlib
import copy
import inspect
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from megatron.scheduling.hooks.patches import replaced_by

_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
_RANDOM = "megatron.core.tensor_parallel.random"


@dataclass(frozen=True)
class Repair:
    """Repair of one defect."""

    names: tuple[str, ...]
    """Names in Megatron that are replaced if the defect is present."""

    mends: str
    """What works after the repair."""

    make: Callable[[], bool]
    """Replaces the names if the defect is present, and returns whether it was."""


REPAIRS: list[Repair] = []


def _repair(mends: str, *names: str) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    """Add the decorated function to the repairs."""

    def add(make: Callable[[], bool]) -> Callable[[], bool]:
        REPAIRS.append(Repair(names, mends, make))
        return make

    return add


def apply() -> list[str]:
    """Make every repair whose defect is present.

    Returns:
        A line for each repair that was made, or that could not be tried.
    """
    lines = []
    for repair in REPAIRS:
        names = ", ".join(repair.names)
        try:
            if repair.make():
                lines.append(f"repaired in memory, without editing files: {names}: {repair.mends}")
        except Exception as error:
            # A repair reads names that another Megatron may not have, and that must not end a run.
            reason = f"{type(error).__name__}: {error}"
            lines.append(
                f"repair skipped, because it cannot be tried on this Megatron ({reason}): {names}: {repair.mends}"
            )
    return lines


@_repair("dataset helpers that come compiled are not rebuilt", "megatron.core.datasets.utils.compile_helpers")
def _skip_compiling_helpers() -> bool:
    """The wheel ships dataset helpers compiled and without a Makefile, so `make` fails and ends the process."""
    from megatron.core.datasets import utils

    if os.path.exists(os.path.join(os.path.dirname(utils.__file__), "Makefile")):
        return False
    utils.compile_helpers = lambda: None
    return True


@_repair("torch's norm supports sequence parallelism", "megatron.core.transformer.torch_norm.WrappedTorchNorm.__new__")
def _torch_norm_with_sequence_parallelism() -> bool:
    """Without Apex and Transformer Engine, Megatron's norm is torch's, and refuses sequence parallelism.

    Only a mark on its weights is missing, which makes Megatron sum their gradients over the tensor-parallel ranks.
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
        return False

    def new(plain: Any, cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return plain(cls, config, *args, **kwargs)
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = plain(cls, without, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    WrappedTorchNorm.__new__ = replaced_by(new)(WrappedTorchNorm.__new__)
    return True


@_repair(
    "norms are recomputed without Transformer Engine's FP8 functions",
    *(f"{_RANDOM}.{name}" for name in ("FP8GlobalStateManager", "activation_recompute_forward", "fp8_autocast")),
)
def _recompute_norms_without_transformer_engine() -> bool:
    """Recomputing a norm asks Transformer Engine whether FP8 is on even if it is not installed: a NameError."""
    from megatron.core.tensor_parallel import random

    if hasattr(random, "FP8GlobalStateManager"):
        return False
    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = random.fp8_autocast = lambda **_: contextlib.nullcontext()
    return True


@_repair(
    "the distributed optimizer resumes with torch's Adam",
    *(f"{_DISTRIBUTED}.{name}" for name in ("state_dict", "load_state_dict", "_set_main_param_and_optimizer_states")),
)
def _resume_distributed_optimizer_with_torch_adam() -> bool:
    """Without Apex and Transformer Engine the distributed optimizer wraps torch's Adam, and cannot resume with it.

    It reads the common step of a state that torch makes only at the first step. It writes loaded values into parameters
    that require a gradient. It gives all parameters one tensor as their step, which torch increments once for each of
    them, or the step from before the loading. And in the fully reshardable format it looks for that step in the wrong
    place.
    """
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return False
    kind = distrib_optimizer.DistributedOptimizer

    def state_dict(plain: Any, self: Any) -> Any:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state.update({key: torch.zeros_like(parameter) for key in self.optimizer_state_keys})
        return plain(self)

    def load_state_dict(plain: Any, self: Any, loaded: Any) -> None:
        step = float(loaded["optimizer"]["param_groups"][0]["step"])
        plain(self, loaded)
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(step)

    def set_states(plain: Any, self: Any, model_param: Any, tensors: Any) -> None:
        # Megatron skips entries that are no tensors.
        with torch.no_grad():
            plain(self, model_param, {"step": None, **tensors})

    kind.state_dict = replaced_by(state_dict)(kind.state_dict)
    kind.load_state_dict = replaced_by(load_state_dict)(kind.load_state_dict)
    kind._set_main_param_and_optimizer_states = replaced_by(set_states)(kind._set_main_param_and_optimizer_states)
    return True


@_repair("packed sequences are counted without a GPU", "megatron.training.training._seqlen_stats_in_iteration")
def _count_packed_tokens_on_what_stands_in() -> bool:
    """Megatron sums the lengths of packed sequences on the device "cuda:" and its index, which a stand-in lacks."""
    if isinstance(torch.cuda.current_device(), int):
        return False
    from megatron.training import training

    training._seqlen_stats_in_iteration = torch.zeros(2, dtype=torch.float64, device="cuda")
    return True


@_repair(
    "the distributed optimizer's state is saved by layer even with padded buckets",
    f"{_DISTRIBUTED}.sharded_param_state_fully_reshardable",
)
def _save_padded_buckets_by_layer() -> bool:
    """Saved by layer, the distributed optimizer's state is joined without the padding after each bucket, and then cut
    as if the padding were there.

    So after a padded bucket every weight gets the state of another, and the last one's ends in zeros. Megatron only
    warns.
    """
    from megatron.core.optimizer import distrib_optimizer

    kind = distrib_optimizer.DistributedOptimizer
    plain = getattr(kind, "sharded_param_state_fully_reshardable", None)
    parameters = "self model_sharded_state_dict is_loading metadata".split()
    if plain is None or list(inspect.signature(plain).parameters) != parameters or not _cuts_as_with_padding(plain):
        return False

    def sharded(plain: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        padded = [buffer.param_index_map for buffer in self.buffers]
        try:
            for buffer in self.buffers:
                buffer.param_index_map = without_padding(buffer)
            return plain(self, *args, **kwargs)
        finally:
            for buffer, index in zip(self.buffers, padded, strict=True):
                buffer.param_index_map = index

    kind.sharded_param_state_fully_reshardable = replaced_by(sharded)(plain)
    return True


def without_padding(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """Return begin, end and bucket of each parameter of a buffer whose buckets follow each other without padding."""
    begins = [0, *itertools.accumulate(bucket.numel_unpadded for bucket in buffer.buckets)]
    shifts = [padded[0] - begin for padded, begin in zip(buffer.bucket_indices, begins, strict=False)]
    return {
        param: (start - shifts[bucket], end - shifts[bucket], bucket)
        for param, (start, end, bucket) in buffer.param_index_map.items()
    }


def _cuts_as_with_padding(sharded: Callable[..., Any]) -> bool:
    """Whether the second of two parameters, in buckets of 4 with one element each, gets a wrong state."""
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
    optimizer = SimpleNamespace(
        gbuf_ranges=[{torch.float32: None}], buffers=[buffer], get_parameter_state_dp_zero=lambda **_: state
    )
    named = {str(number): ShardedTensor.from_rank_offsets(str(number), param) for number, param in enumerate(params)}
    with patch.object(distrib_optimizer.logger, "disabled", True):
        states = sharded(optimizer, named, False, {})
    return float(states[1]["param"].data) != 2.0
