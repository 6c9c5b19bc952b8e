"""What transports ask of a rank's device. Made by `bpipe.runtime.streams.copying_on`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from bpipe.transport.cuda_runtime import LIBRARIES
from bpipe.transport.lanes import CopyLane


@dataclass(frozen=True)
class Device:
    """A device, and how to make lanes, to wait for it, to name its current stream, and to give back what torch's
    allocator keeps unused. What is issued inside of `apart()` goes to a stream of its own, from any thread."""

    device: torch.device
    lanes: Callable[[torch.device, float], tuple[CopyLane, CopyLane]]
    synchronize: Callable[[torch.device], None]
    current_stream: Callable[[], int]
    empty_cache: Callable[[], None]
    apart: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def has_runtime(self) -> bool:
        """Whether copy engines reach memory by its address, when a runtime such as CUDA's tells them to."""
        return self.device.type in LIBRARIES
