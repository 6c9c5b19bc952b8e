"""Take an operation apart as it is issued, and hand out its results if it ran at once.

The template has what never changes in the arguments where they are issued: settings, types of numbers, how lists are
built. Numbers are fed and never compared. What an operation makes depends on the forms of its tensors, on its integers,
which may be sizes, and on torch's default type; on floats only if they are sizes. What it made of which forms is
remembered: the next time it need not run before the program goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from terra.run.cell import Cell, Form, Owner, Placeholder, below_autograd, form_of, has_shared_memory, is_plain, plain

# Operations whose floats decide the size of the result.
_SIZED_BY_FLOATS = ("arange", "range", "linspace", "logspace", "upsample", "_upsample")
# Sizes come from the data, which not all of these declare.
_SIZED_BY_DATA = frozenset(
    "_pack_padded_sequence _pad_packed_sequence bincount histogramdd unique_dim _unique2 unique_consecutive".split()
)
# The tensor argument whose gradient torch computes by another formula if a mode is on.
_OTHER_GRADIENTS = {"prod": 0, "masked_fill": 2, "masked_fill_": 2}
# The operation whose higher derivatives differ too, by autograd's name.
_OTHER_HIGHER = "CumprodBackward0"
_BESIDE = frozenset({"profiler", "inductor", "prim"})
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})


class Tensor:
    """Marks the place of a tensor in a template."""


class Argument(NamedTuple):
    """An operation's argument."""

    name: str
    # Whether its integers may be sizes; floats too, if its function says so.
    counts: bool
    is_written: bool


class Function:
    """One of torch's operations."""

    def __init__(self, operation: Any) -> None:
        schema = operation._schema
        name = operation.overloadpacket.__name__ if hasattr(operation, "overloadpacket") else str(operation)
        tags = getattr(operation, "tags", ())
        self.operation = operation
        self.is_beside = operation.namespace in _BESIDE
        self.is_lift = name == "lift_fresh"
        self.is_empty = name == "empty"
        self.other_gradient_of = _OTHER_GRADIENTS.get(name)
        self.is_random = torch.Tag.nondeterministic_seeded in tags
        # Whether its result is known only when it has run; of an index, whether that is a mask.
        self.is_index = name in ("index", "_unsafe_index")
        self.is_awaited = (
            operation.namespace in _COLLECTIVES
            or name in _SIZED_BY_DATA
            or (torch.Tag.dynamic_output_shape in tags and not self.is_index)
            or torch.Tag.data_dependent_output in tags
            or any("Tensor" not in str(result.type) for result in schema.returns)
        )
        self.moves = torch.Tag.inplace_view in tags
        self.floats_count = name.startswith(_SIZED_BY_FLOATS)
        self.arguments = tuple(_argument(declared, self.floats_count) for declared in schema.arguments)
        self.by_name = {argument.name: argument for argument in self.arguments}
        self.writes = any(argument.is_written for argument in self.arguments)
        # The number of sequences in a packed batch at each time, which torch reads on the host in forward and backward.
        self.makes_sizes = name == "_pack_padded_sequence"
        aliases = [result.alias_info for result in schema.returns if result.alias_info is not None]
        self.makes_views = not all(alias.is_write for alias in aliases)


def refuse_other_gradient(call: Call) -> None:
    """Refuse an operation whose gradient would differ in its last digits: a session keeps bits."""
    place = call.function.other_gradient_of
    if place is None or not torch.is_grad_enabled():
        return
    if any(tensor.requires_grad for tensor in call.tensors[place : place + 1]):
        words = (
            "prod(): multiply the numbers one by one"
            if place == 0
            else "the value that masked_fill() fills in: use torch.where()"
        )
        raise RuntimeError(f"{_OTHER_DIGITS} the gradient of {words}, or run this part outside the session")


def refuse_other_higher_derivatives() -> None:
    node: Any = torch._C._current_autograd_node()
    if node is not None and node.name() == _OTHER_HIGHER and torch.is_grad_enabled():
        raise RuntimeError(
            f"{_OTHER_DIGITS} higher-order derivatives of cumprod() (create_graph=True): run this part outside the "
            "session"
        )


_OTHER_DIGITS = "terra: a session would compute by another formula, with different last digits,"


def are_sizes(function: Function, kwargs: Mapping[str, Any]) -> bool:
    """Whether this is memory for integers of the host, such as lengths of sequences, that torch may fill by itself."""
    is_host = getattr(kwargs.get("device"), "type", "cpu") == "cpu"
    return function.is_empty and kwargs.get("dtype") is torch.int64 and is_host


def _argument(declared: Any, floats_count: bool) -> Argument:
    # A number where a tensor or any number may stand is no size.
    counts = floats_count or "int" in str(declared.type).lower()
    return Argument(declared.name, counts, declared.alias_info is not None and declared.alias_info.is_write)


class Outer(NamedTuple):
    """A tensor that no operation of the session made."""

    tensor: torch.Tensor
    form: Any
    is_plain: bool
    # Whether its memory holds no more than one number of the CPU.
    is_single: bool = False
    # Whether it is such a number, which Python computes itself.
    is_host: bool = False
    is_shared: bool = False


# Where a tensor among the arguments comes from.
Source = Cell | Outer


def value_of(source: Source) -> torch.Tensor:
    return source.tensor if isinstance(source, Outer) else source.fetch()


class Call:
    """A call. `leaves` are its tensors, as their sources, and its numbers, in order."""

    __slots__ = (
        *("forms", "function", "has_shared", "is_awaited", "is_host", "leaves", "num_positional", "outers"),
        *("sizes", "sources", "template", "tensors", "written"),
    )

    def __init__(self, function: Function, outers: Outers, args: Any, kwargs: Any) -> None:
        self.function, self.outers = function, outers
        self.leaves: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.sources: list[Source] = []
        self.forms: list[Any] = []
        self.sizes: list[Any] = []
        self.written: list[Source] = []
        self.is_awaited = function.is_awaited
        self.is_host, self.has_shared = True, False
        self.num_positional = len(args)
        template = []
        for value, argument in zip(args, function.arguments, strict=False):
            kind = type(value)
            template.append((_TAKERS.get(kind) or _taker(kind))(self, value, argument))
        for name, value in kwargs.items():
            kind = type(value)
            template.append(name)
            template.append((_TAKERS.get(kind) or _taker(kind))(self, value, function.by_name[name]))
        self.template = tuple(template)
        if not self.forms:
            self.is_host = False

    @property
    def reaches_shared(self) -> bool:
        """Whether it writes memory that Python may have too, or makes a view of it, so that it must not get a copy."""
        return self.has_shared and (self.function.makes_views or any(source.is_shared for source in self.written))

    def result_key(self) -> tuple[Any, ...]:
        return self.function, self.template, tuple(self.forms), tuple(self.sizes), torch.get_default_dtype()


# What is taken from an argument, by its type.


def _placeholder(call: Call, value: Placeholder, argument: Argument) -> type:
    cell, outers = value.cell, call.outers
    call.is_host = False
    if cell.owner is not outers.owner:
        cell.fetch()
    if outers.lent and cell.value is not None and not cell.is_shared:
        cell.is_shared = has_shared_memory(cell.value)
    return _tensor(call, value, cell, argument)


def _outer(call: Call, value: torch.Tensor, argument: Argument) -> type:
    outer = call.outers.of(value)
    if not outer.is_host:
        call.is_host = False
    if not outer.is_plain:
        call.is_awaited = True
    return _tensor(call, value, outer, argument)


def _tensor(call: Call, value: torch.Tensor, source: Source, argument: Argument) -> type:
    call.leaves.append(source)
    call.tensors.append(value)
    call.sources.append(source)
    call.forms.append(source.form)
    if source.is_shared:
        call.has_shared = True
    if argument.is_written:
        call.written.append(source)
    if call.function.is_index and len(call.forms) > 1 and value.dtype in (torch.bool, torch.uint8):
        call.is_awaited = True
    return Tensor


def _integer(call: Call, value: int, argument: Argument) -> type:
    call.leaves.append(value)
    if argument.counts:
        call.sizes.append(value)
    return int


def _real(call: Call, value: float | complex, argument: Argument) -> type:
    call.leaves.append(value)
    if call.function.floats_count:
        call.sizes.append(value)
    return type(value)


def _several(call: Call, values: Any, argument: Argument) -> Any:
    parts: list[Any] = ["["]
    for value in values:
        kind = type(value)
        parts.append((_TAKERS.get(kind) or _taker(kind))(call, value, argument))
    return tuple(parts)


def _another_each_time(call: Call, value: Any, argument: Argument) -> type:
    """Process groups and the like are other objects each time; a generator is read without an operation."""
    call.is_awaited, call.is_host = True, False
    return type(value)


def _setting(call: Call, value: Any, argument: Argument) -> Any:
    return value


_Taker = Callable[[Call, Any, Argument], Any]
_TAKERS: dict[type, _Taker] = {
    Placeholder: _placeholder,
    torch.Tensor: _outer,
    torch.nn.Parameter: _outer,
    int: _integer,
    float: _real,
    complex: _real,
    list: _several,
    tuple: _several,
}


def _taker(kind: type) -> _Taker:
    """Return what takes arguments of a type that was not met before."""
    if issubclass(kind, torch.Tensor):
        taker: _Taker = _outer
    elif issubclass(kind, (torch.ScriptObject, torch.Generator, torch.UntypedStorage, torch.TypedStorage)):
        taker = _another_each_time
    else:
        taker = _setting
    return _TAKERS.setdefault(kind, taker)


class Outers:
    """Tensors from outside, for one step: between steps they may change.

    A single number in the CPU's memory that the runner never got is the host's: an optimizer counts its steps there.
    Operations on such numbers alone run at once in Python, and the runner gets copies. If it has to write one, it owns
    that number from then on.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self._known: dict[int, Outer] = {}
        self._owned: dict[int, Any] = {}
        # Whether Python got hold of the memory of any value.
        self.lent = False

    def forget(self) -> None:
        self._known.clear()
        if len(self._owned) > 1000:
            self._owned = {address: weak for address, weak in self._owned.items() if not weak.expired()}

    def of(self, tensor: torch.Tensor) -> Outer:
        # The entry keeps the tensor, so that no other one gets its identity.
        outer = self._known.get(id(tensor))
        if outer is None:
            outer = self._known[id(tensor)] = self._look(tensor)
        return outer

    def _look(self, tensor: torch.Tensor) -> Outer:
        if not is_plain(tensor):
            return Outer(tensor, ("other", tensor.layout, tensor.dtype), False)
        form = form_of(tensor)
        storage = _storage(tensor)
        is_single = form.device.type == "cpu" and storage.nbytes() == tensor.element_size()
        if is_single and form.shape == () and storage._cdata not in self._owned:
            return Outer(tensor, form, True, True, True)
        return Outer(tensor, form, True, is_single, False, has_shared_memory(tensor))

    def own(self, outer: Outer) -> None:
        """Give this tensor itself to the runner."""
        storage = _storage(outer.tensor) if outer.is_single else None
        if storage is not None and storage._cdata not in self._owned:
            self._owned[storage._cdata] = torch.multiprocessing.reductions.StorageWeakRef(storage)
            self._known = {key: known for key, known in self._known.items() if not known.is_host}


def _storage(tensor: torch.Tensor) -> Any:
    base: Any = torch._C.TensorBase
    return base.untyped_storage(tensor)


def rebuilt(value: Any, tensor: Any) -> Any:
    """Return the arguments with every tensor replaced."""
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, (list, tuple)):
        return [rebuilt(element, tensor) for element in value]
    return value


class Outputs(NamedTuple):
    """What an operation makes: one tensor if `is_one`, otherwise a sequence of them.

    `outputs` has, of each, its form, or the number of the tensor argument that it is, or None if it is no tensor.
    """

    outputs: tuple[Form | int | None, ...]
    is_one: bool


def run_below(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation below autograd, which has seen it."""
    with below_autograd():
        return operation(*args, **kwargs)


def values(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments with their placeholders' values, waited for."""
    return rebuilt(args, plain), {name: rebuilt(value, plain) for name, value in kwargs.items()}


def _outputs(result: Any) -> list[torch.Tensor | None] | None:
    """Return the tensors that an operation made, or None if it made anything else."""
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    are_tensors = all(isinstance(output, torch.Tensor) for output in outputs if output is not None)
    return outputs if are_tensors and result is not None else None


class Results:
    """Results of one session. `known`: by `Call.result_key`, what an operation makes."""

    def __init__(self, owner: Owner, outers: Outers) -> None:
        self.known: dict[Any, Outputs] = {}
        self._owner, self._outers = owner, outers

    def hand_out(self, call: Call, result: Any) -> Any:
        self._own(call)
        is_one = isinstance(result, torch.Tensor)
        outputs = _outputs(result)
        if outputs is None:
            if result is None:
                self._remember(call, Outputs((), False))
            return result
        arguments = {id(value_of(source)): place for place, source in reversed(list(enumerate(call.sources)))}
        pairs = [self._one(call, output, arguments) for output in outputs]
        if all(output is None or is_plain(output) for output in outputs):
            self._remember(call, Outputs(tuple(form for _, form in pairs), is_one))
        return pairs[0][0] if is_one else [handed for handed, _ in pairs]

    def _one(
        self, call: Call, output: torch.Tensor | None, arguments: Mapping[int, int]
    ) -> tuple[Any, Form | int | None]:
        """Return an output as the program gets it, and its form or the number of the argument that it is."""
        if output is None or not is_plain(output) or (call.function.makes_sizes and output.dtype == torch.int64):
            return output, None
        place = arguments.get(id(output))
        if place is None:
            form = form_of(output)
            return Placeholder(Cell(self._owner, form, output, has_shared_memory(output))), form
        argument = call.tensors[place]
        if isinstance(argument, Placeholder) and argument.cell.form != form_of(output):
            argument.become(Cell(self._owner, form_of(output), output, argument.cell.is_shared))
        return argument, place

    def _own(self, call: Call) -> None:
        """Own the tensors from outside, as if the runner got them."""
        for source in call.sources:
            if not isinstance(source, Outer) or source.is_shared:
                continue
            if not source.is_host or any(source is written for written in call.written):
                self._outers.own(source)

    def _remember(self, call: Call, made: Outputs) -> None:
        still = all(
            form_of(value_of(source)) == form
            for source, form in zip(call.sources, call.forms, strict=True)
            if isinstance(form, Form)
        )
        if not call.is_awaited and not call.function.moves and still:
            self.known.setdefault(call.result_key(), made)
