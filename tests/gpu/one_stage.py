"""A single pipeline stage in plain torch: its neighbours are synthetic, its program and its engine are real.

Runs iterations with an engine's calls around every operation, or without. A stage ends in a sum, so that only the graph
holds what it computed, as in a pipeline that has sent its output on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.executor import Executor
from bpipe.runtime.stage import TorchStages
from bpipe.schedule.schedule import Schedule
from bpipe.transport.config import TransferConfig
from bpipe.transport.distributed import Subject
from bpipe.transport.memory import DeviceMemory, DeviceRegion, Lender
from bpipe.transport.one_sided import HostMemory, Peer
from bpipe.transport.streams import Device, Done, Pending, synchronize
from tests.gpu.accelerators import Accelerator
from tests.gpu.common import drawn
from tests.support.alone import Alone

TIMEOUT_S = 120.0


def balanced(stages: int, microbatches: int) -> Schedule:
    return build(ScheduleConfig("1f1b", stages, microbatches, balance=BalanceConfig()))


def to_host(device: torch.device) -> HostMemory:
    """Return a transport into this process's own memory, with locked pages."""
    return HostMemory(Device(device), *Device(device).lanes(TIMEOUT_S))


def engine_of(
    plan: Schedule,
    rank: int,
    device: torch.device,
    transport: Any,
    minimum_bytes: int = 1,
    poison: bool = False,
    synchronous: bool = False,
    **more: Any,
) -> Engine:
    """Return an engine. `transport` is one transport, one for each other rank, or None."""
    transfers = TransferConfig(timeout_s=TIMEOUT_S, minimum_bytes=minimum_bytes, poison=poison, synchronous=synchronous)
    return Engine(plan, rank, transport, EngineConfig(f"stage {rank}", device, transfers, **more))


class OneWay:
    """A partner that sends the lengths of its storages, and nothing else."""

    def __init__(self, stage: int, lengths: Sequence[int]) -> None:
        self._sizes = [[stage, [*lengths]]]

    def send(self, about: Subject, value: Any) -> Pending:
        return Done()

    def receive(self, about: Subject) -> Any:
        return self._sizes


class KeptLender(DeviceMemory):
    """Lends as `peer` does, and keeps what it lent for inspection. `taken_bytes`: by how much free memory fell."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(Device(device))
        self._measured = device
        self.regions: list[DeviceRegion] = []
        self.taken_bytes = 0

    def make(self, nbytes: int) -> tuple[Any, DeviceRegion]:
        before = torch.accelerator.get_memory_info(self._measured)[0]
        handle, region = super().make(nbytes)
        self.taken_bytes += before - torch.accelerator.get_memory_info(self._measured)[0]
        self.regions.append(region)
        return handle, region


def lending(lender: Lender, device: torch.device, stage: int, lengths: Sequence[int]) -> Peer:
    """Return the acceptor's half of `peer` without a partner: it lends, and nothing arrives."""
    return Peer(OneWay(stage, lengths), lender, *Device(device).lanes(TIMEOUT_S))  # type: ignore[arg-type]


def loop_of(
    plan: Schedule, rank: int, stage: Callable[[torch.Tensor], torch.Tensor], received: Callable[[int], torch.Tensor]
) -> Executor:
    """Return a rank's pipeline loop. `received(microbatch)` is what the previous stage would have sent."""

    def part(microbatch: int, *unused: torch.Tensor) -> torch.Tensor:
        return stage(received(microbatch))

    return Executor(plan, rank, TorchStages({rank: part}), Alone())


class SmallStage:
    """A deterministic stage: none of its kernels adds in an order that varies.

    A forward may come late in its middle.
    """

    def __init__(self, on: Accelerator, rows: int, width: int, seed: int = 0) -> None:
        self._shape = rows, width
        self._on = on
        self.weight = nn.Parameter(drawn((width, width), seed, on.device) / width**0.5)
        self._factor = drawn((rows, width), seed + 1, on.device)

    def __call__(self, received: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(received @ self.weight)
        self._on.before_forward()
        output = torch.softmax(hidden @ self.weight.t(), dim=-1) * hidden.sum(dim=-1, keepdim=True)
        return (output * self._factor).sum()

    def received(self, microbatch: int) -> torch.Tensor:
        return drawn(self._shape, 1000 + microbatch, self._on.device).requires_grad_()

    def gradient_of(self, loop: Executor, engine: Engine | None) -> torch.Tensor:
        """Return the sum of an iteration's gradients; the next iteration starts from zero."""
        loop.run(engine)
        synchronize(self._on.device)
        gradient, self.weight.grad = self.weight.grad, None
        assert gradient is not None
        return gradient


@dataclass(frozen=True)
class Shape:
    """A GPT stage. `recomputed` of its layers keep only their input and recompute the rest in the backward."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int = 1
    recomputed: int = 0

    @property
    def num_parameters(self) -> int:
        return self.layers * 12 * self.hidden**2


class Layer(nn.Module):
    """A transformer layer of plain torch, without biases and dropout."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = shape.heads
        h = shape.hidden
        self.norms = nn.ModuleList(nn.LayerNorm(h, device=device, dtype=dtype) for _ in range(2))
        self.qkv, self.out, self.up, self.down = (
            nn.Linear(rows, columns, bias=False, device=device, dtype=dtype)
            for rows, columns in ((h, 3 * h), (h, h), (h, 4 * h), (4 * h, h))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x.shape
        mixed = self.qkv(self.norms[0](x)).view(batch, sequence, 3, self.heads, hidden // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4).unbind()
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, sequence, hidden))
        more: torch.Tensor = self.down(functional.gelu(self.up(self.norms[1](x)), approximate="tanh"))
        return x + more


class GptStage:
    """Layers in bf16. Gradients are summed in place, so memory is the same in each iteration."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self._device = device
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(shape, device, torch.bfloat16) for _ in range(shape.layers))
        self._factor = torch.randn(shape.batch, shape.sequence, shape.hidden, device=device, dtype=torch.bfloat16)

    def __call__(self, received: torch.Tensor) -> torch.Tensor:
        x = received
        for number, layer in enumerate(self.layers):
            x = (
                checkpoint(layer, x, use_reentrant=True, preserve_rng_state=False)
                if number < self.shape.recomputed
                else layer(x)
            )
        return (x * self._factor).sum()

    def received(self, microbatch: int) -> torch.Tensor:
        shape = self.shape.batch, self.shape.sequence, self.shape.hidden
        return torch.randn(shape, device=self._device, dtype=torch.bfloat16).requires_grad_()

    def alone(self) -> None:
        """Run one forward and backward without a pipeline, to allocate gradients, workspaces and handles."""
        self(self.received(0)).backward()
