"""Find what regions of `torch.utils.checkpoint` keep to compute again from, without computing anything.

In: the nodes of an autograd graph, by the attributes that hold what they saved. Out: the tensors of every region that
the hooks lead to: its arguments, and what selective checkpointing keeps in its cache.

A region's tensors are saved through a hook that computes the region again when it is asked: it is not asked. What is
read of torch instead (a test holds it to the installed torch): the hook's closure names its `frame`; that has
`saved_args` and `recompute_fn`, whose closure names `recompute_context`; of selective checkpointing that has `storage`,
of `_VersionWrapper`s with a `val`. Torch 2.11 keeps arguments at a node, `input_saver.grad_fn`, behind a tensor of its
own that stands first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

_MODULE = "torch.utils.checkpoint"
# Modules whose hooks keep elsewhere what they are given.
_ASIDE: set[str] = set()


def leave_aside(module: str) -> None:
    """Say that hooks of this module keep elsewhere what they are given, on the host or in tensors of their own.

    What a node saved through one is not looked at, for that may take it out of there, and so it stays.
    """
    _ASIDE.add(module)


class Regions:
    """The regions that a walk over a graph has come by, each once."""

    def __init__(self) -> None:
        self._frames: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._frames)

    def recomputes(self, node: Any, name: str) -> bool:
        """Return whether what a node saved under this name is not there, but computed again, or kept elsewhere.

        Raises ValueError where a tensor was saved through another's hook: looking at it would run that.
        """
        raw = getattr(node, f"_raw_{name.removeprefix('_')}", None)
        found = [self._meets(saved, node) for saved in (raw if isinstance(raw, (tuple, list)) else (raw,))]
        return any(found)

    def _meets(self, saved: Any, node: Any) -> bool:
        """Note the region of a tensor that was saved through a region's hook; return whether it was."""
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
        """Yield what all regions keep, and of each whether Python holds it, as a cache does, instead of autograd.

        Regions inside of others, which are met on the way, are among them.
        """
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
    """Return what a function's closure has under a name, None where it has none."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return next((cell.cell_contents for each, cell in zip(names, cells, strict=True) if each == name), None)


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
