"""Gradients of a changing number of micro-batches, clipped where they are large, a step left out, a rate that
follows the loss."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from tests.unit.terra.programs.program import Feature, Program


class Accumulation(Program):
    name = "accumulation"
    features = frozenset(
        {
            Feature.ACCUMULATION,
            Feature.CLIPPING,
            Feature.SCHEDULE,
            Feature.LOOP,
            Feature.BRANCH,
            Feature.READ,
            Feature.BATCH,
            Feature.NUMBER,
        }
    )

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
        self.first, self.last = (
            torch.optim.SGD(self.net[place].parameters(), lr=0.1, momentum=0.5) for place in (0, 2)
        )
        self.cycle = OneCycleLR(self.first, max_lr=0.2, total_steps=200)
        self.plateau = ReduceLROnPlateau(self.last, factor=0.5, patience=0)
        self.modules, self.optimizers = {"net": self.net}, {"first": self.first, "last": self.last}

    def step(self, i: int) -> torch.Tensor:
        count, total = 1 + i % 3, 0.0
        for number in range(count):
            loss = (self.net(torch.from_numpy(self.array(10 * i + number, 3, 6))) - 1).square().mean()
            (loss / count).backward()
            total = total + loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.net[0].parameters(), 0.4, error_if_nonfinite=True)
        torch.nn.utils.clip_grad_value_(self.net[2].parameters(), 0.1)
        # As where a loss scale was too large.
        if norm.item() > 1.0:
            self.note("left out", norm.item())
        else:
            self.first.step()
        self.last.step()
        # The first keeps what it did not use.
        self.last.zero_grad()
        if i % 2:
            self.first.zero_grad(set_to_none=False)
        self.cycle.step()
        self.plateau.step(total.item())
        self.note("rates", self.cycle.get_last_lr()[0], self.last.param_groups[0]["lr"])
        return total


build = Accumulation
