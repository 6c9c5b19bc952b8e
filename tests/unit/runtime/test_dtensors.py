"""Tensors that are spread over ranks: their local parts move as plain tensors do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from bpipe.runtime.capture import find
from tests.unit.runtime.test_capture import there_and_back

CPU = torch.device("cpu")
ROWS, WIDTH = 4, 8
BYTES = 4 * ROWS * WIDTH


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Of one rank, whose messages nothing carries: a thread of gloo's holds a message's tensor for a moment after the
    message has arrived, and on a busy machine a test found it held."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def gradients(mesh: DeviceMesh, moving: bool, region: bool = False) -> tuple[list[torch.Tensor], list[int], list[int]]:
    """Of a product that is spread by rows: gradients, bytes that may leave, and of those that stay."""
    generator = torch.Generator().manual_seed(1)
    weight = distribute_tensor(torch.randn(WIDTH, WIDTH, generator=generator), mesh, [Replicate()]).requires_grad_()
    received = torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()
    spread = DTensor.from_local(received, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(0)])

    def body(x: DTensor) -> DTensor:
        # A view of a wrapper is saved for the product of the transposed.
        hidden = torch.exp(x @ weight)
        return (hidden.transpose(0, 1) @ hidden).sin()

    out = checkpoint(body, spread, use_reentrant=False) if region else body(spread)
    del spread
    found = find([out.grad_fn], [received], CPU)
    leaving, staying = ([item for item in found if item.alone is alone] for alone in (True, False))
    if moving:
        there_and_back(leaving)
    sizes = sorted(item.nbytes for item in leaving), sorted(item.nbytes for item in staying)
    del found, leaving, staying
    return list(torch.autograd.grad(out.sum().to_local(), [received, weight])), *sizes


def test_a_region_of_them_keeps_its_argument_and_no_more(mesh: DeviceMesh) -> None:
    wanted, _, _ = gradients(mesh, moving=False)
    found, leaving, staying = gradients(mesh, moving=True, region=True)
    assert (leaving, staying) == ([BYTES], [])
    assert torch.equal(wanted[0], found[0])


def test_a_mesh_gives_a_cpu_an_index_and_it_is_the_same_cpu() -> None:
    """Nothing moved, and nothing was said: the stage's device was cpu:0."""
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    assert [item.alone for item in find([(x * x).sum().grad_fn], [x], torch.device("cpu:0"))] == [True]
