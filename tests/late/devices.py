"""Late devices for torch: built, registered as the device type `late`, and reset for each case.

A `Draw` decides the order of operations that nothing else orders. A process has one kind of accelerator, so this is
never loaded together with a GPU's.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bpipe.transport import cuda_runtime
from tests.late import build

TYPE = "late"
CAPACITY_BYTES = 1 << 30
# Torch's autograd counts devices once per process.
NUM_DEVICES = 12
DRAWN, AS_LATE, COPIES_LAST, COMPUTE_LAST, STREAM_LAST = (
    "drawn",
    "as late as can be",
    "copies last",
    "compute last",
    "stream last",
)


@dataclass(frozen=True)
class Draw:
    """How late devices work in one run. The same draw gives the same run.

    Attributes:
        eagerness: Chance that a device runs another operation when it is given one; with 0, all wait for a host.
        connections: Hardware queues that all streams of a device share; 0 for one per stream.
        stream: The stream of `STREAM_LAST`.
        allocation_synchronizes: Whether torch's allocator waits for the device when it takes a new segment.
        lending_synchronizes: Whether a rank also waits for the device when it allocates memory for a partner.
        launch_blocks: Whether a host waits for each kernel, as with CUDA_LAUNCH_BLOCKING.
    """

    seed: int
    order: str = DRAWN
    stream: int = -1
    eagerness: float = 0.0
    connections: int = 0
    allocation_synchronizes: bool = False
    lending_synchronizes: bool = False
    launch_blocks: bool = False

    @staticmethod
    def of(seed: int) -> Draw:
        """Return a draw that follows from the seed."""
        chance = random.Random(seed)
        return Draw(
            seed,
            eagerness=chance.choice((0.0, 0.0, 0.3, 0.8)),
            connections=chance.choice((0, 0, 1, 2, 8)),
        )

    def __str__(self) -> str:
        queues = f"{self.connections or 'all'} queues"
        order = f"{self.order} {self.stream}" if self.order == STREAM_LAST else self.order
        allocating = "synchronizing" if self.allocation_synchronizes else "free"
        blocking = ", launches block" if self.launch_blocks else ""
        return f"seed {self.seed}, {order}, eagerness {self.eagerness:g}, {queues}, {allocating} allocation{blocking}"


# The streams of a rank's engine are the first high-priority ones that it takes: see `kStreamsPerPool` of
# csrc/machine.h.
OUTBOUND_STREAM, INBOUND_STREAM = 33, 34
DIRECTED = (
    *(Draw(1, order) for order in (AS_LATE, COPIES_LAST, COMPUTE_LAST)),
    *(Draw(1, STREAM_LAST, stream) for stream in (OUTBOUND_STREAM, INBOUND_STREAM)),
    *(Draw(1, order, connections=1) for order in (AS_LATE, COPIES_LAST, COMPUTE_LAST)),
)


def draws(seeds: int) -> tuple[Draw, ...]:
    """Return all directed orders, and this many random ones."""
    return (*DIRECTED, *(Draw.of(seed) for seed in range(seeds)))


@functools.cache
def extension() -> ModuleType:
    """Return the device, registered with torch. Raises `build.NoCompiler`."""
    module = build.load()
    torch.utils.rename_privateuse1_backend(TYPE)
    module_of_torch = ModuleType(f"torch.{TYPE}")
    calls: dict[str, Callable[..., object]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": module.devices,
        "current_device": lambda: torch.accelerator.current_device_index(),
        "set_device": torch.accelerator.set_device_index,
        "synchronize": torch.accelerator.synchronize,
        "manual_seed_all": lambda seed: None,
        # Kernels draw from the host's generator.
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
    }
    for name, call in calls.items():
        setattr(module_of_torch, name, call)
    torch._register_device_module(TYPE, module_of_torch)
    cuda_runtime.LIBRARIES[TYPE] = str(build.built())
    # All devices exist from the beginning, because a backward may run before `begin`.
    module.reset(NUM_DEVICES, 0, CAPACITY_BYTES, False, False, False)
    return module


def begin(draw: Draw, capacity: int = CAPACITY_BYTES) -> None:
    """Reset the devices. Nothing of the earlier ones may be used afterwards."""
    late = extension()
    # Draw nothing while the rest is freed.
    late.order(DRAWN, 0, -1, 0.0)
    late.reset(
        NUM_DEVICES,
        draw.connections,
        capacity,
        draw.allocation_synchronizes,
        draw.lending_synchronizes,
        draw.launch_blocks,
    )
    late.order(draw.order, draw.seed, draw.stream, draw.eagerness)
    torch.accelerator.set_device_index(0)


def device(index: int = 0) -> torch.device:
    # The name before registration: tests are collected without the device.
    return torch.device("privateuseone", index)


def before_the_first_backward(session: pytest.Session, folder: Path) -> None:
    """Build the device before any test runs, if tests of the folder will run.

    Torch's autograd counts a process's devices once, in the first backward (Engine::start_device_threads), which may be
    in another folder's test. Later backwards on a late device would fail.
    """
    if torch.cuda.is_available() or session.config.option.collectonly:
        return
    if any(folder in item.path.parents for item in session.items):
        with suppress(build.NoCompiler):
            extension()


def needed() -> None:
    """Skip if the device cannot be built; fail in CI, which can build it."""
    if torch.cuda.is_available():
        pytest.skip("torch supports one accelerator per process, and here that is a GPU")
    try:
        extension()
    except build.NoCompiler as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
