"""Stand-ins for the functions of torch that look at a tensor's memory past the dispatcher.

No operation shows such a look, and a placeholder has no memory: the stand-ins wait for what is pending, and take values
in place of placeholders. Some functions compute in another way if anything watches the dispatcher; these run unwatched,
so that they give the same bits.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.dlpack

from terra.run.cell import WRITES, plain, undispatched

Function = Callable[..., Any]
StandIn = Callable[[Function], Function]
_VF: Any = torch._VF
# These take numbers out of lists, of which some may be tensors.
_OF_LISTS = (
    (torch, "tensor"),
    (torch, "as_tensor"),
    (torch, "asarray"),
    *((torch.Tensor, name) for name in ("new_tensor", "new", "__new__")),
)
# These read their second argument on the host: where to split, and how many sequences a packed batch has at each time.
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
# Without gradients these compute values alone, but vectors too if a mode is on, with other last digits.
_OF_VALUES = (
    *((torch.linalg, name) for name in "svdvals eigvalsh eigvals cond matrix_rank matrix_norm norm".split()),
    *((torch, name) for name in ("norm", "nuclear_norm")),
)
# The norms that are made of singular values.
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
        yield owner, name, functools.partial(after, lend)


def after(action: Callable[[], None], function: Function) -> Function:
    """Return a function that calls `action` first."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        action()
        return function(*args, **kwargs)

    return run


def _of_lists(wait: Callable[[], None], function: Function) -> Function:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if any(map(_holds_tensors, (*args, *kwargs.values()))):
            wait()
            args, kwargs = tuple(map(_values, args)), {name: _values(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)

    return run


def _holds_tensors(argument: Any) -> bool:
    return isinstance(argument, (list, tuple)) and any(
        isinstance(value, torch.Tensor) or _holds_tensors(value) for value in argument
    )


def _values(argument: Any) -> Any:
    """Return a list with values in place of placeholders, and anything else as it is."""
    if not isinstance(argument, (list, tuple)):
        return argument
    return [_values(value) if isinstance(value, (list, tuple)) else plain(value) for value in argument]


def _by_second(wait: Callable[[], None], function: Function) -> Function:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if any(map(_is_index, (*args[1:2], *map(kwargs.get, _SECOND)))):
            wait()
            args = tuple(plain(value) if place == 1 else value for place, value in enumerate(args))
            kwargs = {name: plain(value) if name in _SECOND else value for name, value in kwargs.items()}
        return function(*args, **kwargs)

    return run


def _is_index(argument: Any) -> bool:
    """Whether it holds whole numbers: a layer's second argument may also be its state, whose gradients count."""
    return isinstance(argument, torch.Tensor) and argument.dtype == torch.int64


def _in_memory(lend: Callable[[], None], function: Function) -> Function:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        lend()
        return function(*map(plain, args), **kwargs)

    return run


def _unwatched(wait: Callable[[], None], name: str, function: Function) -> Function:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = (*args, *kwargs.values())
        if name in _NORMS and not any(type(value) in (str, int, float) and value in _SINGULAR for value in arguments):
            return function(*args, **kwargs)
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        has_gradient = torch.is_grad_enabled() and any(value.requires_grad for value in tensors)
        # A transform of torch.func holds tensors in its own, and computes vectors itself.
        if has_gradient or kwargs.get("out") is not None or torch._C._functorch.peek_interpreter_stack() is not None:
            return function(*args, **kwargs)
        wait()
        with undispatched():
            return function(*map(plain, args), **{key: plain(value) for key, value in kwargs.items()})

    return run
