"""Find the storages one micro-batch's forward saved for its backward, and say which of them may leave.

In: the autograd nodes of a stage's outputs. Out: the storages, each once, in a fixed order. Knows no schedule and moves
nothing.

The graph is walked; `torch.autograd.graph.saved_tensors_hooks` is not used. A hook hands a custom Function a new tensor
where it saved a Parameter, and attributes such as `main_grad` are gone; and hooks shadow one another. Storages are
resized in place instead, so autograd's own tensors keep their identity.

Of a wrapper that says in which plain tensors it keeps its bytes (`__tensor_flatten__`), as quantised tensors and DTensors
do, these are looked at: they may leave if nobody but the graph holds the wrapper, and nobody but the wrapper them.

A storage may leave only if it lies on the device that computes and nobody but this micro-batch's graph can see it, or
the loop that keeps the graph in pieces (`pieces`). Three counts say so, and each catches what the others cannot:
  [1] the storage is used by exactly the tensors the walk found saved (a parameter, a view kept elsewhere: one more);
  [2] none of those tensors is held by Python code too (a cached mask or rotary table: the very tensor that was saved);
  [3] no other micro-batch saved it (two graphs sharing what nobody else holds).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bpipe.runtime.checkpoints import Regions
from bpipe.runtime.graph import STASH, is_plain, nodes_of, payloads_of, saved_names, saved_tensors
from bpipe.runtime.graph_pieces import Holders


class SavedStorage(NamedTuple):
    """One storage of a micro-batch.

    `alone` is False where somebody else holds it too, by [1] or [2], or it is not the device's to move.

    `kind` is the kind of the node that saved it as its own output, or else of the first that the walk came to; `tensor`
    is the first tensor.
    """

    storage: torch.UntypedStorage
    nbytes: int
    alone: bool
    kind: str = ""
    tensor: tuple[torch.dtype, torch.Size] | None = None

    def __str__(self) -> str:
        dtype, shape = self.tensor or (torch.uint8, torch.Size((self.nbytes,)))
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}, saved by {self.kind}"


class Place(NamedTuple):
    """Position of a saved tensor: the node in the order of the walk, its attribute, which tensor in that, or that
    one's base."""

    node: int
    name: str
    position: int
    of_base: bool = False


# Not wrapped: whoever looks at hundreds of tensors pays for every call.
num_python_holders = sys.getrefcount


class Uses:
    """Uses of one storage: the tensors by which the graph uses it, and how many were unpacked from copies.

    `places` are the first of each original; what regions that are computed again keep has none: `unplaced`. `saved` and
    `stashed` count, by a tensor's id, how often autograd and a compiled Function's list hold it; `wrapped` holds, by
    their payload's id, the ids of wrappers that the graph holds in its place.
    """

    __slots__ = (
        "copies",
        "kind",
        "originals",
        "places",
        "saved",
        "stashed",
        "storage",
        "tensor",
        "unplaced",
        "wrapped",
    )

    def __init__(self, storage: torch.UntypedStorage, kind: str, first: torch.Tensor) -> None:
        self.storage = storage
        self.kind = kind
        # Not the tensor itself: holders are counted.
        self.tensor = first.dtype, first.shape
        self.originals: list[torch.Tensor] = []
        self.saved: set[int] = set()
        self.stashed: Counter[int] = Counter()
        self.wrapped: dict[int, int] = {}
        self.copies: list[Place] = []
        self.places: list[Place] = []
        self.unplaced = False

    @property
    def expected(self) -> int:
        """Number of uses of the storage where only the graph and the caller have it."""
        return len(self.originals) + len(self.copies) + 1

    def add(self, tensor: torch.Tensor, stashed: bool, place: Place | None) -> None:
        if not any(tensor is known for known in self.originals):
            self.originals.append(tensor)
            if place is None:
                self.unplaced = True
            else:
                self.places.append(place)
        if stashed:
            self.stashed[id(tensor)] += 1
        else:
            self.saved.add(id(tensor))

    def add_wrapped(self, payload: torch.Tensor, wrapper: int) -> None:
        if id(payload) not in self.wrapped:
            self.originals.append(payload)
            self.wrapped[id(payload)] = wrapper

    def holders(self, tensor: torch.Tensor) -> int:
        """Return the reference count of this tensor where nobody but the graph holds it, or its wrapper."""
        if id(tensor) in self.wrapped:
            return _HOLDERS_OF_WRAPPED
        stashed = self.stashed[id(tensor)]
        if not stashed:
            return _HOLDERS_OF_SAVED
        return stashed - 1 + (_HOLDERS_OF_BOTH if id(tensor) in self.saved else _HOLDERS_OF_STASHED)


def find(
    roots: Sequence[Any],
    inputs: Sequence[torch.Tensor | None],
    device: torch.device,
    held: Sequence[torch.Tensor] = (),
) -> tuple[SavedStorage, ...]:
    """Return every storage saved in the graph behind `roots` (autograd nodes), each once; only what lies on `device`
    can be alone.

    `inputs` are tensors the pipeline loop itself holds but never reads again, the stage's received input: being held by
    it does not count. `held` are those of a graph in pieces (`Pieces.held`), which count as often as they stand there.
    Cost: a few microseconds a node. A graph whose backward ran already raises torch's own error, one
    that saved through hooks other than those of `torch.utils.checkpoint` ValueError.
    """
    uses, wrappers = collect(roots)
    elsewhere = _held_elsewhere(wrappers)
    holders = Holders(held, inputs)
    return tuple(_judge(use, inputs, device, elsewhere, holders) for use in uses.values())


def collect(roots: Sequence[Any]) -> tuple[dict[int, Uses], dict[int, torch.Tensor]]:
    """Return the uses of every storage behind `roots`, and all wrappers that were saved in place of their payloads, by
    their ids.

    A function of its own: its locals hold tensors, and `_judge` counts holders.
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
                    use = uses[storage._cdata] = Uses(storage, node.name(), tensor)
                place = Place(number, name, position)
                if tensor is not again[position]:
                    # Saved as the node's own output: every unpacking makes a new tensor, the graph holds one.
                    use.copies.append(place)
                    use.kind = node.name()
                else:
                    use.add(tensor, name == STASH, place)
                    # A view keeps the tensor it is a view of alive, and that one uses the storage too.
                    if tensor._base is not None:
                        use.add(tensor._base, False, place._replace(of_base=True))
    _add_regions(uses, wrappers, regions)
    return uses, wrappers


def _add_regions(uses: dict[int, Uses], wrappers: dict[int, torch.Tensor], regions: Regions) -> None:
    """Note what regions that are computed again keep for that."""
    for tensor, stashed in regions.tensors():
        if is_plain(tensor):
            storage = tensor.untyped_storage()
            use = uses.setdefault(storage._cdata, Uses(storage, "checkpoint", tensor))
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
    """Note the payloads of a wrapper, and of the one that it is a view of.

    `own_output`: where a node saved its own output; of that every unpacking makes a new wrapper, the graph holds one.
    """
    for each in (wrapper,) if wrapper._base is None else (wrapper, wrapper._base):
        for payload in payloads_of(each):
            inside = payload.untyped_storage()
            use = uses.setdefault(inside._cdata, Uses(inside, kind, payload))
            if own_output is not None:
                use.copies.append(own_output)
                use.unplaced = True
                continue
            wrappers[id(each)] = each
            use.add_wrapped(payload, id(each))
            if payload._base is not None:
                # A wrapper made of a plain tensor (DTensor.from_local) holds a view of it.
                use.add(payload._base, False, None)


def _held_elsewhere(wrappers: dict[int, torch.Tensor]) -> set[int]:
    """Return the storages that somebody besides the graph holds.

    Nobody else may hold `wrappers`, which are gone afterwards.
    """
    found = set()
    while wrappers:
        number, wrapper = wrappers.popitem()
        if num_python_holders(wrapper) > _HOLDERS_OF_SAVED:
            found.add(number)
    return found


def _judge(
    use: Uses,
    inputs: Sequence[torch.Tensor | None],
    device: torch.device,
    elsewhere: Collection[int],
    holders: Holders,
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
        if num_python_holders(tensor) > allowed and not any(tensor is known for known in inputs):  # [2]
            alone = False
    movable = alone and storage.resizable() and _on(device, storage)
    return SavedStorage(storage, storage.nbytes(), movable, use.kind, use.tensor)


def _on(device: torch.device, storage: torch.UntypedStorage) -> bool:
    """Return whether a device is meant by another: one without an index is whichever of its type computes, and of
    CPUs there is one, whatever index a mesh gives it."""
    same_type = storage.device.type == device.type
    return same_type and (device.type == "cpu" or device.index in (None, storage.device.index))


def num_storage_uses(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def only_holder(tensor: torch.Tensor) -> bool:
    """Return whether nothing but this tensor uses its storage: once it is gone, so are its bytes."""
    storage = tensor.untyped_storage()
    return num_storage_uses(storage) == 2  # the tensor and our own hold


def _measure_holders(saved: bool, stashed: bool) -> int:
    """Return the reference count of a tensor that only the graph holds, as `_judge` sees it; it depends on torch and
    Python versions."""

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            kept = x * 2
            if saved:
                ctx.save_for_backward(kept)
            setattr(ctx, STASH, [kept] if stashed else [])
            return x * 3

    # Kept: torch 2.11 lets go of what a Function saved with the last tensor that came out of it, whoever still has the
    # node.
    output = cast(Any, Keeping.apply(torch.ones(1, requires_grad=True)))
    node = output.grad_fn
    originals = [*(node.saved_tensors or getattr(node, STASH))]
    tensor = originals.pop()
    return num_python_holders(tensor)


def _measure_wrapped() -> int:
    """The same of a payload that only its wrapper holds."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls: type[Wrapper], payload: torch.Tensor) -> Wrapper:
            made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, payload.shape)
            made.payload = payload  # type: ignore[attr-defined]
            return made

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
    """Remembers which micro-batch saved which storage, to notice one that two of them saved: rule [3].

    What may die while it is claimed is known by a weak reference, which takes a microsecond to make. What leaves is held
    by whoever moves it until its backward, so its address is enough.
    """

    def __init__(self) -> None:
        self._owners: dict[int, tuple[StorageWeakRef, Hashable]] = {}
        self._held: dict[Hashable, frozenset[int]] = {}

    def claim(self, storages: Sequence[torch.UntypedStorage], microbatch: Hashable) -> list[bool]:
        """Return of which of these no other living micro-batch saved them; from now on they are this micro-batch's."""
        held = frozenset[int]().union(*self._held_by_others(microbatch))
        mine = []
        for storage in storages:
            address = storage._cdata
            known = self._owners.get(address)
            if address not in held and (known is None or known[0].expired()):
                known = self._owners[address] = StorageWeakRef(storage), microbatch
            mine.append(address not in held and known is not None and known[1] == microbatch)
        return mine

    def hold(self, addresses: frozenset[int], microbatch: Hashable) -> bool:
        """Claim storages that the caller holds until it calls `release`; return whether no other micro-batch has one,
        and else claim none."""
        claimed = (self._owners[address] for address in self._owners.keys() & addresses)
        if any(owner != microbatch and not reference.expired() for reference, owner in claimed):
            return False
        if not all(map(addresses.isdisjoint, self._held_by_others(microbatch))):
            return False
        self._held[microbatch] = addresses
        return True

    def release(self, microbatch: Hashable) -> None:
        """Give up what a micro-batch holds: its backward is about to run."""
        self._held.pop(microbatch, None)

    def clear(self) -> None:
        """Forget all: a new iteration's micro-batches carry the old numbers."""
        self._owners.clear()
        self._held.clear()

    def _held_by_others(self, microbatch: Hashable) -> list[frozenset[int]]:
        return [held for owner, held in self._held.items() if owner != microbatch]
