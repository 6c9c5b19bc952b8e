"""What kernels read besides their arguments.

Settings of a thread travel with each block. Settings of the whole process (the random generator, flags that choose
kernels) cannot: whoever reads or sets one in Python waits until all that was issued before has run
(`terra.run.guards`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class State(NamedTuple):
    """Settings that torch keeps for each thread."""

    with_gradients: bool
    num_threads: int


def current() -> tuple[bool, int]:
    """Return this thread's `State` as a plain tuple, because every operation needs it."""
    return torch.is_grad_enabled(), torch.get_num_threads()


def apply(state: State) -> None:
    """Apply a state in the thread that runs operations."""
    if torch.is_grad_enabled() is not state.with_gradients:
        torch._C._set_grad_enabled(state.with_gradients)
    if torch.get_num_threads() != state.num_threads:
        torch.set_num_threads(state.num_threads)


# Where programs and torch itself look up what sets a flag for kernels.
_FLAGS = (
    "_set_deterministic_algorithms _set_deterministic_fill_uninitialized_memory _set_default_dtype _set_mkldnn_enabled "
    "_set_mkldnn_deterministic _set_float32_matmul_precision _set_fp32_precision_setter _set_cudnn_enabled "
    "_set_cudnn_benchmark _set_cudnn_deterministic _set_cudnn_allow_tf32 _set_cublas_allow_tf32 _set_sdp_use_flash "
    "_set_sdp_use_math _set_sdp_use_mem_efficient _set_sdp_use_cudnn _set_nnpack_enabled set_num_threads"
).split()
SETTERS: tuple[tuple[Any, str], ...] = (
    *((torch._C, name) for name in _FLAGS if hasattr(torch._C, name)),
    (torch, "set_num_threads"),
)
_OF_GENERATORS = ("get_state set_state manual_seed seed initial_seed graphsafe_get_state graphsafe_set_state").split()


class Generator:
    """Replaces a default generator of `torch.random` or `torch.cuda`: calls `before` before its state is used."""

    def __init__(self, generator: torch.Generator, before: Callable[[], None]) -> None:
        self.generator, self._before = generator, before

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.generator, name)
        if name not in _OF_GENERATORS:
            return attribute

        def waiting(*args: Any) -> Any:
            self._before()
            return attribute(*(value.cell.fetch() if hasattr(value, "cell") else value for value in args))

        return waiting


class Generators:
    """Replaces the default generators of `torch.cuda`, one by one as they are looked up: a stand-in for them of
    somebody else's may have no end."""

    def __init__(self, generators: Sequence[torch.Generator], before: Callable[[], None]) -> None:
        self._generators, self._before = generators, before

    def __getitem__(self, index: int) -> Generator:
        return Generator(self._generators[index], self._before)

    def __len__(self) -> int:
        return len(self._generators)
