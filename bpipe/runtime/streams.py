"""Order transfers and computation on a device's streams. The only file that names `torch.cuda`.

In: a device. Out: a context in which a transfer starts behind what compute has issued so far. Knows no schedule and no bytes.
On a CPU everything a rank issues is already in order, so nothing has to be said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Streams:
    """One stream for evictions and one for loads beside the compute stream. The host never blocks here."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            # High priority: a transfer's few blocks must not queue behind a whole layer's.
            self._out = torch.cuda.Stream(device, priority=-1)
            self._back = torch.cuda.Stream(device, priority=-1)

    @contextlib.contextmanager
    def outward(self) -> Iterator[None]:
        """Evictions and returns start here. [1] They wait for what compute has issued: it writes what they read."""
        with self._behind_compute(self._out if self._cuda else None):
            yield

    @contextlib.contextmanager
    def homeward(self) -> Iterator[None]:
        """Loads and hostings start here. [4][5] They wait for compute: it allocated, and last used, what they write."""
        with self._behind_compute(self._back if self._cuda else None):
            yield

    @contextlib.contextmanager
    def _behind_compute(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        stream.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(stream):
            yield
