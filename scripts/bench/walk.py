"""Measure what an eviction takes of the main thread before its bytes move. In: nothing. Out: a table on stdout.

A graph of 28 layers, about as many nodes as a stage of a large model has, with tiny tensors: only Python and what it
calls are measured, in processor time of this thread. All rows alternate. The evictions are the engine's own, the first
over a transport that takes all bytes in one call, as one-sided ones do, the second over torch's process group that
sends nothing, with one operation a storage, as NCCL has it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bpipe.ir.action import Action, Kind
from bpipe.runtime.capture import Claims, find
from bpipe.runtime.evictor import Evictor
from bpipe.runtime.graph import nodes_of
from bpipe.runtime.kept import Kept
from bpipe.runtime.retrace import Retrace
from bpipe.runtime.streams import Streams
from bpipe.transport.base import Done
from bpipe.transport.distributed import Distributed, PairGroups
from bpipe.transport.layout import Sizes

LAYERS, WIDTH, ROUNDS = 28, 16, 60
CPU = torch.device("cpu")


Weights = Sequence[Sequence[torch.Tensor]]


def layer(x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attention of two heads and an MLP, each behind a norm."""
    norm, norm_bias, qkv, qkv_bias, out, out_bias, up, up_bias, down, down_bias = parameters
    hidden = torch.nn.functional.layer_norm(x, (WIDTH,), norm, norm_bias)
    heads = (hidden @ qkv + qkv_bias).unflatten(-1, (2, -1)).transpose(0, 1).transpose(1, 2).chunk(3, -1)
    context = torch.nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2])
    x = x + (context.transpose(1, 2).transpose(0, 1).flatten(-2) @ out + out_bias)
    hidden = torch.nn.functional.layer_norm(x, (WIDTH,), norm, norm_bias)
    return x + (torch.nn.functional.gelu(hidden @ up + up_bias) @ down + down_bias)


def make_parameters() -> list[torch.Tensor]:
    """Return those of one layer."""
    shapes: list[tuple[int, ...]] = [(WIDTH,)] * 2
    for columns in (3 * WIDTH, WIDTH, WIDTH, WIDTH):
        shapes += [(WIDTH, columns), (columns,)]
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def forward(weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    received = torch.randn(2, 4, WIDTH, requires_grad=True)
    output = received
    for of_layer in weights:
        output = layer(output, of_layer)
    return output, received


class OneCall(Distributed):
    """Takes the bytes of an eviction in one call that moves nothing."""

    def __init__(self) -> None:
        """Has no groups."""

    def announce(self, sizes: Sizes) -> Any:
        return Done()

    def put(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Any:
        return Done()


class OneCallAStorage(OneCall):
    """Starts an operation a storage in a process group that sends nothing."""

    def __init__(self) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._groups = PairGroups(1, world, world)

    def put(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Any:
        return self._send(tensors)


class Evictions:
    """Evictions of micro-batches of stage 0, all alike, by the engine's own evictor."""

    def __init__(self, transport: OneCall, weights: Weights) -> None:
        kept = Kept(0, None)
        kept.shares({})  # Nothing asks what is saved besides, as in all iterations but the first.
        stages = [frozenset({0})]
        streams = Streams(CPU)
        self._evictor = Evictor(stages, transport, streams, CPU, 0, False, lambda pending, *_: None, kept, Claims())
        self._weights = weights
        for _ in range(2):  # The first says how large they are, and where they are saved.
            self.processor_s()

    def processor_s(self) -> float:
        """Return the processor seconds of one eviction."""
        output, received = forward(self._weights)
        computed = Action(0, Kind.FORWARD, 0)
        self._evictor.begin()
        self._evictor.remember(computed, [output.grad_fn], [received], [output])
        if self._evictor.unmeasured(0):
            self._evictor.measure(computed)
        spent_s = seconds(lambda: self._evictor.evict(Action(0, Kind.EVICT, 0), 0))
        self._evictor.abandon()
        return spent_s


def seconds(work: Callable[[], object]) -> float:
    begin_s = time.thread_time()
    work()
    return time.thread_time() - begin_s


def main() -> int:
    torch.set_num_threads(1)
    weights = [make_parameters() for _ in range(LAYERS)]
    output, received = forward(weights)
    leaving = [item.storage for item in find([output.grad_fn], [received], CPU) if item.alone]
    retrace = Retrace.of([output.grad_fn], leaving)
    assert retrace is not None
    num_leaving = len(leaving)
    del leaving
    output, received = forward(weights)
    roots, inputs = [output.grad_fn], [received]
    assert len(retrace.find(roots, inputs) or ()) == num_leaving
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    one_call, one_each = Evictions(OneCall(), weights), Evictions(OneCallAStorage(), weights)
    rows: dict[str, Callable[[], float]] = {
        "look at everything": lambda: seconds(lambda: find(roots, inputs, CPU)),
        "look where it was": lambda: seconds(lambda: retrace.find(roots, inputs)),
        "evict, one call": one_call.processor_s,
        "evict, a call a storage": one_each.processor_s,
    }
    spent_s: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(ROUNDS):
        for name, measure in rows.items():
            spent_s[name].append(measure())
    print(
        f"{sum(1 for _ in nodes_of(roots))} nodes, {num_leaving} storages leave, {ROUNDS} rounds; processor "
        f"milliseconds"
    )
    for name, each in spent_s.items():
        low, _, high = statistics.quantiles(each, n=4)
        print(f"{name:<24} {statistics.median(each) * 1e3:6.2f} ({low * 1e3:.2f} to {high * 1e3:.2f}, the middle half)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
