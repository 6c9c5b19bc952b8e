"""Follow the bytes of all tensors that operations make, on a device that counts nothing.

In: operations, as they run. Out: the most bytes that were alive at once. Knows no model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts what is made while it is entered; `most_bytes` is the peak, looked at behind every operation."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most_bytes = 0
        self._device = device.type
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def bytes_now(self) -> int:
        """Bytes of what was made and is still there."""
        self._alive = {address: one for address, one in self._alive.items() if not one[0].expired()}
        return sum(nbytes for _, nbytes in self._alive.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        made = [one for one in torch.utils._pytree.tree_leaves(result) if isinstance(one, torch.Tensor)]
        known = {
            one.untyped_storage()._cdata
            for one in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(one, torch.Tensor)
        }
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage.device.type == self._device:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most_bytes = max(self.most_bytes, self.bytes_now)
        return result
