"""Find the storages one micro-batch's forward saved for its backward, and say which of them may leave.

In: the autograd nodes of a stage's outputs. Out: the storages, each once, in a fixed order. Knows no schedule and moves nothing.
Refuses what was saved through a hook: looking at it runs the hook.

The graph is walked; `torch.autograd.graph.saved_tensors_hooks` is not used. A hook hands a custom Function a new tensor where it
saved a Parameter, and attributes such as `main_grad` are gone; and hooks shadow one another. Storages are resized in place instead,
so autograd's own tensors keep their identity.

Of a wrapper that says in which plain tensors it keeps its bytes (`__tensor_flatten__`), as quantised tensors do, these are looked at: they
may leave if nobody but the graph holds the wrapper, and nobody but the wrapper them.

A storage may leave only if it lies on the device that computes and nobody but this micro-batch's graph can see it. Three counts say so,
and each catches what the others cannot:
  [1] the storage is used by exactly the tensors the walk found saved (a parameter, a view kept elsewhere: one more);
  [2] none of those tensors is held by Python code too (a cached mask or rotary table: the very tensor that was saved);
  [3] no other micro-batch saved it (two graphs sharing what nobody else holds).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True)
class SavedStorage:
    """One storage of a micro-batch. `alone` is False where somebody else holds it too, by [1] or [2], or it is not the device's to move.

    `kind` is the kind of the node that saved it; of several, the first that the walk came to.
    """

    storage: torch.UntypedStorage
    nbytes: int
    alone: bool
    kind: str = ""


# What a compiled Function keeps beside its saved tensors: the tensors that the Function it was made from set on its `ctx`.
STASH = "_tensors_no_vc_check"
# Nodes that have no attributes whatever they saved: TorchScript's functions and those of C++ extensions, and writing into a view, which
# keeps the node of what was written inside.
_WITHOUT_ATTRIBUTES = ("CppFunction", "CopySlices")


def _hides(kind: type) -> bool:
    """Return whether what a kind of node saved must not, or cannot, be looked at.

    A Function with `clear_saved_tensors_on_access` (torch 2.11) gives its tensors once: the second to ask, its backward, would end the run.
    """
    function = getattr(kind, "_forward_cls", None)
    return kind.__name__ in _WITHOUT_ATTRIBUTES or getattr(function, "clear_saved_tensors_on_access", False)


_saved_names: dict[type, tuple[str, ...]] = {}


def _names(kind: type) -> tuple[str, ...]:
    """The attributes under which a kind of node gives its saved tensors. Asking is slow (a `dir`), so the answer is kept."""
    names = _saved_names.get(kind)
    if names is None:
        # Nodes of Python Functions give theirs together; generated C++ nodes one by one, among the sizes and flags they saved too: what
        # has a raw form as well is a tensor, or a list of them.
        every = () if _hides(kind) else dir(kind)
        together = ("saved_tensors", STASH) if "saved_tensors" in every else ()
        names = together + tuple(name for name in every if name.startswith("_saved_") and f"_raw{name}" in every)
        _saved_names[kind] = names
    return names


def _nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """Every node reachable from the roots, each once, in an order that depends on the graph alone."""
    waiting = [root for root in roots if root is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                waiting.append(behind)


def hiding(roots: Sequence[Any]) -> Counter[str]:
    """The kinds of nodes behind `roots` that do not show what they saved, and how many of each there are."""
    return Counter(node.name() for node in _nodes(roots) if _hides(type(node)))


def _tensors(node: Any, name: str) -> Iterator[torch.Tensor]:
    value = getattr(node, name, None)
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        yield from (item for item in value if isinstance(item, torch.Tensor))


def _payloads(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors in which a wrapper keeps its bytes: quantised values and their scales. Empty for what does not say."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) is torch.Tensor:
        return []
    return [inner for name in flatten()[0] if isinstance(inner := getattr(tensor, name), torch.Tensor) and _plain(inner)]


def _plain(tensor: torch.Tensor) -> bool:
    """A dense tensor of our own kind, with a storage that can be resized."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized


def _refuse_hooks(node: Any, name: str) -> None:
    """Raise ValueError where a tensor was saved through a hook, which unpacking would run."""
    raw = getattr(node, f"_raw_{name.removeprefix('_')}", None)
    for saved in raw if isinstance(raw, (tuple, list)) else (raw,):
        hook = getattr(saved, "unpack_hook", None)
        if hook is not None:
            raise ValueError(
                f"{node.name()} saved a tensor through a hook of {hook.__module__} ({getattr(hook, '__qualname__', hook)}), as "
                f"torch.utils.checkpoint does with use_reentrant=False: looking at what was saved would run it again. Let Megatron "
                f"recompute (--recompute-granularity), use use_reentrant=True, or train without --bpipe and --bpipe-report"
            )


class _Uses:
    """What the walk learns of one storage: the tensors by which the graph uses it, and how many it unpacked from copies.

    `saved` and `stashed` tell by a tensor's id whether autograd holds it, and how often a compiled Function's list does; `wrapped` are by
    their payload's id the ids of wrappers that the graph holds in its place.
    """

    __slots__ = ("copies", "kind", "originals", "saved", "stashed", "storage", "wrapped")

    def __init__(self, storage: torch.UntypedStorage, kind: str) -> None:
        self.storage = storage
        self.kind = kind
        self.originals: list[torch.Tensor] = []
        self.saved: set[int] = set()
        self.stashed: Counter[int] = Counter()
        self.wrapped: dict[int, int] = {}
        self.copies = 0

    def add(self, tensor: torch.Tensor, stashed: bool) -> None:
        if not any(tensor is known for known in self.originals):
            self.originals.append(tensor)
        if stashed:
            self.stashed[id(tensor)] += 1
        else:
            self.saved.add(id(tensor))

    def add_wrapped(self, payload: torch.Tensor, wrapper: int) -> None:
        if id(payload) not in self.wrapped:
            self.originals.append(payload)
            self.wrapped[id(payload)] = wrapper

    def holders(self, tensor: torch.Tensor) -> int:
        """The reference count of this tensor where nobody but the graph holds it, or its wrapper."""
        if id(tensor) in self.wrapped:
            return _HOLDERS_OF_WRAPPED
        stashed = self.stashed[id(tensor)]
        if not stashed:
            return _HOLDERS_OF_SAVED
        return stashed - 1 + (_HOLDERS_OF_BOTH if id(tensor) in self.saved else _HOLDERS_OF_STASHED)


def find(roots: Sequence[Any], inputs: Sequence[torch.Tensor | None], device: torch.device) -> tuple[SavedStorage, ...]:
    """Every storage saved in the graph behind `roots` (autograd nodes), each once; only what lies on `device` can be alone.

    `inputs` are tensors the pipeline loop itself holds but never reads again, the stage's received input: being held by it does not
    count. Cost: a few microseconds a node. A graph whose backward ran already raises torch's own error, one that saved through hooks
    ValueError.
    """
    uses, wrappers = _collect(roots)
    elsewhere = _held_elsewhere(wrappers)
    return tuple(_judge(use, inputs, device, elsewhere) for use in uses.values())


def _collect(roots: Sequence[Any]) -> tuple[dict[int, _Uses], dict[int, torch.Tensor]]:
    """The uses of every storage behind `roots`, and all wrappers that were saved in place of their payloads, by their ids.

    A function of its own: its locals hold tensors, and `_judge` counts holders.
    """
    uses: dict[int, _Uses] = {}
    wrappers: dict[int, torch.Tensor] = {}
    for node in _nodes(roots):
        for name in _names(type(node)):
            _refuse_hooks(node, name)
            again = list(_tensors(node, name))
            for position, tensor in enumerate(_tensors(node, name)):
                if not _plain(tensor):
                    for payload in _payloads(tensor) if tensor is again[position] else ():
                        wrappers[id(tensor)] = tensor
                        inside = payload.untyped_storage()
                        uses.setdefault(inside._cdata, _Uses(inside, node.name())).add_wrapped(payload, id(tensor))
                    continue
                storage = tensor.untyped_storage()
                use = uses.get(storage._cdata)
                if use is None:
                    use = uses[storage._cdata] = _Uses(storage, node.name())
                if tensor is not again[position]:
                    use.copies += 1  # saved as the node's own output: every unpacking makes a new tensor, the graph holds one
                else:
                    use.add(tensor, name == STASH)
                    # A view keeps the tensor it is a view of alive, and that one uses the storage too.
                    if tensor._base is not None:
                        use.add(tensor._base, False)
    return uses, wrappers


def _held_elsewhere(wrappers: dict[int, torch.Tensor]) -> set[int]:
    """Those that somebody besides the graph holds. Nobody else may hold `wrappers`, which are gone afterwards."""
    found = set()
    while wrappers:
        number, wrapper = wrappers.popitem()
        if _python_holders(wrapper) > _HOLDERS_OF_SAVED:
            found.add(number)
    return found


def _judge(use: _Uses, inputs: Sequence[torch.Tensor | None], device: torch.device, elsewhere: Collection[int]) -> SavedStorage:
    storage, originals = use.storage, use.originals
    use.originals = []
    expected = len(originals) + use.copies + 1  # our own hold on the storage
    alone = _storage_uses(storage) == expected and not any(wrapper in elsewhere for wrapper in use.wrapped.values())  # [1]
    while originals:
        tensor = originals.pop()
        if _python_holders(tensor) > use.holders(tensor) and not any(tensor is known for known in inputs):  # [2]
            alone = False
    return SavedStorage(storage, storage.nbytes(), alone and storage.resizable() and _on(device, storage), use.kind)


def _on(device: torch.device, storage: torch.UntypedStorage) -> bool:
    """A device without an index is whichever of its type computes."""
    return storage.device.type == device.type and device.index in (None, storage.device.index)


def _storage_uses(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def only_holder(tensor: torch.Tensor) -> bool:
    """Whether nothing but this tensor uses its storage: once it is gone, so are its bytes."""
    storage = tensor.untyped_storage()
    return _storage_uses(storage) == 2  # the tensor and our own hold


def _python_holders(tensor: torch.Tensor) -> int:
    return sys.getrefcount(tensor)


def _measure_holders(saved: bool, stashed: bool) -> int:
    """The reference count of a tensor that only the graph holds, as `_judge` sees it; it depends on torch and Python versions."""

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            kept = x * 2
            if saved:
                ctx.save_for_backward(kept)
            setattr(ctx, STASH, [kept] if stashed else [])
            return x * 3

    # Kept: torch 2.11 lets go of what a Function saved with the last tensor that came out of it, whoever still has the node.
    output = cast(Any, Keeping.apply(torch.ones(1, requires_grad=True)))
    node = output.grad_fn
    originals = [*(node.saved_tensors or getattr(node, STASH))]
    tensor = originals.pop()
    return _python_holders(tensor)


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
    return _python_holders(tensor)


_HOLDERS_OF_SAVED = _measure_holders(saved=True, stashed=False)
_HOLDERS_OF_STASHED = _measure_holders(saved=False, stashed=True)
_HOLDERS_OF_WRAPPED = _measure_wrapped()
_HOLDERS_OF_BOTH = _measure_holders(saved=True, stashed=True)


class Claims:
    """Remember which micro-batch saved which storage, to notice one that two of them saved: rule [3]."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[StorageWeakRef, Hashable]] = {}

    def claim(self, found: Sequence[SavedStorage], microbatch: Hashable) -> tuple[SavedStorage, ...]:
        """Those of `found` that no other living micro-batch saved; from now on they are this micro-batch's."""
        self._owners = {cdata: owner for cdata, owner in self._owners.items() if not owner[0].expired()}
        mine = []
        for item in found:
            _, owner = self._owners.setdefault(item.storage._cdata, (StorageWeakRef(item.storage), microbatch))
            if owner == microbatch:
                mine.append(item)
        return tuple(mine)

    def clear(self) -> None:
        """Forget all: a new iteration's micro-batches carry the old numbers."""
        self._owners.clear()
