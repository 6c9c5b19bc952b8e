"""Placeholders for tensors that are not computed yet, and cells for their values.

The program holds placeholders: tensors of the right shape, type and autograd history, without memory. Each has a cell,
where the runner puts the value. Whatever needs the bytes and does not pass the dispatcher waits for the value here.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

_BASE: Any = torch._C.TensorBase


class Form(NamedTuple):
    """All that a program can see of a strided tensor except its numbers. Strides and offset are in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


def form_of(tensor: torch.Tensor) -> Form:
    return Form(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.device)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a form tells everything: strided memory, read as it is."""
    is_lazy = tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()
    return tensor.layout is torch.strided and not (is_lazy or tensor.is_quantized or tensor.is_nested)


class Owner(Protocol):
    """Owner of cells: it knows what is still to be computed."""

    def drain(self) -> None:
        """Wait until all that was issued is computed."""

    def lend(self) -> None:
        """Compute everything: from now on Python may have the memory of any value."""

    def outside(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Run one operation of a program that takes placeholders outside of a step."""


class Cell:
    """Holds a value: None until the runner has made it. `is_shared`: Python has the memory too, as an array has."""

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
    """Whether Python may write it without torch: memory of an array, of a file, or of another process."""
    shared: bool = tensor.device.type == "cpu" and not _BASE.untyped_storage(tensor).resizable()
    return shared


def undispatched() -> Any:
    """Disable dispatch modes inside, for what a program does to memory itself."""
    return torch._C._DisableTorchDispatch()


def below_autograd() -> Any:
    """Run below autograd, for operations that passed it, and the counters of writes, when they were issued."""
    return torch._C._AutoDispatchBelowADInplaceOrView()


class Placeholder(torch.Tensor):
    """A tensor whose value is in `cell`."""

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
        cell = _first((args, kwargs))
        assert cell is not None
        return cell.owner.outside(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        data: torch.Tensor = _BASE.data.__get__(self)
        return data

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        # Pending operations mean the memory as it was.
        owner = self.cell.owner
        owner.drain()
        cell = data.cell if isinstance(data, Placeholder) else Cell(owner, form_of(data), data, has_shared_memory(data))
        self.become(cell)

    def become(self, cell: Cell) -> None:
        """Take another cell, with its form."""
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
        """Copy the value, and remember the copy by the placeholder: the value is a temporary, whose id recurs."""
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


# Grows with the forms of a program, by less than a kilobyte each.
_makers: dict[Form, Callable[[type, tuple[int, ...]], Any]] = {}


def _maker(form: Form) -> Callable[[type, tuple[int, ...]], Any]:
    """Return what makes a tensor that looks like this. Defaults are left out, because reading a setting takes time."""
    settings: dict[str, Any] = {"dtype": form.dtype}
    if form.offset or form.stride != torch.empty(form.shape, device="meta").stride():
        settings |= {"strides": form.stride, "storage_offset": form.offset}
    if form.device.type != "cpu":
        settings["device"] = form.device
    return functools.partial(torch.Tensor._make_wrapper_subclass, **settings)


def _first(values: Any) -> Cell | None:
    """Return the cell of the first placeholder among these values, in lists at any depth."""
    if isinstance(values, Placeholder):
        return values.cell
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return None
    return next((cell for cell in map(_first, values) if cell is not None), None)


# What reaches a tensor's memory, or takes the tensor apart, without an operation.
READS = (
    *("numpy", "tolist", "data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_"),
    *("__array__", "__dlpack__", "__reduce_ex__"),
)
# What calls a function of Python on each number, in the tensor's memory.
WRITES = ("apply_", "map_", "map2_")


def plain(value: Any) -> Any:
    """Return a placeholder's value, waited for, and anything else as it is."""
    return value.cell.fetch() if isinstance(value, Placeholder) else value


def _lent(placeholder: Placeholder) -> torch.Tensor:
    """Return the value as it would be without a session: perhaps a parameter, perhaps with a gradient."""
    placeholder.cell.owner.lend()
    value = placeholder.cell.fetch().detach()
    if getattr(placeholder, "_is_param", False):
        value = torch.nn.Parameter(value, placeholder.requires_grad)
    elif placeholder.requires_grad and value.is_floating_point():
        # As eager would: an array of what has a gradient is refused.
        value.requires_grad_()
    return value


def _attributes(placeholder: Placeholder) -> dict[str, Any]:
    """Return the attributes that the program itself has set."""
    return {name: value for name, value in vars(placeholder).items() if name not in ("cell", "_is_param")}


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
