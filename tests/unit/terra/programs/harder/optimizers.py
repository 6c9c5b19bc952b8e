"""Optimizers side by side: momentum, Adam one by one and all at once, and others; groups of their own rates;
gradients kept or let go."""

from __future__ import annotations

import torch
from torch import nn

from tests.unit.terra.programs.program import Feature, Program


class Optimizers(Program):
    name = "optimizers"
    features = frozenset({Feature.BATCH, Feature.NUMBER, Feature.IN_PLACE, Feature.BRANCH})

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net = nn.Sequential(*(nn.Linear(5, 5) for _ in range(7)))
        optim, groups = torch.optim, [[*layer.parameters()] for layer in self.net]
        self.optimizers = {
            "momentum": optim.SGD(groups[0], lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
            "nesterov": optim.SGD(
                [{"params": groups[1][:1], "lr": 0.1}, {"params": groups[1][1:]}], lr=0.02, momentum=0.8, nesterov=True
            ),
            "adam": optim.Adam(groups[2], lr=0.01, foreach=False),
            "adam at once": optim.Adam(groups[3], lr=0.01, foreach=True, amsgrad=True),
            "adamw fused": optim.AdamW(groups[4], lr=0.01, fused=True),
            "rms": optim.RMSprop(groups[5], lr=0.005, momentum=0.5, centered=True),
            "adagrad": optim.Adagrad(groups[6], lr=0.05, lr_decay=0.1),
        }
        self.modules = {"net": self.net}

    def step(self, i: int) -> torch.Tensor:
        hidden = torch.from_numpy(self.array(i, 4, 5))
        for number, layer in enumerate(self.net):
            hidden = (layer(hidden) + 0.1 * number).tanh()
        loss = (hidden - 0.3).square().mean()
        for number, optimizer in enumerate(self.optimizers.values()):
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        loss.backward()
        for number, (name, optimizer) in enumerate(self.optimizers.items()):
            # One rests in some steps, so that its state is older than the others'.
            if number != 2 or i % 3 != 1:
                optimizer.step()
                self.note("stepped", name)
        return loss.detach()


build = Optimizers
