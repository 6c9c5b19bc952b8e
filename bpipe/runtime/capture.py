"""The storages that one micro-batch's forward saved for its backward, and which of them may leave.

The graph is walked; `torch.autograd.graph.saved_tensors_hooks` is not used. A hook gives a custom Function a new tensor
instead of a Parameter that it saved, without attributes such as `main_grad`; and hooks shadow one another. Storages are
resized in place instead, so autograd's own tensors keep their identity.

If a wrapper tells in which plain tensors it keeps its bytes (`__tensor_flatten__`), as quantised tensors and DTensors
do, these are considered: they may leave if only the graph holds the wrapper, and only the wrapper holds them.

A storage may leave only if it is on the device that computes and is used only by this micro-batch's graph, or by the
loop that keeps the graph in pieces (`graph.Pieces`). Three counts show that, and each catches what the others cannot:
  [1] the storage is used by exactly the tensors the walk found saved (a parameter, a view kept elsewhere: one more);
  [2] none of those tensors is held by Python code too (a cached mask or rotary table: the very tensor that was saved);
  [3] no other micro-batch saved it (two graphs sharing what nobody else holds).

The whole walk (`find`) takes about 10 microseconds of the main thread per node, before the next kernels are launched. So of a
stage's later micro-batches `Retrace` compares only the kinds of nodes, and reads only the tensors that leave. They have to
pass [1] and [2] again; [3] is the caller's. If a micro-batch saved more than the recorded one, the rest stays.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bpipe.runtime.graph import (
    PLAIN,
    STASH,
    Holders,
    Regions,
    is_plain,
    nodes_of,
    payloads_of,
    saved_names,
    saved_tensors,
)


class SavedStorage(NamedTuple):
    """One storage of a micro-batch."""

    storage: torch.UntypedStorage

    nbytes: int

    alone: bool
    """False if somebody else holds it too, by [1] or [2], or if it is not on the device."""

    kind: str = ""
    """The kind of the node that saved it as its own output, or of the first node that the walk came to."""

    tensor: tuple[torch.dtype, torch.Size] | None = None
    """Type and shape of the first tensor."""

    def __str__(self) -> str:
        dtype, shape = self.tensor or (torch.uint8, torch.Size((self.nbytes,)))
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}, saved by {self.kind}"


class Place(NamedTuple):
    """Position of a saved tensor: the node in the order of the walk, its attribute, the index in that, and whether it
    is the base of the tensor there."""

    node: int
    name: str
    position: int
    of_base: bool = False


# Not wrapped in a function, because it is called for hundreds of tensors.
num_python_holders = sys.getrefcount


@dataclass(slots=True)
class Uses:
    """Uses of one storage."""

    storage: torch.UntypedStorage
    kind: str
    tensor: tuple[torch.dtype, torch.Size]
    """Type and shape of the first tensor; not the tensor itself, because holders are counted."""

    originals: list[torch.Tensor] = field(default_factory=list)
    """The tensors by which the graph uses it."""

    saved: set[int] = field(default_factory=set)
    """Ids of tensors that autograd holds."""

    stashed: Counter[int] = field(default_factory=Counter)
    """By a tensor's id, how often a compiled Function's list holds it."""

    wrapped: dict[int, int] = field(default_factory=dict)
    """By a payload's id, the id of the wrapper that the graph holds instead."""

    copies: list[Place] = field(default_factory=list)
    """Places where every unpacking makes a new tensor."""

    places: list[Place] = field(default_factory=list)
    """The first place of each original."""

    unplaced: bool = False
    """Whether an original has no place, as what recomputed regions keep."""

    @property
    def expected(self) -> int:
        """Number of uses of the storage if only the graph and the caller have it."""
        return len(self.originals) + len(self.copies) + 1

    def add(self, tensor: torch.Tensor, stashed: bool, place: Place | None) -> None:
        if not any(tensor is original for original in self.originals):
            self.originals.append(tensor)
            if place is None:
                self.unplaced = True
            else:
                self.places.append(place)
        if stashed:
            self.stashed[id(tensor)] += 1
        else:
            self.saved.add(id(tensor))

    def holders(self, tensor: torch.Tensor) -> int:
        """Return the reference count of this tensor if only the graph holds it, or its wrapper."""
        if id(tensor) in self.wrapped:
            return _HOLDERS_OF_WRAPPED
        stashed = self.stashed[id(tensor)]
        if not stashed:
            return _HOLDERS_OF_SAVED
        return stashed - 1 + (_HOLDERS_OF_BOTH if id(tensor) in self.saved else _HOLDERS_OF_STASHED)


def find(
    roots: Sequence[Any], inputs: Sequence[torch.Tensor | None], device: torch.device, held: Sequence[torch.Tensor] = ()
) -> tuple[SavedStorage, ...]:
    """Return every storage saved in a graph once, in a fixed order. It takes a few microseconds per node.

    Args:
        roots: The autograd nodes at which the graph ends.
        inputs: Tensors that the pipeline loop holds but never reads again, what the stage received: that it holds them
            does not count.
        device: Only what is on it can be alone.
        held: Those of a graph in pieces (`Pieces.held`), which count as often as they are in there.

    Raises:
        RuntimeError: Torch's own, for a graph whose backward has run.
        ValueError: For tensors saved through hooks other than those of `torch.utils.checkpoint`.
    """
    uses, wrappers = collect(roots)
    elsewhere = _held_elsewhere(wrappers)
    holders = Holders(held, inputs)
    return tuple(_judge(use, inputs, device, elsewhere, holders) for use in uses.values())


def collect(roots: Sequence[Any]) -> tuple[dict[int, Uses], dict[int, torch.Tensor]]:
    """Return the uses of every storage in a graph, and all wrappers that were saved instead of their payloads, by id.

    A function of its own, because its locals hold tensors and `_judge` counts holders.
    """
    uses: dict[int, Uses] = {}
    wrappers: dict[int, torch.Tensor] = {}
    regions = Regions()
    for number, node in enumerate(nodes_of(roots)):
        for name in saved_names(type(node)):
            if regions.recomputes(node, name):
                continue
            again = list(saved_tensors(node, name))
            for position, tensor in enumerate(saved_tensors(node, name)):
                if not is_plain(tensor):
                    own_output = tensor is not again[position]
                    _add_wrapper(
                        uses, wrappers, tensor, node.name(), Place(number, name, position) if own_output else None
                    )
                    continue
                storage = tensor.untyped_storage()
                use = uses.get(storage._cdata)
                if use is None:
                    use = uses[storage._cdata] = Uses(storage, node.name(), (tensor.dtype, tensor.shape))
                place = Place(number, name, position)
                if tensor is not again[position]:
                    # Saved as the node's own output: every unpacking makes a new tensor, and the graph holds one.
                    use.copies.append(place)
                    use.kind = node.name()
                else:
                    use.add(tensor, name == STASH, place)
                    # A view keeps its base alive, which uses the storage too.
                    if tensor._base is not None:
                        use.add(tensor._base, False, place._replace(of_base=True))
    _add_regions(uses, wrappers, regions)
    return uses, wrappers


def _add_regions(uses: dict[int, Uses], wrappers: dict[int, torch.Tensor], regions: Regions) -> None:
    """Add what recomputed regions keep for that."""
    for tensor, stashed in regions.tensors():
        if is_plain(tensor):
            storage = tensor.untyped_storage()
            use = uses.setdefault(storage._cdata, Uses(storage, "checkpoint", (tensor.dtype, tensor.shape)))
            use.add(tensor, stashed, None)
            if tensor._base is not None:
                use.add(tensor._base, False, None)
        else:
            _add_wrapper(uses, wrappers, tensor, "checkpoint")


def _add_wrapper(
    uses: dict[int, Uses],
    wrappers: dict[int, torch.Tensor],
    wrapper: torch.Tensor,
    kind: str,
    own_output: Place | None = None,
) -> None:
    """Add the payloads of a wrapper and of its base.

    `own_output`: where a node saved its own output; every unpacking makes a new wrapper, and the graph holds one.
    """
    for holder in (wrapper,) if wrapper._base is None else (wrapper, wrapper._base):
        for payload in payloads_of(holder):
            inside = payload.untyped_storage()
            use = uses.setdefault(inside._cdata, Uses(inside, kind, (payload.dtype, payload.shape)))
            if own_output is not None:
                use.copies.append(own_output)
                use.unplaced = True
                continue
            wrappers[id(holder)] = holder
            if id(payload) not in use.wrapped:
                use.originals.append(payload)
                use.wrapped[id(payload)] = id(holder)
            if payload._base is not None:
                # A wrapper made of a plain tensor (DTensor.from_local) holds a view of it.
                use.add(payload._base, False, None)


def _held_elsewhere(wrappers: dict[int, torch.Tensor]) -> set[int]:
    """Return the ids of wrappers that somebody besides the graph holds. Empties `wrappers`, which must hold them alone."""
    elsewhere = set()
    while wrappers:
        number, wrapper = wrappers.popitem()
        if num_python_holders(wrapper) > _HOLDERS_OF_SAVED:
            elsewhere.add(number)
    return elsewhere


def _judge(
    use: Uses, inputs: Sequence[torch.Tensor | None], device: torch.device, elsewhere: Collection[int], holders: Holders
) -> SavedStorage:
    storage, originals = use.storage, use.originals
    expected = use.expected + holders.num_others(storage, [*map(id, originals)])
    use.originals = []
    alone = num_storage_uses(storage) == expected and not any(
        wrapper in elsewhere for wrapper in use.wrapped.values()
    )  # [1]
    while originals:
        tensor = originals.pop()
        allowed = use.holders(tensor) + holders.references(tensor)
        if num_python_holders(tensor) > allowed and not any(tensor is received for received in inputs):  # [2]
            alone = False
    # A device without an index is whichever of its type computes, and there is one CPU, whatever index a mesh gives it.
    is_here = storage.device.type == device.type and (
        device.type == "cpu" or device.index in (None, storage.device.index)
    )
    return SavedStorage(storage, storage.nbytes(), alone and storage.resizable() and is_here, use.kind, use.tensor)


def num_storage_uses(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def only_holder(tensor: torch.Tensor) -> bool:
    """Whether only this tensor uses its storage, so that its bytes go with it."""
    storage = tensor.untyped_storage()
    return num_storage_uses(storage) == 2  # the tensor and our own hold


def _measure_holders(saved: bool, stashed: bool) -> int:
    """Return the reference count of a tensor that only the graph holds, as `_judge` sees it. It depends on the versions
    of torch and Python."""

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            kept = x * 2
            if saved:
                ctx.save_for_backward(kept)
            setattr(ctx, STASH, [kept] if stashed else [])
            return x * 3

    # Kept, because torch 2.11 drops what a Function saved with its last output, even if the node is still there.
    output = cast(Any, Keeping.apply(torch.ones(1, requires_grad=True)))
    node = output.grad_fn
    originals = [*(node.saved_tensors or getattr(node, STASH))]
    tensor = originals.pop()
    return num_python_holders(tensor)


def _measure_wrapped() -> int:
    """Return the same of a payload that only its wrapper holds."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls: type[Wrapper], payload: torch.Tensor) -> Wrapper:
            wrapper: Wrapper = torch.Tensor._make_wrapper_subclass(cls, payload.shape)
            wrapper.payload = payload  # type: ignore[attr-defined]
            return wrapper

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            raise NotImplementedError(f"{function} of what is only held")

    payloads = [Wrapper(torch.ones(1))]
    originals = [cast(Any, payloads[0]).payload]
    tensor = originals.pop()
    return num_python_holders(tensor)


_HOLDERS_OF_SAVED = _measure_holders(saved=True, stashed=False)
_HOLDERS_OF_STASHED = _measure_holders(saved=False, stashed=True)
_HOLDERS_OF_WRAPPED = _measure_wrapped()
_HOLDERS_OF_BOTH = _measure_holders(saved=True, stashed=True)


class Claims:
    """Remembers which micro-batch saved which storage, to find one that two of them saved: rule [3].

    A storage that may die while it is claimed has a weak reference, which takes a microsecond to make. What leaves is
    held by its evictor until its backward, so its address is enough.
    """

    def __init__(self) -> None:
        self._owners: dict[int, tuple[StorageWeakRef, Hashable]] = {}
        self._held: dict[Hashable, frozenset[int]] = {}

    def claim(self, storages: Sequence[torch.UntypedStorage], microbatch: Hashable) -> list[bool]:
        """Return of each storage whether no other micro-batch saved it, and claim it for this one."""
        held = frozenset[int]().union(*self._held_by_others(microbatch))
        own = []
        for storage in storages:
            address = storage._cdata
            owner = self._owners.get(address)
            if address not in held and (owner is None or owner[0].expired()):
                owner = self._owners[address] = StorageWeakRef(storage), microbatch
            own.append(address not in held and owner is not None and owner[1] == microbatch)
        return own

    def hold(self, addresses: frozenset[int], microbatch: Hashable) -> bool:
        """Claim storages that the caller holds until `release`. Return False, and claim none, if another micro-batch has
        one of them."""
        claimed = (self._owners[address] for address in self._owners.keys() & addresses)
        if any(owner != microbatch and not reference.expired() for reference, owner in claimed):
            return False
        if not all(map(addresses.isdisjoint, self._held_by_others(microbatch))):
            return False
        self._held[microbatch] = addresses
        return True

    def release(self, microbatch: Hashable) -> None:
        """Give up what a micro-batch holds, because its backward is about to run."""
        self._held.pop(microbatch, None)

    def clear(self) -> None:
        """Forget everything: a new iteration's micro-batches have the old numbers."""
        self._owners.clear()
        self._held.clear()

    def _held_by_others(self, microbatch: Hashable) -> list[frozenset[int]]:
        return [held for owner, held in self._held.items() if owner != microbatch]


# A tensor that every access makes anew has no holders to count.
_MADE_ANEW = 1 << 30


class _Pick(NamedTuple):
    """One tensor: the index of the attribute that is read, the position in it if it holds several, and whether it is
    the base of the tensor there."""

    attribute: int
    position: int | None
    of_base: bool


class _Entry(NamedTuple):
    """One storage that leaves: the most Python references of each of its tensors, the last pick first, and its uses."""

    max_holders: tuple[int, ...]
    num_uses: int


class Retrace:
    """Recorded positions of the storages that leave, of one stage's micro-batches.

    `kinds` are those of all nodes, in the order of the walk; `attributes` name a node by its index in it.
    """

    def __init__(
        self,
        kinds: tuple[type, ...],
        attributes: Sequence[tuple[int, str]],
        picks: Sequence[_Pick],
        entries: Sequence[_Entry],
    ) -> None:
        self._kinds, self._attributes, self._picks = kinds, attributes, picks
        self._backwards = tuple(reversed(entries))

    @staticmethod
    def of(roots: Sequence[Any], leaving: Sequence[torch.UntypedStorage]) -> Retrace | None:
        """Record where these storages are saved; None if one is inside a wrapper or in a recomputed region."""
        uses, wrappers = collect(roots)
        wrappers.clear()
        chosen = [uses[storage._cdata] for storage in leaving]
        if any(use.wrapped or use.unplaced for use in chosen):
            return None
        nodes = list(nodes_of(roots))
        attributes: dict[tuple[int, str], int] = {}
        picks = []
        for place in (place for use in chosen for place in (*use.places, *use.copies)):
            attribute = attributes.setdefault((place.node, place.name), len(attributes))
            several = isinstance(getattr(nodes[place.node], place.name), (tuple, list))
            picks.append(_Pick(attribute, place.position if several else None, place.of_base))
        holders = [(*map(use.holders, use.originals), *[_MADE_ANEW] * len(use.copies)) for use in chosen]
        entries = [_Entry(counts[::-1], use.expected) for counts, use in zip(holders, chosen, strict=True)]
        return Retrace(tuple(map(type, nodes)), list(attributes), picks, entries)

    def find(
        self, roots: Sequence[Any], inputs: Sequence[torch.Tensor | None], held: Sequence[torch.Tensor] = ()
    ) -> list[torch.UntypedStorage] | None:
        """Return the storages of another micro-batch in the recorded order; `inputs` and `held` as in
        `capture.find`."""
        nodes = list(nodes_of(roots))
        if tuple(map(type, nodes)) != self._kinds:
            return None
        tensors = _tensors([getattr(nodes[node], name, None) for node, name in self._attributes], self._picks)
        return _storages_of(tensors, self._backwards, inputs, Holders(held, inputs))


def _tensors(values: list[Any], picks: Sequence[_Pick]) -> list[Any]:
    """Return the picked tensors of the attributes' values. Nothing else may hold them, because holders are counted."""
    picked = []
    for attribute, position, of_base in picks:
        value = values[attribute]
        if position is not None:
            value = value[position] if isinstance(value, (tuple, list)) and position < len(value) else None
        picked.append(getattr(value, "_base", None) if of_base else value)
    return picked


def _storages_of(
    tensors: list[Any], backwards: Sequence[_Entry], inputs: Sequence[torch.Tensor | None], holders: Holders
) -> list[torch.UntypedStorage] | None:
    """Take all tensors from the end of the list, and return the storages of these entries, if each is one and nobody
    else has it or its tensors."""
    storages = []
    for max_holders, num_uses in backwards:
        own: torch.UntypedStorage | None = None
        ids = []
        for allowed in max_holders:
            tensor = tensors.pop()
            if type(tensor) not in PLAIN:
                return None
            if num_python_holders(tensor) > allowed + holders.references(tensor) and not any(
                tensor is received for received in inputs
            ):  # [2]
                return None
            ids.append(id(tensor))
            storage = tensor.untyped_storage()
            if own is not None and storage._cdata != own._cdata:
                return None
            own = storage
        # A tensor that was made by reading it would count, and so would a second reference of ours.
        del tensor, storage
        if own is None or num_storage_uses(own) != num_uses + holders.num_others(own, ids):  # [1]
            return None
        storages.append(own)
    storages.reverse()
    return storages
