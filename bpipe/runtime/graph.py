"""Read what the nodes of an autograd graph saved.

In: nodes. Out: those behind them, the tensors each saved, and which nodes hide theirs.

Judges nothing and keeps nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

# What a compiled Function keeps beside its saved tensors: the tensors that the Function it was made from set on its
# `ctx`.
STASH = "_tensors_no_vc_check"
# Nodes that have no attributes whatever they saved: TorchScript's functions and those of C++ extensions, and writing
# into a view, which keeps the node of what was written inside.
_WITHOUT_ATTRIBUTES = ("CppFunction", "CopySlices")


def _hides(kind: type) -> bool:
    """Return whether what a kind of node saved must not, or cannot, be looked at.

    A Function with `clear_saved_tensors_on_access` (torch 2.11) gives its tensors once: the second to ask, its
    backward, would end the run.
    """
    function = getattr(kind, "_forward_cls", None)
    return kind.__name__ in _WITHOUT_ATTRIBUTES or getattr(function, "clear_saved_tensors_on_access", False)


# Tensors of our own kind; others wrap some.
PLAIN = (torch.Tensor, torch.nn.Parameter)

_saved_names: dict[type, tuple[str, ...]] = {}


def saved_names(kind: type) -> tuple[str, ...]:
    """Return the attributes under which a kind of node gives its saved tensors.

    Asking is slow (a `dir`), so the answer is kept.
    """
    names = _saved_names.get(kind)
    if names is None:
        # Nodes of Python Functions give theirs together; generated C++ nodes one by one, among the sizes and flags they
        # saved too: what has a raw form as well is a tensor, or a list of them.
        every = () if _hides(kind) else dir(kind)
        together = ("saved_tensors", STASH) if "saved_tensors" in every else ()
        names = together + tuple(name for name in every if name.startswith("_saved_") and f"_raw{name}" in every)
        _saved_names[kind] = names
    return names


def nodes_of(roots: Iterable[Any]) -> Iterator[Any]:
    """Return every node reachable from the roots, each once, in an order that depends on the graph alone."""
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
    """Return the kinds of nodes behind `roots` that do not show what they saved, and how many of each there are."""
    return Counter(node.name() for node in nodes_of(roots) if _hides(type(node)))


def saved_tensors(node: Any, name: str) -> Iterator[torch.Tensor]:
    value = getattr(node, name, None)
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        yield from (item for item in value if isinstance(item, torch.Tensor))


def payloads_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors in which a wrapper keeps its bytes: quantised values and their scales.

    Empty for what does not say.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) is torch.Tensor:
        return []
    return [
        inner for name in flatten()[0] if isinstance(inner := getattr(tensor, name), torch.Tensor) and is_plain(inner)
    ]


def plain_tensors(tensors: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor]:
    """Yield plain tensors as they are, and of wrappers those that they keep their bytes in."""
    for tensor in tensors:
        if tensor is not None:
            yield from (tensor,) if is_plain(tensor) else payloads_of(tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return a dense tensor of our own kind, with a storage that can be resized."""
    return type(tensor) in PLAIN and tensor.layout == torch.strided and not tensor.is_quantized
