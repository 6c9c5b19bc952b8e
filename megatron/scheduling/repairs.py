"""Mend defects of the installed Megatron that would stop a run, each only where the defect is present.

In: an imported Megatron. Out: the same, mended, and the list of what was done. Knows nothing of schedules.
"""

from __future__ import annotations

import contextlib
import copy
import functools
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


_REPAIRS: tuple[Callable[[], str | None], ...] = (
    _skip_compiling_helpers,
    _torch_norm_with_sequence_parallelism,
    _recompute_norms_without_transformer_engine,
    _resume_distributed_optimizer_with_torch_adam,
)
