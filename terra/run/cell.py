"""Stand in for tensors that are not computed yet.

In: forms of what operations make. Out: `Cell`s, and `Placeholder`s before them.

The program holds placeholders: tensors of the right shape, type and autograd history, without memory. The value, once
the runner has made it, lies in the cell behind. Whatever needs the bytes and does not pass the dispatcher asks for the
value here, and waits.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

_BASE: Any = torch._C.TensorBase


class Form(NamedTuple):
    """All that a program can see of a strided tensor but its numbers. Sizes, strides and offset in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


def form_of(tensor: torch.Tensor) -> Form:
    return Form(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.device)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a form tells all: strided memory, read as it is."""
    is_lazy = tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()
    return tensor.layout is torch.strided and not (is_lazy or tensor.is_quantized or tensor.is_nested)


class Owner(Protocol):
    """Owner of cells: it knows what is still to be computed."""

    def drain(self) -> None:
        """Wait until all that was issued is computed."""

    def lend(self) -> None:
        """Compute everything and lend memory: Python may have that of any value from now on."""

    def outside(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Run one operation of a program that takes placeholders outside of a step."""


class Cell:
    """Cell of a value. `value` is None until the runner has made it; `is_shared`: Python has the memory too, as an
    array has."""

    __slots__ = ("__weakref__", "form", "is_shared", "owner", "value")

    def __init__(self, owner: Owner, form: Form, value: torch.Tensor | None = None, is_shared: bool = False) -> None:
        self.owner, self.form, self.value, self.is_shared = owner, form, value, is_shared

    def fetch(self) -> torch.Tensor:
        """Return the value, waited for. It is what all operations issued so far have made of it."""
        self.owner.drain()
        if self.value is None:
            raise RuntimeError("terra: this value was never computed, because an earlier operation failed")
        return self.value


def has_shared_memory(tensor: torch.Tensor) -> bool:
    """Return whether Python may write it without torch: memory of an array or lent to one, of a file, of another
    process."""
    shared: bool = tensor.device.type == "cpu" and not _BASE.untyped_storage(tensor).resizable()
    return shared


def undispatched() -> Any:
    """Disable dispatch modes inside: for what a program does to memory itself."""
    return torch._C._DisableTorchDispatch()


def below_autograd() -> Any:
    """Run below autograd inside: for operations that passed autograd and the counters of writes as they were issued."""
    return torch._C._AutoDispatchBelowADInplaceOrView()


class Placeholder(torch.Tensor):
    """Tensor whose value `cell` has."""

    cell: Cell
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, cell: Cell) -> Placeholder:
        made: Placeholder = _blank(cls, cell.form)
        made.cell = cell
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _first(args, kwargs).owner.outside(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        found: torch.Tensor = _BASE.data.__get__(self)
        return found

    @data.setter
    def data(self, given: torch.Tensor) -> None:
        # Pending operations mean the memory that there was.
        owner = self.cell.owner
        owner.drain()
        self.become(
            given.cell
            if isinstance(given, Placeholder)
            else Cell(owner, form_of(given), given, has_shared_memory(given))
        )

    def become(self, cell: Cell) -> None:
        """Be another cell's from now on, also in size."""
        with undispatched():
            _BASE.data.__set__(self, _blank(Placeholder, cell.form))
        self.cell = cell

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        value = self.cell.fetch()
        with undispatched():
            text = torch._tensor_str._str(value)
        gradient = self.grad_fn
        if gradient is not None:
            return f"{text[:-1]}, grad_fn=<{gradient.name().removeprefix('torch::autograd::')}>)"
        return f"{text[:-1]}, requires_grad=True)" if self.requires_grad else text

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the value, and remember the copy by the placeholder: the identity of the value, a temporary, comes
        again with others."""
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol: copy this "
                "one's detach() instead"
            )
        if id(self) not in memo:
            with undispatched():
                value = _lent(self)
                copied = value.__deepcopy__(memo)
            memo[id(self)] = memo.pop(id(value))
            if not isinstance(copied, torch.nn.Parameter):
                copied.grad = copy.deepcopy(self.grad, memo)
                vars(copied).update(copy.deepcopy(_attributes(self), memo))
        return memo[id(self)]

    def __format__(self, spec: str) -> str:
        value = self.cell.fetch()
        if self.dim():
            return object.__format__(self, spec)
        with undispatched():
            return value.item().__format__(spec)


def _blank(cls: type, form: Form) -> Any:
    make = _makers.get(form)
    if make is None:
        make = _makers[form] = _maker(form)
    return make(cls, form.shape)


# Grows by a program's forms, less than a kilobyte each.
_makers: dict[Form, Callable[[type, tuple[int, ...]], Any]] = {}


def _maker(form: Form) -> Callable[[type, tuple[int, ...]], Any]:
    """Makes what looks like this. What is so anyway is not told, for each setting takes time to be read."""
    settings: dict[str, Any] = {"dtype": form.dtype}
    if form.offset or form.stride != torch.empty(form.shape, device="meta").stride():
        settings |= {"strides": form.stride, "storage_offset": form.offset}
    if form.device.type != "cpu":
        settings["device"] = form.device
    return functools.partial(torch.Tensor._make_wrapper_subclass, **settings)


def _first(*given: Any) -> Cell:
    """Of the first placeholder in there; there is one."""
    left = list(given)
    while left:
        each = left.pop(0)
        if isinstance(each, Placeholder):
            return each.cell
        if isinstance(each, (list, tuple)):
            left += each
        elif isinstance(each, dict):
            left += each.values()
    raise AssertionError("no placeholder")


# What reaches a tensor's memory, or takes the tensor apart, without an operation.
READS = (
    *("numpy", "tolist", "data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_"),
    *("__array__", "__dlpack__", "__reduce_ex__"),
)
# Call a function of Python's on each number, in the tensor's memory.
WRITES = ("apply_", "map_", "map2_")


def plain(given: Any) -> Any:
    """Return a placeholder's value, waited for, and all else as it is."""
    return given.cell.fetch() if isinstance(given, Placeholder) else given


def _lent(placeholder: Placeholder) -> torch.Tensor:
    """Return the value as it would be without a session: a parameter or none, and marked where it has a gradient."""
    placeholder.cell.owner.lend()
    value = placeholder.cell.fetch().detach()
    if getattr(placeholder, "_is_param", False):
        value = torch.nn.Parameter(value, placeholder.requires_grad)
    elif placeholder.requires_grad and value.is_floating_point():
        # As eager would: an array of what has a gradient is refused.
        value.requires_grad_()
    return value


def _attributes(placeholder: Placeholder) -> dict[str, Any]:
    """Return what the program itself has hung on it."""
    return {name: each for name, each in vars(placeholder).items() if name not in ("cell", "_is_param")}


def _read(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(torch.Tensor, name))
    def read(self: Placeholder, *args: Any, **kwargs: Any) -> Any:
        with undispatched():
            value = _lent(self)
            vars(value).update(_attributes(self))
            return getattr(type(value), name)(value, *args, **kwargs)

    return read


def _written(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(torch.Tensor, name))
    def write(self: Placeholder, *args: Any) -> Placeholder:
        with undispatched():
            value = _lent(self)
        # Dispatched, for the function may issue operations.
        getattr(value, name)(*map(plain, args))
        return self

    return write


for _name in READS:
    setattr(Placeholder, _name, _read(_name))
for _name in WRITES:
    setattr(Placeholder, _name, _written(_name))
