"""Measure what a rank's saved activations really occupy, from the storages themselves.

In: the storages each forward saved. Out: bytes and micro-batches held now, and their peaks. Knows no schedule and no prediction.

It keeps weak references only: a storage that autograd freed is gone, one that was emptied in place counts as the bytes it still has.
Storages that somebody besides one micro-batch's graph holds (parameters, masks, tables, the data iterator's own batch) are not a
micro-batch's activations and do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bpipe.runtime.capture import Found


@dataclass
class _Seen:
    reference: StorageWeakRef
    microbatch: int
    nbytes: int

    def nbytes_now(self) -> int:
        if self.reference.expired():
            return 0
        storage = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)
        return 0 if storage is None else int(storage.nbytes())


class Meter:
    """Peaks of one rank. `saved_bytes` is what one micro-batch saves, counted once its forward has finished."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._common: dict[int, StorageWeakRef] = {}
        self.peak_microbatches = 0
        self.peak_bytes = 0
        self.saved_bytes = 0

    def begin(self) -> None:
        """A new iteration: peaks start over, what is known of the storages that all micro-batches share stays."""
        self.peak_microbatches = self.peak_bytes = self.saved_bytes = 0
        # While it is referred to weakly, a storage's address serves no other; what died is let go of here, once an iteration.
        self._seen = {key: seen for key, seen in self._seen.items() if not seen.reference.expired()}
        self._common = {key: reference for key, reference in self._common.items() if not reference.expired()}
        for seen in self._seen.values():
            # Still alive although its micro-batch is long over: somebody else holds it, so it is nobody's activation.
            seen.microbatch = -1

    def saved(self, microbatch: int, found: Sequence[Found]) -> None:
        """A forward has finished and saved these storages."""
        for item in found:
            if not item.alone:
                continue
            key = item.storage._cdata
            if key in self._common:
                continue
            seen = self._seen.get(key)
            if seen is not None and seen.microbatch != microbatch:
                self._common[key] = self._seen.pop(key).reference
                continue
            self._seen[key] = _Seen(StorageWeakRef(item.storage), microbatch, item.nbytes)
        mine = sum(seen.nbytes for seen in self._seen.values() if seen.microbatch == microbatch)
        self.saved_bytes = max(self.saved_bytes, mine)

    def sample(self, host_slots: int, host_bytes: int) -> None:
        """Look at what is held now: own storages, and `host_slots` slots of `host_bytes` in all for the partner."""
        now: dict[int, int] = {}
        full: dict[int, int] = {}
        for seen in self._seen.values():
            now[seen.microbatch] = now.get(seen.microbatch, 0) + seen.nbytes_now()
            full[seen.microbatch] = full.get(seen.microbatch, 0) + seen.nbytes
        # What cannot move stays when a micro-batch leaves: one that has less than half of its bytes here is away.
        here = sum(1 for microbatch, nbytes in now.items() if microbatch >= 0 and 2 * nbytes > full[microbatch])
        own_bytes = sum(nbytes for microbatch, nbytes in now.items() if microbatch >= 0)
        self.peak_microbatches = max(self.peak_microbatches, here + host_slots)
        self.peak_bytes = max(self.peak_bytes, own_bytes + host_bytes)
