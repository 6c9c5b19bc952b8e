"""Mend defects of the installed Megatron that would stop a run, each only where the defect is present.

In: an imported Megatron. Out: the same, mended, and the list of what was done. Knows nothing of schedules.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def apply() -> tuple[str, ...]:
    """Apply every repair whose defect is present; returns what was mended, one line each."""
    return tuple(line for line in (repair() for repair in _REPAIRS) if line)


def _skip_compiling_helpers() -> str | None:
    """The wheel ships its dataset helpers compiled and no Makefile; calling `make` there fails and ends the process."""
    from megatron.core.datasets import utils

    if os.path.exists(os.path.join(os.path.dirname(utils.__file__), "Makefile")):
        return None
    utils.compile_helpers = lambda: None
    return "dataset helpers: shipped compiled, not built again"


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
    return "torch's norm: marked for sequence parallelism"


_REPAIRS: tuple[Callable[[], str | None], ...] = (_skip_compiling_helpers, _torch_norm_with_sequence_parallelism)
