"""What the nodes of an autograd graph saved, and who holds the tensors of a graph in pieces besides it."""

import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
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
