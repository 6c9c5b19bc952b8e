"""What the nodes of an autograd graph saved, and who holds the tensors of a graph in pieces besides it.

A region of `torch.utils.checkpoint` saves tensors through a hook that recomputes the region when it is called, so it is not
called. These internals of torch are read instead (a test checks them on the installed torch): the hook's closure names its
`frame`; that has `saved_args` and `recompute_fn`, whose closure names `recompute_context`; with selective checkpointing that
has `storage`, of `_VersionWrapper`s with a `val`. Torch 2.11 keeps arguments at a node, `input_saver.grad_fn`, after a tensor
of its own.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Where a compiled Function keeps the tensors that the Function it was made from set on its `ctx`.
STASH = "_tensors_no_vc_check"
# Nodes that show nothing of what they saved: TorchScript's functions and those of C++ extensions, and writing into a
# view, which keeps the node of what was written inside.
_WITHOUT_ATTRIBUTES = ("CppFunction", "CopySlices")


def _hides(kind: type) -> bool:
    """Whether what a kind of node saved must not, or cannot, be read.

    A Function with `clear_saved_tensors_on_access` (torch 2.11) gives its tensors once: the second access, by its
    backward, would end the run.
    """
    function = getattr(kind, "_forward_cls", None)
    return kind.__name__ in _WITHOUT_ATTRIBUTES or getattr(function, "clear_saved_tensors_on_access", False)


# Tensors of our own kind; others wrap some.
PLAIN = (torch.Tensor, torch.nn.Parameter)

_saved_names: dict[type, tuple[str, ...]] = {}


def saved_names(kind: type) -> tuple[str, ...]:
    """Return the attributes by which a kind of node gives its saved tensors. Cached, because `dir` is slow."""
    names = _saved_names.get(kind)
    if names is None:
        # Nodes of Python Functions give all tensors at once; generated C++ nodes one by one, among sizes and flags that
        # they saved too. An attribute that has a raw form as well is a tensor, or a list of them.
        attributes = () if _hides(kind) else dir(kind)
        together = ("saved_tensors", STASH) if "saved_tensors" in attributes else ()
        names = together + tuple(
            name for name in attributes if name.startswith("_saved_") and f"_raw{name}" in attributes
        )
        _saved_names[kind] = names
    return names


def nodes_of(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield every node reachable from the roots once, in an order that depends only on the graph."""
    waiting = [root for root in roots if root is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def hiding(roots: Sequence[Any]) -> Counter[str]:
    """Return the kinds of nodes behind `roots` that do not show what they saved, with their numbers."""
    return Counter(node.name() for node in nodes_of(roots) if _hides(type(node)))


def saved_tensors(node: Any, name: str) -> Iterator[torch.Tensor]:
    value = getattr(node, name, None)
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        yield from (item for item in value if isinstance(item, torch.Tensor))


def payloads_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors in which a wrapper keeps its bytes, such as quantised values and their scales; none if
    the wrapper does not tell."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) is torch.Tensor:
        return []
    return [
        inner for name in flatten()[0] if isinstance(inner := getattr(tensor, name), torch.Tensor) and is_plain(inner)
    ]


def plain_tensors(tensors: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor]:
    """Yield plain tensors as they are, and of wrappers the tensors in which they keep their bytes."""
    for tensor in tensors:
        if tensor is not None:
            yield from (tensor,) if is_plain(tensor) else payloads_of(tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is dense, unquantized, and no wrapper, so that its storage can be resized."""
    return type(tensor) in PLAIN and tensor.layout == torch.strided and not tensor.is_quantized


@dataclass(frozen=True, slots=True)
class Pieces:
    """The graph of one forward, which may be in pieces.

    A loop that computes parts of layers one by one (Megatron's combined 1F1B) detaches what passes from part to part.
    Each part has a graph of its own, and the loop holds the tensors at every cut until the backward. It reads them only
    in this micro-batch's forward and backward, and in between their memory may be away.
    """

    roots: Sequence[Any]
    """The autograd nodes at which the graphs of the pieces end."""

    held: Sequence[torch.Tensor] = ()
    """The tensors that the loop holds, as many times as it refers to them; only this value refers to them besides."""


class Holders:
    """Counts, by tensor and by storage, what a loop holds of one forward.

    A tensor that somebody else refers to as well does not count, unless it is one of `inputs`.
    """

    def __init__(self, held: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor | None] = ()) -> None:
        self._counts = Counter(map(id, held))
        self._sharing: defaultdict[int, set[int]] = defaultdict(set)
        for tensor in held:
            # Torch may keep a reference of its own, as for a gradient's accumulator or a view; without `_use_count` it
            # keeps none.
            of_torch = hasattr(tensor, "_use_count") and tensor._use_count() > 1
            allowed = _IN_A_LOOP + self.references(tensor) + of_torch
            alone = sys.getrefcount(tensor) <= allowed
            if is_plain(tensor) and (alone or any(tensor is received for received in inputs)):
                self._sharing[tensor.untyped_storage()._cdata].add(id(tensor))

    def references(self, tensor: torch.Tensor) -> int:
        """Return the number of references to a tensor by the loop and by `Pieces.held` itself."""
        return 2 * self._counts[id(tensor)]

    def num_others(self, storage: torch.UntypedStorage, known: Collection[int]) -> int:
        """Return the number of tensors that only the loop holds, use a storage, and have no id in `known`."""
        sharing = self._sharing.get(storage._cdata)
        return len(sharing.difference(known)) if sharing else 0


def _measure_in_a_loop() -> int:
    """Return the references of a tensor that come from being looked at as above; it depends on Python's version."""
    held = (torch.zeros(1),)
    for tensor in held:
        return sys.getrefcount(tensor) - len(held)
    raise AssertionError("there is one")


_IN_A_LOOP = _measure_in_a_loop()


_MODULE = "torch.utils.checkpoint"
# Modules whose hooks keep tensors elsewhere, on the host or in tensors of their own. What a node saved through one is not
# read, because that may remove it from there, and so it stays.
_ASIDE = {"megatron.core.pipeline_parallel.fine_grained_activation_offload"}


class Regions:
    """The regions that a walk over a graph has met, each once."""

    def __init__(self) -> None:
        self._frames: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._frames)

    def recomputes(self, node: Any, name: str) -> bool:
        """Whether a node's attribute is recomputed or kept elsewhere. All its regions are noted.

        Raises ValueError if a tensor was saved through another hook: reading it would run that.
        """
        raw = getattr(node, f"_raw_{name.removeprefix('_')}", None)
        # Not a generator: `any` would stop at the first region.
        met = [self._meets(saved, node) for saved in (raw if isinstance(raw, (tuple, list)) else (raw,))]
        return any(met)

    def _meets(self, saved: Any, node: Any) -> bool:
        """Note the region of a tensor that was saved through a region's hook, and return whether it was."""
        hook = getattr(saved, "unpack_hook", None)
        if hook is None:
            return False
        if getattr(hook, "__module__", "") in _ASIDE:
            return True
        frame = _closed_over(hook, "frame") if getattr(hook, "__module__", "") == _MODULE else None
        if frame is None:
            raise ValueError(
                f"{node.name() if node is not None else 'a checkpointed region'} saved a tensor through a hook of "
                f"{hook.__module__} ({getattr(hook, '__qualname__', hook)}): reading the saved tensor would run the "
                "hook. Remove such hooks (save_on_cpu, saved_tensors_hooks), or train without balancing and without "
                "a report"
            )
        self._frames.setdefault(id(frame), frame)
        return True

    def tensors(self) -> Iterator[tuple[torch.Tensor, bool]]:
        """Yield the tensors of all regions, nested ones included, and whether a cache in Python holds them instead of
        autograd."""
        seen: set[int] = set()
        while len(seen) < len(self._frames):
            number, frame = next((number, frame) for number, frame in self._frames.items() if number not in seen)
            seen.add(number)
            yield from ((tensor, False) for tensor in self._arguments(frame))
            yield from ((tensor, True) for tensor in _cached(frame))

    def _arguments(self, frame: Any) -> Iterator[torch.Tensor]:
        saver = getattr(frame, "input_saver", None)
        if saver is not None:
            if not self.recomputes(saver.grad_fn, "saved_tensors"):
                yield from saver.grad_fn.saved_tensors[1:]
            return
        for saved in getattr(frame, "saved_args", ()):
            if not self._meets(saved, None) and hasattr(saved, "unpack"):
                yield saved.unpack()


def _closed_over(function: Callable[..., Any], name: str) -> Any:
    """Return the value of a name in a function's closure, None without one."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return next((cell.cell_contents for free, cell in zip(names, cells, strict=True) if free == name), None)


def _cached(frame: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the cache of selective checkpointing."""
    waiting = [getattr(_closed_over(frame.recompute_fn, "recompute_context"), "storage", None)]
    while waiting:
        item: Any = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict):
            waiting += reversed(item.values())
        elif isinstance(item, (list, tuple)):
            waiting += reversed(item)
        elif type(item).__name__ == "_VersionWrapper" and getattr(item, "unpack_hook", None) is None:
            waiting.append(item.val)
