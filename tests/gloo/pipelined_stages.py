"""Stages of a small transformer for torch.distributed.pipelining, and a function that trains them by a schedule.

The bits of a training are the losses of all micro-batches, the outputs, and gradients and weights after the last
step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")
WIDTH, VOCABULARY, HEADS = 48, 80, 4
ROWS, LENGTH = 2, 16

Wrap = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        rows, length, width = x.shape
        split = self.qkv(self.first_norm(x)).view(rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*split, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        added: torch.Tensor = self.down(nn.functional.gelu(self.up(self.second_norm(x))))
        return x + added


class Part(nn.Module):
    """One stage: the first embeds, the last makes logits."""

    def __init__(self, stage: int, num_stages: int, block: Callable[[], nn.Module] = Block, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else None
        self.blocks = nn.ModuleList([block() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, VOCABULARY) if stage == num_stages - 1 else None

    def forward(self, x: torch.Tensor) -> Any:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


class Several(Part):
    """Passes on three tensors, one of them without a gradient, and takes two more by keyword."""

    def forward(
        self,
        x: torch.Tensor,
        side: torch.Tensor | None = None,
        numbers: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> Any:
        if self.embedding is not None:
            numbers, x = x, self.embedding(x)
            side = x.mean(-1, keepdim=True)
        for block in self.blocks:
            x = block(x, mask)
        assert side is not None
        x = x + side * 0.1 + (0 if bias is None else bias.view(-1, 1, 1))
        return (x, side + x.std(-1, keepdim=True), numbers) if self.head is None else self.head(x)


class Pair(Part):
    """Passes on two tensors, to another rank or to a stage of the same rank."""

    def forward(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Any:
        if self.embedding is not None:
            x = self.embedding(x)
            side = x.mean(-1, keepdim=True)
        for block in self.blocks:
            x = block(x)
        assert side is not None
        x = x + side * 0.1
        return (x, side + x.std(-1, keepdim=True)) if self.head is None else self.head(x)


class _Deferring(torch.autograd.Function):
    """A product whose weight gradient is computed when its owner asks for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, owner: Deferred) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.owner = owner
        return x @ owner.weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,), owner = ctx.saved_tensors, ctx.owner
        owner.waiting.append((x.detach().flatten(0, -2), gradients[0].flatten(0, -2)))
        return gradients[0] @ owner.weight, None


class Deferred(nn.Module):
    """A linear layer that defers its weight gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> Any:
        return torch.nn.functional.gelu(_Deferring.apply(x, self))  # type: ignore[no-untyped-call]


class DeferredBlock(nn.Module):
    """Two deferred layers, recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Deferred(), Deferred())

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.layers, x, use_reentrant=False)


def deferred_stages(indices: Sequence[int], num_stages: int) -> list[PipelineStage]:
    """Return stages that defer their weight gradients themselves, by torch's `dw_builder`."""

    def builder(module: nn.Module) -> Callable[[], Callable[[], None]]:
        def build() -> Callable[[], None]:
            of_backward = [(layer, layer.waiting.pop()) for layer in module.modules() if isinstance(layer, Deferred)]

            def compute() -> None:
                for layer, (x, gradient) in of_backward:
                    wgrad = gradient.t() @ x
                    layer.weight.grad = wgrad if layer.weight.grad is None else layer.weight.grad + wgrad

            return compute

        return build

    stages = []
    for index in indices:
        torch.manual_seed(100 + index)
        module = Part(index, num_stages, DeferredBlock)
        stages.append(PipelineStage(module, index, num_stages, CPU, dw_builder=builder(module)))
    return stages


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def stages_of(
    indices: Sequence[int],
    num_stages: int,
    make: Callable[[int, int], nn.Module] = Part,
    wrap: Wrap = lambda module: module,
    **options: Any,
) -> list[PipelineStage]:
    """Build stages; the same stage has the same weights in every call."""
    stages = []
    for index in indices:
        torch.manual_seed(100 + index)
        stages.append(PipelineStage(wrap(make(index, num_stages)), index, num_stages, CPU, **options))
    return stages


def batch(step: int, num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7 + step)
    shape = num_microbatches * ROWS, LENGTH
    return tuple(torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(2))  # type: ignore[return-value]


Bits = dict[str, Any]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def steps_of(
    schedule: Any,
    stages: Sequence[PipelineStage],
    num_microbatches: int,
    num_steps: int = 2,
    keywords: Mapping[str, Any] | None = None,
    first_step: int = 0,
    **options: Any,
) -> Bits:
    """Train, and return the bits."""
    is_first, is_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    parameters = {
        f"{stage.stage_index}.{name}": parameter
        for stage in stages
        for name, parameter in stage.submod.named_parameters()
    }
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    losses: list[str] = []
    gradients: dict[str, torch.Tensor] = {}
    for step in range(first_step, first_step + num_steps):
        inputs, target = batch(step, num_microbatches)
        of_step: list[torch.Tensor] = []
        output = schedule.step(
            *([inputs] if is_first else []),
            target=target if is_last else None,
            losses=of_step if is_last else None,
            **(keywords or {}),
            **options,
        )
        losses += [float(loss.detach()).hex() for loss in of_step]
        losses += [] if output is None else [float(local(output).detach().double().sum()).hex()]
        gradients = {
            name: local(parameter.grad).clone() for name, parameter in parameters.items() if parameter.grad is not None
        }
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: local(parameter).detach().clone() for name, parameter in parameters.items()}
    return {"losses": losses, "gradients": gradients, "weights": weights}


def steps_and_evaluation(schedule: Any, stages: Sequence[PipelineStage], num_microbatches: int) -> Bits:
    """Run steps with keywords, an evaluation between them, and a step without outputs."""
    rows = num_microbatches * ROWS
    mask = torch.zeros(rows, 1, LENGTH, LENGTH).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), float("-inf"))
    keywords = {"mask": mask, "bias": torch.arange(float(rows)) / 10}
    first = steps_of(schedule, stages, num_microbatches, keywords=keywords)
    is_first, is_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    inputs, target = batch(9, num_microbatches)
    losses: list[torch.Tensor] = []
    with torch.no_grad():
        output = schedule.eval(
            *([inputs] if is_first else []),
            target=target if is_last else None,
            losses=losses if is_last else None,
            **keywords,
        )
    evaluated = [] if output is None else [float(output.double().sum()).hex(), *(float(loss).hex() for loss in losses)]
    assert bool(evaluated) is is_last
    last = steps_of(schedule, stages, num_microbatches, 1, keywords=keywords, first_step=2, return_outputs=False)
    return {**last, "losses": [*first["losses"], *evaluated, *last["losses"]]}


def same(expected: Bits, actual: Bits) -> bool:
    return expected["losses"] == actual["losses"] and all(
        expected[kind].keys() == actual[kind].keys()
        and all(torch.equal(expected[kind][name], actual[kind][name]) for name in expected[kind])
        for kind in ("gradients", "weights")
    )
