"""What checkpointed regions and distributed tensors keep is found, moved, and brought back with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from bpipe.runtime.capture import Retrace, find
from bpipe.runtime.graph import Regions, nodes_of, saved_names
from tests.unit.runtime.test_capture import there_and_back

CPU = torch.device("cpu")
ROWS, WIDTH = 4, 8
BYTES = 4 * ROWS * WIDTH


class Body:
    """Two matrix products; counts its runs."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.weights = [torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator)) for _ in range(2)]
        self.runs = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return torch.softmax(x @ self.weights[0], dim=-1) @ self.weights[1] + x


def received() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5)).requires_grad_()


def selective() -> Any:
    """Keep the products and recompute the rest."""

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = function == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def whole(body: Body, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(checkpoint(body, torch.sin(x), use_reentrant=False))


def cached(body: Body, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(checkpoint(body, torch.sin(x), use_reentrant=False, context_fn=selective))


def nested(body: Body, x: torch.Tensor) -> torch.Tensor:
    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(body, torch.cos(x), use_reentrant=False)

    return torch.tanh(checkpoint(outer, torch.sin(x), use_reentrant=False))


def gradients(
    run: Callable[[Body, torch.Tensor], torch.Tensor], moving: bool
) -> tuple[list[torch.Tensor], list[int], int]:
    """The gradients of input and weights, the sizes of movable storages, and the body's runs before backward."""
    body, x = Body(), received()
    out = run(body, x)
    storages = [item for item in find([out.grad_fn], [x], CPU) if item.alone] if moving else []
    runs = body.runs
    there_and_back(storages)
    sizes = [item.nbytes for item in storages]
    del storages
    return list(torch.autograd.grad(out.sum(), [x, *body.weights])), sizes, runs


@pytest.mark.parametrize(
    ("run", "num_storages"),
    # The received x (of sin), the region's argument, and tanh's output; also both products if they are kept.
    [(whole, 3), (cached, 5), (nested, 3)],
)
@pytest.mark.parametrize("early_stop", [True, False])
def test_regions_move_and_are_computed_again_with_the_same_bits(
    run: Callable[[Body, torch.Tensor], torch.Tensor], num_storages: int, early_stop: bool
) -> None:
    """The walk used to refuse regions: reading a saved tensor would have recomputed the region each time."""
    with set_checkpoint_early_stop(early_stop):
        expected, _, _ = gradients(run, moving=False)
        actual, sizes, runs = gradients(run, moving=True)
    assert runs == 1
    # `out` holds the output of tanh, as the loop holds a stage's output.
    assert sizes == [BYTES] * (num_storages - 1)
    assert all(map(torch.equal, expected, actual))


def test_what_a_region_keeps_is_not_looked_up_by_its_place() -> None:
    """A region's tensors belong to no node, so those of another micro-batch are found only by a full search."""
    body, x = Body(), received()
    out = whole(body, x)
    storages = [item.storage for item in find([out.grad_fn], [x], CPU) if item.alone]
    assert Retrace.of([out.grad_fn], storages) is None
    assert Retrace.of([out.grad_fn], storages[:0]) is not None


@pytest.mark.parametrize("context", [None, selective])
def test_the_installed_torch_has_the_names_that_are_read(context: Any) -> None:
    """Fails if another version of torch keeps regions differently; regions are then refused, not missed."""
    x, body = received(), Body()
    call = partial(checkpoint, use_reentrant=False, **({} if context is None else {"context_fn": context}))
    out = call(body, torch.sin(x))
    regions = Regions()
    hooked = [regions.recomputes(node, name) for node in nodes_of([out.grad_fn]) for name in saved_names(type(node))]
    assert any(hooked)
    assert len(list(regions.tensors())) == (1 if context is None else 3)


def test_what_an_older_torch_saves_with_the_arguments_is_none_of_them() -> None:
    """Torch 2.11 keeps arguments at a node, after an empty tensor, which was taken for a movable storage."""

    class Saver(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, own: torch.Tensor, argument: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(own, argument)
            return torch.empty(0)

    x = received()
    regions = Regions()
    body = partial(Body(), x)
    regions._frames[0] = SimpleNamespace(
        input_saver=Saver.apply(torch.empty(0, requires_grad=True), x), recompute_fn=body
    )
    assert [id(tensor) for tensor, _ in regions.tensors()] == [id(x)]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one rank, without messages: gloo's threads hold a message's tensor for a moment after it arrives."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def spread_gradients(
    mesh: DeviceMesh, moving: bool, region: bool = False
) -> tuple[list[torch.Tensor], list[int], list[int]]:
    """For a product sharded by rows: the gradients, the sizes of movable storages, and of those that stay."""
    generator = torch.Generator().manual_seed(1)
    weight = distribute_tensor(torch.randn(WIDTH, WIDTH, generator=generator), mesh, [Replicate()]).requires_grad_()
    received = torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()
    spread = DTensor.from_local(received, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(0)])

    def body(x: DTensor) -> DTensor:
        # The product with the transpose saves a view of a wrapper.
        hidden = torch.exp(x @ weight)
        return (hidden.transpose(0, 1) @ hidden).sin()

    out = checkpoint(body, spread, use_reentrant=False) if region else body(spread)
    del spread
    storages = find([out.grad_fn], [received], CPU)
    leaving, staying = ([item for item in storages if item.alone is alone] for alone in (True, False))
    if moving:
        there_and_back(leaving)
    sizes = sorted(item.nbytes for item in leaving), sorted(item.nbytes for item in staying)
    del storages, leaving, staying
    return list(torch.autograd.grad(out.sum().to_local(), [received, weight])), *sizes


def test_a_region_of_them_keeps_its_argument_and_no_more(mesh: DeviceMesh) -> None:
    expected, _, _ = spread_gradients(mesh, moving=False)
    actual, leaving, staying = spread_gradients(mesh, moving=True, region=True)
    assert (leaving, staying) == ([BYTES], [])
    assert torch.equal(expected[0], actual[0])


def test_a_mesh_gives_a_cpu_an_index_and_it_is_the_same_cpu() -> None:
    """Nothing was moved, and no message said so, because the stage's device was cpu:0."""
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    assert [item.alone for item in find([(x * x).sum().grad_fn], [x], torch.device("cpu:0"))] == [True]
