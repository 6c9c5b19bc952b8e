"""Know the functions of torch that look at a tensor's memory past the dispatcher.

In: ways to wait. Out: stand-ins for these functions.

No operation tells of such a look, and a placeholder has no memory: what is pending is waited for, and values are taken
in its place. Some functions compute in another way where anything watches the dispatcher; these run unwatched, so that
they give the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.dlpack

from terra.run.cell import WRITES, plain, undispatched

Function = Callable[..., Any]
StandIn = Callable[[Function], Function]
_VF: Any = torch._VF
# Take numbers out of lists, of which some may be tensors.
_OF_LISTS = (
    (torch, "tensor"),
    (torch, "as_tensor"),
    (torch, "asarray"),
    *((torch.Tensor, name) for name in ("new_tensor", "new", "__new__")),
)
# Read their second argument on the host: where to split, and how many sequences a packed batch has at each time.
_BY_SECOND = (
    *((torch, "tensor_split"), (torch.Tensor, "tensor_split")),
    *((_VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu", "_pad_packed_sequence")),
)
_SECOND = ("indices_or_sections", "tensor_indices_or_sections")
_DLPACK = (
    (torch._C, "_to_dlpack"),
    (torch._C, "_to_dlpack_versioned"),
    (torch.utils.dlpack, "to_dlpack"),
    (torch, "to_dlpack"),
)
# Without gradients these ask for values alone, and for vectors too where a mode is on: the last digits are others.
_OF_VALUES = (
    *(
        (torch.linalg, name)
        for name in ("svdvals", "eigvalsh", "eigvals", "cond", "matrix_rank", "matrix_norm", "norm")
    ),
    *((torch, name) for name in ("norm", "nuclear_norm")),
)
# Of the norms those that are made of singular values.
_NORMS = frozenset({"norm", "matrix_norm"})
_SINGULAR = ("nuc", 2, -2)


def stand_ins(wait: Callable[[], None], lend: Callable[[], None]) -> Iterator[tuple[Any, str, StandIn]]:
    """Yield where each function is looked up, its name there, and what makes its stand-in."""
    for owner, name in _OF_LISTS:
        yield owner, name, functools.partial(_of_lists, wait)
    for owner, name in _BY_SECOND:
        yield owner, name, functools.partial(_by_second, wait)
    for owner, name in (*_DLPACK, *((torch.Tensor, name) for name in WRITES)):
        yield owner, name, functools.partial(_in_memory, lend)
    for owner, name in _OF_VALUES:
        yield owner, name, functools.partial(_unwatched, wait, name)
    # Pending operations mean what a tensor was before it was swapped.
    for owner, name in ((torch.utils, "swap_tensors"), (torch._C, "_swap_tensor_impl")):
        yield owner, name, functools.partial(_after, lend)


def _after(before: Callable[[], None], function: Function) -> Function:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before()
        return function(*args, **kwargs)

    return run


def _of_lists(wait: Callable[[], None], function: Function) -> Function:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if any(map(_holds_tensors, (*args, *kwargs.values()))):
            wait()
            args, kwargs = tuple(map(_values, args)), {name: _values(each) for name, each in kwargs.items()}
        return function(*args, **kwargs)

    return run


def _holds_tensors(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and any(
        isinstance(each, torch.Tensor) or _holds_tensors(each) for each in given
    )


def _values(given: Any) -> Any:
    """Return a list with values in place of placeholders, and what is no list as it is."""
    if not isinstance(given, (list, tuple)):
        return given
    return [_values(each) if isinstance(each, (list, tuple)) else plain(each) for each in given]


def _by_second(wait: Callable[[], None], function: Function) -> Function:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if any(map(_is_index, (*args[1:2], *map(kwargs.get, _SECOND)))):
            wait()
            args = tuple(plain(each) if place == 1 else each for place, each in enumerate(args))
            kwargs = {name: plain(each) if name in _SECOND else each for name, each in kwargs.items()}
        return function(*args, **kwargs)

    return run


def _is_index(given: Any) -> bool:
    """Return whether it holds whole numbers.

    In second place a layer may also have its state, whose history of gradients counts.
    """
    return isinstance(given, torch.Tensor) and given.dtype == torch.int64


def _in_memory(lend: Callable[[], None], function: Function) -> Function:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        lend()
        return function(*map(plain, args), **kwargs)

    return run


def _unwatched(wait: Callable[[], None], name: str, function: Function) -> Function:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if name in _NORMS and not any(type(each) in (str, int, float) and each in _SINGULAR for each in given):
            return function(*args, **kwargs)
        tensors = [each for each in given if isinstance(each, torch.Tensor)]
        has_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        # A transform of torch.func holds tensors in its own, and asks for vectors itself.
        if has_gradient or kwargs.get("out") is not None or torch._C._functorch.peek_interpreter_stack() is not None:
            return function(*args, **kwargs)
        wait()
        with undispatched():
            return function(*map(plain, args), **{key: plain(each) for key, each in kwargs.items()})

    return run
