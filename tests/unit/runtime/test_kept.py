"""What of a forward's activations leaves: counted by an allocator or by the graph, and named where it is little.

The allocator is one of the CPU's own: it counts every storage that an operation makes, as long as that lives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from bpipe.runtime.capture import SavedStorage
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.retention import ALLOCATOR, STORAGES, Kept, Share
from bpipe.transport.config import TransferConfig
from tests.unit.runtime.loop import WIDTH, new_weight, run_iteration, schedule
from tests.unit.runtime.loop import stage as plain_stage
from tests.unit.runtime.test_engine import CPU, LateTransport, engine_for

Stage = Callable[[torch.nn.Parameter, torch.Tensor], torch.Tensor]
ROWS = 16
A_TENSOR = ROWS * WIDTH * 4


class Allocator(TorchDispatchMode):
    """Counts the bytes of all storages that were made under it and are still there."""

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
    """What the engine says of stage 0 after an iteration."""
    plan = schedule()
    with Allocator() as allocator:
        allocated = allocator.allocated if counted_by == ALLOCATOR else None
        config = EngineConfig(
            "rank 0", CPU, TransferConfig(minimum_bytes=minimum_bytes, timeout_s=1.0, poison=True), allocated=allocated
        )
        engine = Engine(plan, 0, LateTransport(), config)
        run_iteration(engine, plan, new_weight(), forward=forward)
    found = engine.shares[0]
    assert found.counted_by == counted_by
    assert found.moved_bytes == engine.moved_bytes[0]
    return found


@pytest.mark.parametrize("counted_by", [ALLOCATOR, STORAGES])
def test_where_all_that_is_kept_moves_the_fraction_is_one(counted_by: str) -> None:
    """The weight is everybody's, the stage's output the loop frees, and caches of the first forward are nobody's:
    none of them counts."""
    caches: list[torch.Tensor] = []

    def forward(weight: torch.nn.Parameter, x: torch.Tensor) -> torch.Tensor:
        if not caches:
            caches.append(torch.zeros(1_000_000))
        return plain_stage(weight, x)

    found = share(forward, counted_by)
    assert found.kept_bytes == found.moved_bytes > 0
    assert found.fraction == 1
    assert found.enough


@pytest.mark.parametrize("counted_by", [ALLOCATOR, STORAGES])
def test_what_somebody_else_holds_stays_and_is_named(counted_by: str) -> None:
    held: list[torch.Tensor] = []

    def forward(weight: torch.nn.Parameter, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.exp(x @ weight)
        held.append(hidden)
        return torch.softmax(hidden.sin(), dim=-1).cos()

    found = share(forward, counted_by)
    assert found.kept_bytes == found.moved_bytes + A_TENSOR
    assert found.staying == {"saved by ExpBackward0 and held elsewhere too": A_TENSOR}
    assert not found.enough
    assert "stage 0 moves 0.67 of what a forward keeps for its backward" in found.sentence
    assert found.sentence.endswith("What stays: 0.002048 MB saved by ExpBackward0 and held elsewhere too")


@pytest.mark.parametrize("counted_by", [ALLOCATOR, STORAGES])
def test_what_is_too_small_stays_and_is_named(counted_by: str) -> None:
    def forward(weight: torch.nn.Parameter, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x @ weight) * torch.exp(x.sum(dim=-1, keepdim=True))

    found = share(forward, counted_by, minimum_bytes=A_TENSOR)
    assert found.staying == {"in storages below --bpipe-min-bytes": ROWS * 4}
    assert found.enough
    assert "What stays" not in found.sentence


class Hiding(torch.autograd.Function):
    """Keeps a tensor where no walk looks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.anything = {"hidden": [torch.exp(x), torch.exp(x)]}
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.anything["hidden"][0]


def test_what_no_node_shows_only_the_allocator_counts() -> None:
    def forward(weight: torch.nn.Parameter, x: torch.Tensor) -> torch.Tensor:
        return Hiding.apply(torch.exp(x @ weight)).cos()

    seen = share(forward, STORAGES)
    assert seen.fraction == 1
    found = share(forward, ALLOCATOR)
    assert found.moved_bytes == seen.moved_bytes
    assert found.kept_bytes == found.moved_bytes + 2 * A_TENSOR
    assert found.fraction == 0.6
    assert found.sentence.endswith("What stays: 0.004096 MB not shown by the graph")


def test_nodes_that_hide_are_named_beside_what_the_graph_does_not_show() -> None:
    hidden = Share(0, 600, 1000, ALLOCATOR, {}, {"torch::jit::DifferentiableGraphBackward": 2})
    assert "which hides what torch::jit::DifferentiableGraphBackward (2) saved" in hidden.sentence


def test_one_number_from_two_sources() -> None:
    """The middle of what the allocator says, if there is one, and what the walk found where there is none."""
    readings = iter([0, 100, 0, 300, 0, 120])
    kept = Kept(minimum_bytes=1, allocated=lambda: next(readings))
    for microbatch in range(4):
        if microbatch:
            kept.starts()
        kept.ran(0, microbatch, (), ())
    assert kept.shares({0: 90})[0].kept_bytes == 120
    assert Kept(minimum_bytes=1, allocated=None).shares({0: 90}) == {}


def test_it_is_measured_in_the_first_iteration_only() -> None:
    plan = schedule()
    asked: list[int] = []

    def allocated() -> int:
        asked.append(1)
        return 0

    config = EngineConfig("rank 0", CPU, TransferConfig(minimum_bytes=1, timeout_s=1.0), allocated=allocated)
    engine = Engine(plan, 0, LateTransport(), config)
    run_iteration(engine, plan, new_weight())
    assert (first := len(asked)) > 0
    run_iteration(engine, plan, new_weight())
    assert len(asked) == first


def test_an_acceptor_measures_nothing() -> None:
    plan = schedule()
    transport = LateTransport()
    transport.sizes = {0: (64,)}
    engine = engine_for(plan, transport, rank=3)
    run_iteration(engine, plan, new_weight(), rank=3)
    assert engine.shares == {}


def test_what_slices_share_is_none_of_ones_own() -> None:
    """Keys of a whole micro-batch stay, as planned: they are no reason to say that little memory is freed."""
    own, keys = (torch.ones(number).untyped_storage() for number in (100, 400))
    found = [SavedStorage(own, own.nbytes(), True, "Mul"), SavedStorage(keys, keys.nbytes(), False, "Bmm")]
    for shared, fraction in (
        (lambda storage: storage.data_ptr() == keys.data_ptr(), 1.0),
        (lambda storage: False, 0.2),
    ):
        kept = Kept(1, None, shared)
        kept.ran(0, 0, (), ())
        kept.saw(0, found, {}, own.nbytes())
        share = kept.shares({0: own.nbytes()})[0]
        assert share.fraction == fraction
        assert ("little memory is freed" in share.sentence) is (fraction < 1)


def test_attention_that_runs_unfused_is_named() -> None:
    """Transformer Engine fell back to unfused attention on a GPU. Only the bytes of a micro-batch showed it."""

    def unfused(weight: torch.nn.Parameter, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ weight, dim=-1).cos()

    scores = share(unfused, STORAGES)
    assert scores.softmax_bytes == A_TENSOR
    assert scores.sentence.endswith("; 0.002048 MB are attention scores: attention runs unfused")
    router = Share(0, 1000, 1000, ALLOCATOR, {}, {}, softmax_bytes=10)
    assert "unfused" not in router.sentence
    assert not share(lambda weight, x: torch.log_softmax(x @ weight, dim=-1).cos(), STORAGES).softmax_bytes
