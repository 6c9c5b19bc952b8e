"""Measure what a rank's saved activations really occupy, from the storages themselves.

In: the storages each forward saved, those that wait between the halves of its backward, and those that a shard of the
vocabulary holds between its S and its T. Out: bytes and micro-batches held now, and their peaks. Knows no schedule and
no prediction.

It keeps weak references only: a storage that autograd freed is gone, one that was emptied in place counts as the bytes
it still has. Storages that somebody besides one micro-batch's graph holds (parameters, masks, tables, the data
iterator's own batch) are not a micro-batch's activations and do not count.

A micro-batch's storages change with its forward, its evictions and loads, and its backward, and at no other time. The
engine says when one of these begins, and only what was touched lately is looked at: to look at every storage twice a
computation costs more than moving it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bpipe.runtime.capture import SavedStorage
from bpipe.runtime.graph import plain_tensors
from bpipe.schedule.action import Action, Key, Kind

# Looks until all that follows from an action was seen. An eviction issued before a computation still has its storages
# when that one starts and ends, and has emptied them when the next one starts. A load has filled them at once, and the
# inputs' half of a backward has freed what the weights' half does not need.
_LOOKS = {Kind.EVICT: 3, Kind.LOAD: 1, Kind.BACKWARD_INPUT: 1}


@dataclass
class _Held:
    """What one micro-batch saved for itself: how much it was, how much of it the last look found, and where what is
    left lies.

    `looks` are still to be made; once its backward has run, until nothing is left. Once the first half of a split
    backward has run, a micro-batch is `halved`: it holds what the second half needs, and has not left.
    """

    saved_bytes: int = 0
    bytes_now: int = 0
    addresses: set[int] = field(default_factory=set)
    looks: int = 0
    halved: bool = False
    over: bool = False


@dataclass(frozen=True)
class _Storage:
    reference: StorageWeakRef
    owner: Key
    nbytes: int
    received: bool = False

    def nbytes_now(self) -> int:
        return _nbytes(self.reference)


def _nbytes(reference: StorageWeakRef) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else int(storage.nbytes())


class Meter:
    """Peaks of one rank. `saved_bytes[stage]` is the most that one micro-batch saves, counted once its forward has
    finished, and `latest_bytes[stage]` what the last one does: of the first what all share may be taken for its own.
    `after_input_bytes[stage]` is what one holds between the halves of its backward, counted once the first has run.
    `shard_bytes` is what a shard of the vocabulary holds of one micro-batch, its logits above all; that is bytes, and
    no micro-batch.

    `received_bytes` is the part of it that the stage received, where the pipeline loop may hold that longer than the
    backward needs it: one that `keeps_inputs`. Of any other it is 0.
    """

    def __init__(self, keeps_inputs: bool = True) -> None:
        self._keeps_inputs = keeps_inputs
        # By address. While a storage is referred to weakly its address serves no other, so none is mistaken for one
        # that died.
        self._storages: dict[int, _Storage] = {}
        self._common: dict[int, StorageWeakRef] = {}
        self._held: dict[Key, _Held] = {}
        # By micro-batch, from S to T.
        self._shards: dict[int, list[StorageWeakRef]] = {}
        self.shard_bytes = 0
        self.peak_microbatches = 0
        self.peak_bytes = 0
        self.saved_bytes: dict[int, int] = {}
        self.latest_bytes: dict[int, int] = {}
        # By stage and micro-batch, what each saved, and what it held between the halves of its backward.
        self.each_bytes: dict[Key, int] = {}
        self.after_each_bytes: dict[Key, int] = {}
        self.after_input_bytes: dict[int, int] = {}
        self.received_bytes = 0

    def begin(self) -> None:
        """Begin an iteration: peaks start over; what all micro-batches share stays known."""
        self.peak_microbatches = self.peak_bytes = 0
        self.saved_bytes, self.latest_bytes, self.after_input_bytes = {}, {}, {}
        self.each_bytes, self.after_each_bytes = {}, {}
        self.shard_bytes = 0
        self._shards.clear()
        # What is still alive although its micro-batch is long over is held by somebody else, and so nobody's
        # activation.
        # Whoever runs the loop may receive into the same memory in every iteration.
        self._common |= {key: storage.reference for key, storage in self._storages.items() if not storage.received}
        self._common = {key: reference for key, reference in self._common.items() if not reference.expired()}
        self._storages, self._held = {}, {}

    def saved(self, forward: Action, found: Sequence[SavedStorage], inputs: Sequence[torch.Tensor | None] = ()) -> None:
        """Note the storages that a finished forward saved; `inputs` are what the stage received for it."""
        received = {tensor.untyped_storage()._cdata for tensor in plain_tensors(inputs) if self._keeps_inputs}
        self.received_bytes = sum(item.nbytes for item in found if item.storage._cdata in received)
        owner = forward.key
        held = self._held[owner] = _Held()
        held.saved_bytes = sum(
            item.nbytes
            for item in found
            if item.alone and self._belongs(item.storage, item.nbytes, owner, item.storage._cdata in received)
        )
        held.bytes_now = held.saved_bytes
        self.latest_bytes[forward.stage] = self.each_bytes[owner] = held.saved_bytes
        self.saved_bytes[forward.stage] = max(self.saved_bytes.get(forward.stage, 0), held.saved_bytes)

    def waiting(self, backward: Action, storages: Sequence[torch.UntypedStorage]) -> None:
        """Note the storages that wait for wgrad after dgrad has run; some were saved, others are new."""
        for storage in storages:
            self._belongs(storage, storage.nbytes(), backward.key)

    def shard_saved(self, op: Action, storages: Sequence[torch.UntypedStorage]) -> None:
        """Note the storages that wait for T after S has run."""
        self._shards[op.microbatch] = list(map(StorageWeakRef, storages))
        self.shard_bytes = max(self.shard_bytes, sum(storage.nbytes() for storage in storages))

    def shard_over(self, op: Action) -> None:
        """Note that T has run. What it made is on its way to others, like a gradient between stages."""
        self._shards.pop(op.microbatch, None)

    def _belongs(self, storage: torch.UntypedStorage, nbytes: int, owner: Key, received: bool = False) -> bool:
        """Return whether this storage is the micro-batch's and was not known to be: not where another one, or
        everybody, holds it too."""
        key = storage._cdata
        known = self._storages.get(key)
        if key in self._common or (known is not None and known.owner == owner):
            return False
        if known is not None:
            self._common[key] = self._storages.pop(key).reference
            other = self._held[known.owner]
            other.addresses.remove(key)
            other.saved_bytes -= known.nbytes
            other.looks += 1
            return False
        self._storages[key] = _Storage(StorageWeakRef(storage), owner, nbytes, received)
        self._held[owner].addresses.add(key)
        return True

    def touched(self, action: Action) -> None:
        """Note that an eviction or a load of this rank has been issued, or a backward has run."""
        held = self._held.get(action.key)
        if held is None:
            return
        if action.kind in _LOOKS:
            held.looks = _LOOKS[action.kind]
            held.halved = action.kind is Kind.BACKWARD_INPUT
        else:
            held.over = True

    def held(self) -> dict[Key, int]:
        """Return the bytes that each micro-batch, a stage and its number, held when last looked at."""
        return {owner: held.bytes_now for owner, held in self._held.items() if held.bytes_now}

    @property
    def in_shards_bytes(self) -> int:
        """Bytes held now of micro-batches between S and T."""
        return sum(_nbytes(reference) for references in self._shards.values() for reference in references)

    def has_of_size(self, nbytes: int) -> bool:
        """Return whether a micro-batch saved a storage of this size."""
        return any(storage.nbytes == nbytes for storage in self._storages.values())

    def sample(self, host_buffers: int, host_bytes: int, look: bool = True) -> int:
        """Return what is held now, in bytes: own storages, and `host_buffers` of `host_bytes` in all for the partner.

        Without a `look` it is what was there when last looked at, and what was saved since.
        """
        if look:
            self._look_at_what_was_touched()
        # What cannot move stays when a micro-batch leaves: one that has less than half of its bytes here is away. And
        # whoever holds bytes of one whose backward has run holds bytes, not a micro-batch.
        here = sum(
            1
            for held in self._held.values()
            if not held.over and (held.halved or 2 * held.bytes_now > held.saved_bytes)
        )
        self.peak_microbatches = max(self.peak_microbatches, here + host_buffers)
        in_all = sum(held.bytes_now for held in self._held.values()) + self.in_shards_bytes + host_bytes
        self.peak_bytes = max(self.peak_bytes, in_all)
        return in_all

    def _look_at_what_was_touched(self) -> None:
        for owner, held in tuple(self._held.items()):
            if held.looks or held.over:
                self._look(held)
                if held.halved and not held.over:
                    self.after_each_bytes[owner] = max(self.after_each_bytes.get(owner, 0), held.bytes_now)
                    self.after_input_bytes[owner[0]] = max(self.after_input_bytes.get(owner[0], 0), held.bytes_now)
                if held.over and not held.addresses:
                    del self._held[owner]

    def _look(self, held: _Held) -> None:
        held.looks = max(0, held.looks - 1)
        held.bytes_now = 0
        for key in tuple(held.addresses):
            nbytes = self._storages[key].nbytes_now()
            # What was received may be emptied behind its backward, and stay.
            if self._storages[key].reference.expired() or (held.over and not nbytes):
                held.addresses.remove(key)
                del self._storages[key]
            else:
                held.bytes_now += nbytes
