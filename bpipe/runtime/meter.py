"""Measure what a rank's saved activations really occupy, from the storages themselves.

In: the storages each forward saved. Out: bytes and micro-batches held now, and their peaks. Knows no schedule and no prediction.

It keeps weak references only: a storage that autograd freed is gone, one that was emptied in place counts as the bytes it still has.
Storages that somebody besides one micro-batch's graph holds (parameters, masks, tables, the data iterator's own batch) are not a
micro-batch's activations and do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bpipe.ir.action import Action
from bpipe.runtime.capture import Found


@dataclass
class _Seen:
    reference: StorageWeakRef
    owner: tuple[int, int] | None
    nbytes: int

    def nbytes_now(self) -> int:
        if self.reference.expired():
            return 0
        storage = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)
        return 0 if storage is None else int(storage.nbytes())


class Meter:
    """Peaks of one rank. `saved_bytes[stage]` is what one micro-batch saves, counted once its forward has finished.

    `received_bytes` is the part of it that the stage received: a pipeline loop may hold that longer than the backward needs it.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._common: dict[int, StorageWeakRef] = {}
        self.peak_microbatches = 0
        self.peak_bytes = 0
        self.saved_bytes: dict[int, int] = {}
        self.received_bytes = 0

    def begin(self) -> None:
        """A new iteration: peaks start over, what is known of the storages that all micro-batches share stays."""
        self.peak_microbatches = self.peak_bytes = 0
        self.saved_bytes = {}
        # While it is referred to weakly, a storage's address serves no other; what died is let go of here, once an iteration.
        self._seen = {key: seen for key, seen in self._seen.items() if not seen.reference.expired()}
        self._common = {key: reference for key, reference in self._common.items() if not reference.expired()}
        for seen in self._seen.values():
            # Still alive although its micro-batch is long over: somebody else holds it, so it is nobody's activation.
            seen.owner = None

    def saved(self, forward: Action, found: Sequence[Found], inputs: Sequence[torch.Tensor | None] = ()) -> None:
        """A forward has finished and saved these storages; `inputs` are what the stage received for it."""
        received = {tensor.untyped_storage()._cdata for tensor in inputs if tensor is not None}
        self.received_bytes = sum(item.nbytes for item in found if item.storage._cdata in received)
        owner = (forward.stage, forward.microbatch)
        mine = 0
        for item in found:
            key = item.storage._cdata
            if not item.alone or key in self._common:
                continue
            seen = self._seen.get(key)
            if seen is not None and seen.owner != owner:
                self._common[key] = self._seen.pop(key).reference
                continue
            self._seen[key] = _Seen(StorageWeakRef(item.storage), owner, item.nbytes)
            mine += item.nbytes
        self.saved_bytes[forward.stage] = max(self.saved_bytes.get(forward.stage, 0), mine)

    def sample(self, host_slots: int, host_bytes: int) -> int:
        """Look at what is held now, in bytes: own storages, and `host_slots` slots of `host_bytes` in all for the partner."""
        now: Counter[tuple[int, int]] = Counter()
        full: Counter[tuple[int, int]] = Counter()
        for seen in self._seen.values():
            if seen.owner is not None:
                now[seen.owner] += seen.nbytes_now()
                full[seen.owner] += seen.nbytes
        # What cannot move stays when a micro-batch leaves: one that has less than half of its bytes here is away.
        here = sum(1 for owner, nbytes in now.items() if 2 * nbytes > full[owner])
        self.peak_microbatches = max(self.peak_microbatches, here + host_slots)
        held = now.total() + host_bytes
        self.peak_bytes = max(self.peak_bytes, held)
        return held
