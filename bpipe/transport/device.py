"""What transports ask of a rank's device. Made by `bpipe.runtime.streams.copying_on`; the transports themselves name no `torch.cuda`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from bpipe.transport.lanes import CopyLane


@dataclass(frozen=True)
class Device:
    """A device, and how to make lanes, a lane for posting, to wait for it, to name its current stream, and to give back what torch's
    allocator keeps unused. What is issued inside of `apart()` goes to a stream of its own, from any thread."""

    device: torch.device
    lanes: Callable[[torch.device, float], tuple[CopyLane, CopyLane]]
    posting: Callable[[torch.device, float], CopyLane]
    synchronize: Callable[[torch.device], None]
    current_stream: Callable[[], int]
    empty_cache: Callable[[], None]
    apart: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"
