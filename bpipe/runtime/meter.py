"""Measure what a rank's saved activations really occupy, from the storages themselves.

The meter has only weak references: a storage that autograd freed is gone, and one that was emptied in place counts as
the bytes it still has. Storages that are held by more than one micro-batch's graph (parameters, masks, tables, the data
iterator's own batch) are not a micro-batch's activations and do not count.

A micro-batch's storages change only with its forward, its evictions and loads, and its backward. The engine says when
one of these begins, and only micro-batches that were touched lately are inspected: inspecting every storage twice per
computation costs more than moving it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bpipe.runtime.capture import SavedStorage
from bpipe.runtime.graph import plain_tensors
from bpipe.schedule.action import Action, Key, Kind

# Inspections until all effects of an action are seen. An eviction issued before a computation still has its storages
# when that starts and ends, and has emptied them when the next one starts. A load has filled them at once, and the
# inputs' half of a backward has freed what the weights' half does not need.
_LOOKS = {Kind.EVICT: 3, Kind.LOAD: 1, Kind.BACKWARD_INPUT: 1}


@dataclass
class _Held:
    """What one micro-batch saved for itself."""

    saved_bytes: int = 0

    bytes_now: int = 0
    """Bytes left at the last inspection."""

    addresses: set[int] = field(default_factory=set)
    """Of the storages that are left."""

    looks: int = 0
    """Inspections to come."""

    halved: bool = False
    """Whether the first half of a split backward has run: it holds what the second half needs, and has not left."""

    over: bool = False
    """Whether its backward has run; it is inspected until nothing is left."""


@dataclass(frozen=True)
class _Storage:
    reference: StorageWeakRef
    owner: Key
    nbytes: int
    received: bool = False


def _nbytes(reference: StorageWeakRef) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else int(storage.nbytes())


def largest_by[K](sizes: Iterable[tuple[K, int]]) -> dict[K, int]:
    """Return the largest size of each key."""
    largest: dict[K, int] = {}
    for key, nbytes in sizes:
        largest[key] = max(nbytes, largest.get(key, 0))
    return largest


class Meter:
    """Peaks of one rank.

    Args:
        keeps_inputs: Whether the pipeline loop may hold what a stage received longer than the backward needs it.

    Attributes:
        peak_microbatches: The most micro-batches held in this iteration, host buffers included.
        peak_bytes: The most bytes held.
        shard_bytes: What a shard of the vocabulary holds of one micro-batch, above all its logits.
        received_bytes: The part of a micro-batch that the stage received, if the loop keeps inputs; else 0.
        each_bytes: By stage and micro-batch, what each saved, counted once its forward has finished.
        after_each_bytes: What each holds between the halves of its backward, counted once the first has run.
    """

    def __init__(self, keeps_inputs: bool = True) -> None:
        self._keeps_inputs = keeps_inputs
        # By address, which no other storage gets while there is a weak reference.
        self._storages: dict[int, _Storage] = {}
        self._common: dict[int, StorageWeakRef] = {}
        self._held: dict[Key, _Held] = {}
        # By micro-batch, from S to T.
        self._shards: dict[int, list[StorageWeakRef]] = {}
        self.shard_bytes = 0
        self.peak_microbatches = 0
        self.peak_bytes = 0
        self.each_bytes: dict[Key, int] = {}
        self.after_each_bytes: dict[Key, int] = {}
        self.received_bytes = 0

    @property
    def saved_bytes(self) -> dict[int, int]:
        """By stage, the most that one micro-batch saves."""
        return largest_by((stage, nbytes) for (stage, _), nbytes in self.each_bytes.items())

    @property
    def after_input_bytes(self) -> dict[int, int]:
        """By stage, the most that one micro-batch holds between the halves of its backward."""
        return largest_by((stage, nbytes) for (stage, _), nbytes in self.after_each_bytes.items())

    def begin(self) -> None:
        """Begin an iteration: peaks start over; what all micro-batches share stays known."""
        self.peak_microbatches = self.peak_bytes = 0
        self.each_bytes, self.after_each_bytes = {}, {}
        self.shard_bytes = 0
        self._shards.clear()
        # A storage that outlives its micro-batch is held by somebody else, so it is no activation. But the loop may
        # receive into the same memory in every iteration.
        self._common |= {key: storage.reference for key, storage in self._storages.items() if not storage.received}
        self._common = {key: reference for key, reference in self._common.items() if not reference.expired()}
        self._storages, self._held = {}, {}

    def saved(
        self, forward: Action, storages: Sequence[SavedStorage], inputs: Sequence[torch.Tensor | None] = ()
    ) -> None:
        """Note the storages that a finished forward saved; `inputs` are what the stage received for it."""
        received = {tensor.untyped_storage()._cdata for tensor in plain_tensors(inputs) if self._keeps_inputs}
        self.received_bytes = sum(item.nbytes for item in storages if item.storage._cdata in received)
        owner = forward.key
        held = self._held[owner] = _Held()
        held.saved_bytes = sum(
            item.nbytes
            for item in storages
            if item.alone and self._belongs(item.storage, item.nbytes, owner, item.storage._cdata in received)
        )
        held.bytes_now = held.saved_bytes
        self.each_bytes[owner] = held.saved_bytes

    def waiting(self, backward: Action, storages: Sequence[torch.UntypedStorage]) -> None:
        """Note the storages that wait for wgrad after dgrad has run; some were saved, others are new."""
        for storage in storages:
            self._belongs(storage, storage.nbytes(), backward.key)

    def shard_saved(self, op: Action, storages: Sequence[torch.UntypedStorage]) -> None:
        """Note the storages that wait for T after S has run."""
        self._shards[op.microbatch] = list(map(StorageWeakRef, storages))
        self.shard_bytes = max(self.shard_bytes, sum(storage.nbytes() for storage in storages))

    def shard_over(self, op: Action) -> None:
        """Forget a shard's storages after T has run: its result is being sent, like a gradient between stages."""
        self._shards.pop(op.microbatch, None)

    def _belongs(self, storage: torch.UntypedStorage, nbytes: int, owner: Key, received: bool = False) -> bool:
        """Add a storage to the micro-batch's, and return whether it is new and no other micro-batch holds it too."""
        key = storage._cdata
        known_storage = self._storages.get(key)
        if key in self._common or (known_storage is not None and known_storage.owner == owner):
            return False
        if known_storage is not None:
            self._common[key] = self._storages.pop(key).reference
            other = self._held[known_storage.owner]
            other.addresses.remove(key)
            other.saved_bytes -= known_storage.nbytes
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
        """Return, by stage and micro-batch, the bytes held at the last inspection."""
        return {owner: held.bytes_now for owner, held in self._held.items() if held.bytes_now}

    @property
    def in_shards_bytes(self) -> int:
        """Bytes held now by micro-batches between S and T."""
        return sum(_nbytes(reference) for references in self._shards.values() for reference in references)

    def has_of_size(self, nbytes: int) -> bool:
        """Whether a micro-batch saved a storage of this size."""
        return any(storage.nbytes == nbytes for storage in self._storages.values())

    def sample(self, host_buffers: int, host_bytes: int, look: bool = True) -> int:
        """Return the bytes held now, and update the peaks.

        Args:
            host_buffers: Number of host buffers for others.
            host_bytes: Their bytes.
            look: Whether to inspect storages; otherwise the bytes are those of the last inspection and what was saved
                since.
        """
        for owner, held in tuple(self._held.items()) if look else ():
            if held.looks or held.over:
                self._look(held)
                if held.halved and not held.over:
                    self.after_each_bytes[owner] = max(self.after_each_bytes.get(owner, 0), held.bytes_now)
                if held.over and not held.addresses:
                    del self._held[owner]
        # What cannot move stays when a micro-batch leaves: one that has less than half of its bytes here is away. Bytes
        # of a micro-batch whose backward has run are no micro-batch.
        here = sum(
            1
            for held in self._held.values()
            if not held.over and (held.halved or 2 * held.bytes_now > held.saved_bytes)
        )
        self.peak_microbatches = max(self.peak_microbatches, here + host_buffers)
        total = sum(held.bytes_now for held in self._held.values()) + self.in_shards_bytes + host_bytes
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    def _look(self, held: _Held) -> None:
        held.looks = max(0, held.looks - 1)
        held.bytes_now = 0
        for key in tuple(held.addresses):
            nbytes = _nbytes(self._storages[key].reference)
            # What was received may be emptied after its backward, and stay.
            if self._storages[key].reference.expired() or (held.over and not nbytes):
                held.addresses.remove(key)
                del self._storages[key]
            else:
                held.bytes_now += nbytes
