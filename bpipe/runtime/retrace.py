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
from bpipe.runtime.graph_pieces import Holders

# A tensor that every look makes anew has no holders to count.
_MADE_ANEW = 1 << 30


class _Pick(NamedTuple):
    """One tensor: which of the attributes that are read, which position in it, if it holds several, and whether it
    is that one's base."""

    attribute: int
    position: int | None
    of_base: bool


class _Entry(NamedTuple):
    """One storage that leaves: how many Python references each of its tensors may have, the last pick first, and its
    uses."""

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
    """Return what was picked of the attributes' values. Nothing else may hold it afterwards: holders are counted."""
    picked = []
    for attribute, position, of_base in picks:
        value = values[attribute]
        if position is not None:
            value = value[position] if isinstance(value, (tuple, list)) and position < len(value) else None
        picked.append(getattr(value, "_base", None) if of_base else value)
    return picked


def _entry_of(use: Uses) -> _Entry:
    holders = (*map(use.holders, use.originals), *[_MADE_ANEW] * len(use.copies))
    return _Entry(holders[::-1], use.expected)


def _storages_of(
    tensors: list[Any], backwards: Sequence[_Entry], inputs: Sequence[torch.Tensor | None], holders: Holders
) -> list[torch.UntypedStorage] | None:
    """Take all tensors from the end of the list: the storages of these entries, last one first, if each is one and
    nobody else has it or its tensors."""
    found = []
    for max_holders, num_uses in backwards:
        own: torch.UntypedStorage | None = None
        known = []
        for allowed in max_holders:
            tensor = tensors.pop()
            if type(tensor) not in PLAIN:
                return None
            if num_python_holders(tensor) > allowed + holders.references(tensor) and not any(
                tensor is one for one in inputs
            ):  # [2]
                return None
            known.append(id(tensor))
            storage = tensor.untyped_storage()
            if own is not None and storage._cdata != own._cdata:
                return None
            own = storage
        # A tensor that was made by looking has to be gone, or it would count, and so would a second hold of ours.
        del tensor, storage
        if own is None or num_storage_uses(own) != num_uses + holders.num_others(own, known):  # [1]
            return None
        found.append(own)
    found.reverse()
    return found
