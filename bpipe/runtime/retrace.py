"""Find the storages that leave in the graph of another micro-batch of a stage, at the places of the first one.

The whole walk (`capture.find`) takes about 10 microseconds of the main thread per node, before the next kernels are
launched. Here only the kinds of nodes are compared, and only the tensors that leave are read. They have to pass the
counts [1] and [2] of `capture` again, whatever they were before; [3] is the caller's. If a micro-batch saved more than
the recorded one, the rest stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bpipe.runtime.capture import collect, num_python_holders, num_storage_uses
from bpipe.runtime.graph import PLAIN, Holders, nodes_of

# A tensor that every access makes anew has no holders to count.
_MADE_ANEW = 1 << 30


class _Pick(NamedTuple):
    """One tensor: the index of the attribute that is read, the position in it if it holds several, and whether it is
    the base of the tensor there."""

    attribute: int
    position: int | None
    of_base: bool


class _Entry(NamedTuple):
    """One storage that leaves: the most Python references of each of its tensors, the last pick first, and its uses."""

    max_holders: tuple[int, ...]
    num_uses: int


class Retrace:
    """Recorded positions of the storages that leave, of one stage's micro-batches.

    `kinds` are those of all nodes, in the order of the walk; `attributes` name a node by its index in it.
    """

    def __init__(
        self,
        kinds: tuple[type, ...],
        attributes: Sequence[tuple[int, str]],
        picks: Sequence[_Pick],
        entries: Sequence[_Entry],
    ) -> None:
        self._kinds, self._attributes, self._picks = kinds, attributes, picks
        self._backwards = tuple(reversed(entries))

    @staticmethod
    def of(roots: Sequence[Any], leaving: Sequence[torch.UntypedStorage]) -> Retrace | None:
        """Record where these storages are saved; None if one is inside a wrapper or in a recomputed region."""
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
        holders = [(*map(use.holders, use.originals), *[_MADE_ANEW] * len(use.copies)) for use in chosen]
        entries = [_Entry(counts[::-1], use.expected) for counts, use in zip(holders, chosen, strict=True)]
        return Retrace(tuple(map(type, nodes)), list(attributes), picks, entries)

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
    """Return the picked tensors of the attributes' values. Nothing else may hold them, because holders are counted."""
    picked = []
    for attribute, position, of_base in picks:
        value = values[attribute]
        if position is not None:
            value = value[position] if isinstance(value, (tuple, list)) and position < len(value) else None
        picked.append(getattr(value, "_base", None) if of_base else value)
    return picked


def _storages_of(
    tensors: list[Any], backwards: Sequence[_Entry], inputs: Sequence[torch.Tensor | None], holders: Holders
) -> list[torch.UntypedStorage] | None:
    """Take all tensors from the end of the list, and return the storages of these entries, if each is one and nobody
    else has it or its tensors."""
    storages = []
    for max_holders, num_uses in backwards:
        own: torch.UntypedStorage | None = None
        ids = []
        for allowed in max_holders:
            tensor = tensors.pop()
            if type(tensor) not in PLAIN:
                return None
            if num_python_holders(tensor) > allowed + holders.references(tensor) and not any(
                tensor is received for received in inputs
            ):  # [2]
                return None
            ids.append(id(tensor))
            storage = tensor.untyped_storage()
            if own is not None and storage._cdata != own._cdata:
                return None
            own = storage
        # A tensor that was made by reading it would count, and so would a second reference of ours.
        del tensor, storage
        if own is None or num_storage_uses(own) != num_uses + holders.num_others(own, ids):  # [1]
            return None
        storages.append(own)
    storages.reverse()
    return storages
