"""Describe the graph of a micro-batch that is cut in pieces, and who holds its tensors besides the graph.

In: what a loop keeps of one forward. Out: `Pieces`, and `Holders`, which counts them. Knows no schedule and no loop.

A loop that computes parts of layers one by one (Megatron's combined 1F1B) detaches what passes from part to part. So each
part has a graph of its own, and the loop holds the tensors at every cut until the backward: it reads them in this
micro-batch's forward and backward only, and meanwhile their memory may be away.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bpipe.runtime.graph import is_plain


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of one forward: the autograd nodes at which their graphs end, and the tensors that the loop holds.

    A tensor stands in `held` as many times as the loop refers to it; nobody but this value refers to it besides.
    """

    roots: Sequence[Any]
    held: Sequence[torch.Tensor] = ()


class Holders:
    """Count what a loop holds of one forward, by tensor and by storage.

    A tensor that somebody else refers to as well is nobody's to count, unless it is one of `inputs`, which do not count.
    """

    def __init__(self, held: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor | None] = ()) -> None:
        self._counts = Counter(map(id, held))
        self._sharing: defaultdict[int, set[int]] = defaultdict(set)
        for tensor in held:
            allowed = _IN_A_LOOP + self.references(tensor) + _is_referred_to_by_torch(tensor)
            alone = sys.getrefcount(tensor) <= allowed
            if is_plain(tensor) and (alone or any(tensor is one for one in inputs)):
                self._sharing[tensor.untyped_storage()._cdata].add(id(tensor))

    def references(self, tensor: torch.Tensor) -> int:
        """Return how many references to a tensor are the loop's, and `Pieces.held`'s own."""
        return 2 * self._counts[id(tensor)]

    def num_others(self, storage: torch.UntypedStorage, known: Collection[int]) -> int:
        """Return how many tensors that the loop alone holds use a storage and are none of those with the ids
        `known`."""
        sharing = self._sharing.get(storage._cdata)
        return len(sharing.difference(known)) if sharing else 0


def _is_referred_to_by_torch(tensor: torch.Tensor) -> bool:
    """Return whether torch keeps a reference of its own, as for a gradient's accumulator or a view. A torch that does
    not say so keeps none."""
    return hasattr(tensor, "_use_count") and tensor._use_count() > 1


def _measure_in_a_loop() -> int:
    """Return how many references a tensor has by being looked at as above; it depends on Python's version."""
    held = (torch.zeros(1),)
    for tensor in held:
        return sys.getrefcount(tensor) - len(held)
    raise AssertionError("there is one")


_IN_A_LOOP = _measure_in_a_loop()
