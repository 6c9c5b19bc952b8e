"""What regions of `torch.utils.checkpoint` keep for recomputation: arguments, and the cache of selective checkpointing.

A region's tensors are saved through a hook that recomputes the region when it is called, so it is not called. These
internals of torch are read instead (a test checks them on the installed torch): the hook's closure names its `frame`;
that has `saved_args` and `recompute_fn`, whose closure names `recompute_context`; with selective checkpointing that has
`storage`, of `_VersionWrapper`s with a `val`. Torch 2.11 keeps arguments at a node, `input_saver.grad_fn`, after a
tensor of its own.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

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
