"""Say what an engine needs to know besides its schedule and its transports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from bpipe.runtime.checksums import Verifier
from bpipe.schedule.action import Action
from bpipe.transport.config import TransferConfig


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine."""

    name: str
    """This process in errors, such as "rank 3"."""

    device: torch.device
    """Where activations are computed."""

    transfers: TransferConfig
    """How they travel. For `differing`, both ranks of a pair and the transport must be made for it."""

    parts: Mapping[int, int] = field(default_factory=dict)
    """By stage, bytes of each micro-batch that leave; by default all that may."""

    allocated: Callable[[], int] | None = None
    """Bytes that the device's allocator has given out; None if nobody counts."""

    waiting: Callable[[Action], Sequence[torch.UntypedStorage]] = lambda backward: ()
    """What the caller keeps, besides the graph, from dgrad to wgrad."""

    between: Callable[[Action], Sequence[torch.UntypedStorage]] = lambda shard: ()
    """What the caller keeps of a micro-batch from S to T."""

    timed: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext()
    """Entered around everything that this rank does for balancing: issuing a transfer, and waiting for one."""

    shared: Callable[[torch.UntypedStorage], bool] = lambda storage: False
    """Whether several slices of a micro-batch share a storage, so that it stays, as planned."""

    verifier: Verifier | None = None
    """What checks what leaves and comes back."""

    at_once: bool = False
    """Whether the two computations of an overlap run at once, with one call for both, or one after the other."""

    links: Mapping[int, str] = field(default_factory=dict)
    """By the other's rank, the name of the transport, for the verifier's errors."""

    beside: Callable[[], Sequence[torch.Stream]] = lambda: ()
    """Streams, other than the current one, on which a stage computes parts of its forwards and backwards."""
