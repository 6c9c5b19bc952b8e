"""Find the storages that leave again, in the graph of another micro-batch of a stage, without looking at all that it
saved.

In: the graph of one micro-batch, and which of its storages leave. Out: for the graph of another micro-batch the
storages that are saved in the same places, or None where anything about them is not as it was. Knows no schedule and
moves nothing.

Looking at everything (`capture.find`) takes some 10 microseconds a node of the main thread, ahead of the next kernels.
Here nodes are only told apart by their kinds, and of what they saved nothing is looked at but what leaves. That has to
pass the counts [1] and [2] of `capture` again, whatever it was before; [3] is the caller's. A micro-batch that saved
more than the recorded one keeps the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bpipe.runtime.capture import Uses, collect, num_python_holders, num_storage_uses
from bpipe.runtime.graph import PLAIN, nodes_of

# A tensor that every look makes anew has no holders to count.
_MADE_ANEW = 1 << 30


class _Pick(NamedTuple):
    """One tensor: which of the attributes that are read, which position in it, if it holds several, and whether it
    is that one's base."""

    attribute: int
    position: int | None
    of_base: bool


class _Entry(NamedTuple):
    """One storage that leaves: how many Python references each of its tensors may have, in the order of their picks,
    and its uses."""

    max_holders: tuple[int, ...]
    num_uses: int


class Retrace:
    """Recorded positions of the storages that leave, of one stage's micro-batches."""

    def __init__(
        self,
        kinds: tuple[type, ...],
        attributes: Sequence[tuple[int, str]],
        picks: Sequence[_Pick],
        entries: Sequence[_Entry],
    ) -> None:
        """`kinds` are those of all nodes, in the order of the walk; `attributes` name a node by its place in it."""
        self._kinds, self._attributes, self._picks = kinds, attributes, picks
        self._backwards = tuple(reversed(entries))

    @staticmethod
    def of(roots: Sequence[Any], leaving: Sequence[torch.UntypedStorage]) -> Retrace | None:
        """Record where these storages are saved; None where one lies inside of a wrapper, or in a region that is
        computed again."""
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
        return Retrace(tuple(map(type, nodes)), list(attributes), picks, [_entry_of(use) for use in chosen])

    def find(self, roots: Sequence[Any], inputs: Sequence[torch.Tensor | None]) -> list[torch.UntypedStorage] | None:
        """Return the storages of another micro-batch in the recorded order; `inputs` as in `capture.find`."""
        nodes = list(nodes_of(roots))
        if tuple(map(type, nodes)) != self._kinds:
            return None
        tensors = _tensors([getattr(nodes[node], name, None) for node, name in self._attributes], self._picks)
        found = []
        for entry in self._backwards:
            storage = _storage_of(tensors, entry, inputs)
            if storage is None:
                return None
            found.append(storage)
        found.reverse()
        return found


def _tensors(values: list[Any], picks: Sequence[_Pick]) -> list[Any]:
    """Return what was picked of the attributes' values. Nothing else may hold it afterwards: holders are counted."""
    picked = []
    for attribute, position, of_base in picks:
        value = values[attribute]
        if position is not None:
            value = value[position] if isinstance(value, (tuple, list)) and position < len(value) else None
        picked.append(getattr(value, "_base", None) if of_base else value)
    return picked


def _entry_of(use: Uses) -> _Entry:
    return _Entry((*map(use.holders, use.originals), *[_MADE_ANEW] * len(use.copies)), use.expected)


def _storage_of(
    tensors: list[Any], entry: _Entry, inputs: Sequence[torch.Tensor | None]
) -> torch.UntypedStorage | None:
    """Take this entry's tensors from the end of the list: their storage, if it is one and nobody else has it or
    them."""
    storage: torch.UntypedStorage | None = None
    for max_holders in reversed(entry.max_holders):
        tensor = tensors.pop()
        if type(tensor) not in PLAIN:
            return None
        if num_python_holders(tensor) > max_holders and not any(tensor is known for known in inputs):  # [2]
            return None
        own = tensor.untyped_storage()
        if storage is None:
            storage = own
        elif own._cdata != storage._cdata:
            return None
    # A tensor that was made by looking is gone by now, or it would count.
    del tensor, own
    return storage if storage is not None and num_storage_uses(storage) == entry.num_uses else None  # [1]
