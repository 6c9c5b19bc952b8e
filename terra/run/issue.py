"""Take an operation apart as it is issued. In: a function of torch with its arguments. Out: a `Call`: template, leaves, key of its result.

The template is what of the arguments never changes where they are issued: settings, types of numbers, how lists are built. Numbers are fed
and never compared. What an operation makes is known of the forms of its tensors and of its integers, for these may be sizes; of floats
only where they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from terra.run.cell import Cell, Placeholder, form_of, has_shared_memory, is_plain

# Floats that decide how much is made.
_SIZED_BY_FLOATS = ("arange", "range", "linspace", "logspace", "upsample", "_upsample")
# Sizes come from the data, which not every one of them declares.
_SIZED_BY_DATA = frozenset(
    {"_pack_padded_sequence", "_pad_packed_sequence", "bincount", "histogramdd", "unique_dim", "_unique2", "unique_consecutive"}
)
_BESIDE = frozenset({"profiler", "inductor", "prim"})
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
_NUMBERS = frozenset({int, float, complex})


class Tensor:
    """In a template: a tensor stands here."""


class Function:
    """What is known of one of torch's operations."""

    def __init__(self, operation: Any) -> None:
        schema = operation._schema
        name = operation.overloadpacket.__name__ if hasattr(operation, "overloadpacket") else str(operation)
        tags = getattr(operation, "tags", ())
        self.operation = operation
        self.is_beside = operation.namespace in _BESIDE
        self.is_lift = name == "lift_fresh"
        self.is_random = torch.Tag.nondeterministic_seeded in tags
        # What it makes is known only when it has run; of an index only if it is a mask.
        self.is_index = name in ("index", "_unsafe_index")
        self.is_awaited = (
            operation.namespace in _COLLECTIVES
            or name in _SIZED_BY_DATA
            or (torch.Tag.dynamic_output_shape in tags and not self.is_index)
            or torch.Tag.data_dependent_output in tags
            or any("Tensor" not in str(each.type) for each in schema.returns)
        )
        self.moves = torch.Tag.inplace_view in tags
        self.writes = frozenset(each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write)
        self.makes_views = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        self.names = tuple(each.name for each in schema.arguments)
        # A number where a tensor or any number may stand is no size.
        self._sizes = frozenset(each.name for each in schema.arguments if "int" in str(each.type).lower())
        self.floats_count = name.startswith(_SIZED_BY_FLOATS)

    def counts(self, name: str) -> bool:
        """Whether the integers of this argument may be sizes."""
        return self.floats_count or name in self._sizes


class Outer(NamedTuple):
    """A tensor that no operation of the session made. `is_host`: one number of the CPU, which Python computes itself; `is_single`: its
    memory holds no more than such a number.
    """

    tensor: torch.Tensor
    form: Any
    is_plain: bool
    is_single: bool = False
    is_host: bool = False
    is_shared: bool = False


class Leaf(NamedTuple):
    """A tensor among the arguments: the placeholder's cell, or the one from outside."""

    tensor: torch.Tensor
    source: Cell | Outer
    is_written: bool


class Call:
    """`leaves` are tensors, as `Leaf`, and numbers, in order."""

    __slots__ = ("forms", "function", "has_shared", "is_awaited", "is_host", "leaves", "num_positional", "sizes", "template")

    def __init__(self, function: Function, outers: Outers, args: Any, kwargs: Any) -> None:
        self.function = function
        self.leaves: list[Any] = []
        self.forms: list[Any] = []
        self.sizes: list[Any] = []
        self.is_awaited = function.is_awaited
        self.is_host, self.has_shared = True, False
        self.num_positional = len(args)
        template = [self._part(each, name, outers) for each, name in zip(args, function.names, strict=False)]
        for name, each in kwargs.items():
            template += name, self._part(each, name, outers)
        self.template = tuple(template)
        self.is_host = self.is_host and bool(self.forms)

    def _part(self, value: Any, name: str, outers: Outers) -> Any:
        kind = type(value)
        if kind is Placeholder:
            cell = value.cell
            self.is_host = False
            if cell.owner is not outers.owner:
                cell.fetch()
            if outers.lent and cell.value is not None and not cell.is_shared:
                cell.is_shared = has_shared_memory(cell.value)
            self.has_shared = self.has_shared or cell.is_shared
            return self._tensor(Leaf(value, cell, name in self.function.writes), cell.form)
        if kind in _NUMBERS:
            self.leaves.append(value)
            if self.function.counts(name) and (kind is int or self.function.floats_count):
                self.sizes.append(value)
            return kind
        if kind is list or kind is tuple:
            return ("[", *(self._part(each, name, outers) for each in value))
        if isinstance(value, torch.Tensor):
            outer = outers.of(value)
            self.is_host = self.is_host and outer.is_host
            self.is_awaited = self.is_awaited or not outer.is_plain
            self.has_shared = self.has_shared or outer.is_shared
            return self._tensor(Leaf(value, outer, name in self.function.writes), outer.form)
        if isinstance(value, (torch.ScriptObject, torch.Generator, torch.UntypedStorage, torch.TypedStorage)):
            # Process groups and the like are other objects each time; a generator is read behind our back.
            self.is_awaited, self.is_host = True, False
            return kind
        return value

    def _tensor(self, leaf: Leaf, form: Any) -> type[Tensor]:
        self.leaves.append(leaf)
        self.forms.append(form)
        if self.function.is_index and leaf.tensor.dtype in (torch.bool, torch.uint8) and len(self.forms) > 1:
            self.is_awaited = True
        return Tensor

    @property
    def reaches_shared(self) -> bool:
        """Whether it writes memory that Python may have too, or makes a view of it: then it must be that memory and no copy of it."""
        return self.has_shared and (
            self.function.makes_views or any(type(leaf) is Leaf and leaf.is_written and leaf.source.is_shared for leaf in self.leaves)
        )

    @property
    def result_key(self) -> tuple[Any, ...]:
        return self.function, self.template, tuple(self.forms), tuple(self.sizes)


class Outers:
    """What is known of tensors from outside; of a step, for between steps they may change.

    A single number in the CPU's memory that the runner never got is the host's: an optimizer counts its steps there. What is done with
    such numbers alone Python does at once, and the runner gets copies. When it has to write one, it has it from then on.
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
        found = self._known.get(id(tensor))
        if found is None:
            found = self._known[id(tensor)] = self._look(tensor)
        return found

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
        """The runner gets this tensor itself."""
        if not outer.is_single:
            return
        storage = _storage(outer.tensor)
        if storage._cdata in self._owned:
            return
        self._owned[storage._cdata] = torch.multiprocessing.reductions.StorageWeakRef(storage)
        for known in [each for each in self._known.values() if each.is_host]:
            del self._known[id(known.tensor)]


def _storage(tensor: torch.Tensor) -> Any:
    base: Any = torch._C.TensorBase
    return base.untyped_storage(tensor)


def rebuilt(value: Any, tensor: Any) -> Any:
    """Arguments with every tensor replaced."""
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, (list, tuple)):
        return [rebuilt(each, tensor) for each in value]
    return value
