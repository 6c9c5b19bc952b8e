"""One pipeline stage alone, in plain torch: its neighbours are synthetic, its program and its engine are the real ones.

In: a schedule, a rank, and a stage to compute. Out: iterations, with an engine's two calls around every operation or without. Knows no
transport. A stage ends in a sum, so that nothing but the graph holds what it computed, as in a pipeline that has sent its output on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bpipe.ir.action import Action, Kind
from bpipe.ir.schedule import Schedule
from bpipe.ir.steps import steps
from gpu.common import hold_back

Held = dict[int, tuple[torch.Tensor, torch.Tensor]]


class Calls(Protocol):
    """What a loop calls: an engine, or somebody who only looks on."""

    def begin(self) -> None: ...

    def before(self, op: Action) -> None: ...

    def after(self, op: Action, outputs: Sequence[torch.Tensor | None] = (), inputs: Sequence[torch.Tensor | None] = ()) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class Loop:
    """A rank's pipeline loop. `received(microbatch)` is what the stage before would have sent."""

    plan: Schedule
    rank: int
    stage: Callable[[torch.Tensor], torch.Tensor]
    received: Callable[[int], torch.Tensor]

    def iteration(self, engine: Calls | None = None) -> None:
        held: Held = {}
        if engine:
            engine.begin()
        for step in steps(self.plan, self.rank)[1:-1]:
            assert step.compute is not None
            if step.compute.kind is Kind.FORWARD:
                self._forward(step.compute, held, engine)
            else:
                self._backward(step.compute, held, engine)
        if engine:
            engine.end()

    def _forward(self, op: Action, held: Held, engine: Calls | None) -> None:
        received = self.received(op.microbatch)
        if engine:
            engine.before(op)
        end = self.stage(received)
        if engine:
            engine.after(op, [end], [received])
        held[op.microbatch] = received, end

    def _backward(self, op: Action, held: Held, engine: Calls | None) -> None:
        if engine:
            engine.before(op)
        received, end = held.pop(op.microbatch)
        end.backward()
        del received, end
        if engine:
            engine.after(op)


@dataclass
class Delays:
    """How long each forward and each copy is held back; read whenever one starts."""

    forward_s: float = 0.0
    copy_s: float = 0.0


class SmallStage:
    """A stage whose every bit is the same each time: no kernel of it adds in an order that varies. `delays` hold it back in the middle."""

    def __init__(self, device: torch.device, rows: int, width: int, delays: Delays, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self._shape = rows, width
        self._device = device
        self._delays = delays
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator, device=device) / width**0.5)
        self._factor = torch.randn(rows, width, generator=generator, device=device)

    def __call__(self, received: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(received @ self.weight)
        hold_back(self._device, self._delays.forward_s)
        output = torch.softmax(hidden @ self.weight.t(), dim=-1) * hidden.sum(dim=-1, keepdim=True)
        return (output * self._factor).sum()

    def received(self, microbatch: int) -> torch.Tensor:
        generator = torch.Generator(self._device).manual_seed(1000 + microbatch)
        return torch.randn(self._shape, generator=generator, device=self._device).requires_grad_()

    def gradient(self) -> torch.Tensor:
        """What the last iteration added up; the next starts from nothing."""
        gradient, self.weight.grad = self.weight.grad, None
        assert gradient is not None
        return gradient


@dataclass(frozen=True)
class Shape:
    """A GPT stage: `recomputed` of its layers keep only their input and compute the rest again in the backward."""

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
    """Layers in bf16. Its gradients are summed in place, so memory is the same in each iteration."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self._device = device
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(shape, device, torch.bfloat16) for _ in range(shape.layers))
        self._factor = torch.randn(shape.batch, shape.sequence, shape.hidden, device=device, dtype=torch.bfloat16)

    def __call__(self, received: torch.Tensor) -> torch.Tensor:
        x = received
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=True, preserve_rng_state=False) if number < self.shape.recomputed else layer(x)
        return (x * self._factor).sum()

    def received(self, microbatch: int) -> torch.Tensor:
        shape = self.shape.batch, self.shape.sequence, self.shape.hidden
        return torch.randn(shape, device=self._device, dtype=torch.bfloat16).requires_grad_()

    def alone(self) -> None:
        """One forward and backward without a pipeline: gradients, workspaces and handles are there afterwards."""
        self(self.received(0)).backward()
