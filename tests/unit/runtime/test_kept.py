"""How much of a forward's activations is moved, counted by an allocator on the CPU or by the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.retention import ALLOCATOR, STORAGES, Share
from bpipe.transport.config import TransferConfig
from tests.unit.runtime.loop import WIDTH, new_weight, run_iteration, schedule
from tests.unit.runtime.test_engine import CPU, LateTransport

Stage = Callable[[torch.nn.Parameter, torch.Tensor], torch.Tensor]
ROWS = 16
A_TENSOR = ROWS * WIDTH * 4


class Allocator(TorchDispatchMode):
    """Counts the bytes of all storages that were created under it and are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._storages.setdefault(storage._cdata, StorageWeakRef(storage))
        return result

    def allocated(self) -> int:
        self._storages = {key: reference for key, reference in self._storages.items() if not reference.expired()}
        alive = [torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference in self._storages.values()]
        return sum(storage.nbytes() for storage in alive if storage is not None)


def share(forward: Stage, counted_by: str, minimum_bytes: int = 1) -> Share:
    """The share that the engine reports for stage 0 after an iteration."""
    plan = schedule()
    with Allocator() as allocator, pytest.MonkeyPatch.context() as patches:
        allocated = allocator.allocated if counted_by == ALLOCATOR else None
        patches.setattr("bpipe.runtime.engine.allocated_on", lambda device: allocated)
        config = EngineConfig("rank 0", CPU, TransferConfig(minimum_bytes=minimum_bytes, timeout_s=1.0, poison=True))
        engine = Engine(plan, 0, LateTransport(), config)
        run_iteration(engine, plan, new_weight(), forward=forward)
    share = engine.shares[0]
    assert share.counted_by == counted_by
    assert share.moved_bytes == engine.moved_bytes[0]
    return share


@pytest.mark.parametrize("counted_by", [ALLOCATOR, STORAGES])
def test_what_somebody_else_holds_stays_and_is_named(counted_by: str) -> None:
    tensors: list[torch.Tensor] = []

    def forward(weight: torch.nn.Parameter, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.exp(x @ weight)
        tensors.append(hidden)
        return torch.softmax(hidden.sin(), dim=-1).cos()

    result = share(forward, counted_by)
    assert result.kept_bytes == result.moved_bytes + A_TENSOR
    assert result.staying == {"saved by ExpBackward0 and held elsewhere too": A_TENSOR}
    assert not result.enough
    assert "stage 0 moves 0.67 of what a forward keeps for its backward" in result.sentence
    assert result.sentence.endswith("What stays: 0.002048 MB saved by ExpBackward0 and held elsewhere too")


def test_nodes_that_hide_are_named_beside_what_the_graph_does_not_show() -> None:
    hidden = Share(0, 600, 1000, ALLOCATOR, {}, {"torch::jit::DifferentiableGraphBackward": 2})
    assert "which hides what torch::jit::DifferentiableGraphBackward (2) saved" in hidden.sentence
