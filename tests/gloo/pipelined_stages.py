"""Stages of a small transformer for torch.distributed.pipelining, and steps of them by a schedule.

In: stage numbers and a schedule. Out: bits: the losses of every micro-batch, the outputs, and gradients and weights
behind the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

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


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def stages_of(
    indices: Sequence[int],
    num_stages: int,
    make: Callable[[int, int], nn.Module] = Part,
    wrap: Wrap = lambda module: module,
    **options: Any,
) -> list[PipelineStage]:
    """The same weights for the same stage, whoever asks."""
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
    """Train, and take down every bit of it."""
    is_first, is_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    parameters = {
        f"{stage.stage_index}.{name}": one for stage in stages for name, one in stage.submod.named_parameters()
    }
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    losses: list[str] = []
    gradients: dict[str, torch.Tensor] = {}
    for step in range(first_step, first_step + num_steps):
        inputs, target = batch(step, num_microbatches)
        of_step: list[torch.Tensor] = []
        made = schedule.step(
            *([inputs] if is_first else []),
            target=target if is_last else None,
            losses=of_step if is_last else None,
            **(keywords or {}),
            **options,
        )
        losses += [float(loss).hex() for loss in of_step]
        losses += [] if made is None else [float(local(made).double().sum()).hex()]
        gradients = {name: local(one.grad).clone() for name, one in parameters.items() if one.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: local(one).detach().clone() for name, one in parameters.items()}
    return {"losses": losses, "gradients": gradients, "weights": weights}


def same(wanted: Bits, found: Bits) -> bool:
    return wanted["losses"] == found["losses"] and all(
        wanted[kind].keys() == found[kind].keys()
        and all(torch.equal(wanted[kind][name], found[kind][name]) for name in wanted[kind])
        for kind in ("gradients", "weights")
    )
