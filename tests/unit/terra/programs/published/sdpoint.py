"""SDPoint: each step draws at which layer the maps shrink, and by how much, or that they do not."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.terra.programs.program import Feature, Program

RATIOS = (0.5, 0.75)


class Shrinking(nn.Module):
    """`point` is the layer after which maps shrink, -1 for none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(given, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU()) for given in (3, 5, 5)
        )
        self.out, self.point, self.ratio = nn.Linear(5, 4), -1, 1.0

    def draw(self) -> None:
        self.point = random.randint(-1, len(self.layers) - 1)
        self.ratio = random.choice(RATIOS)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if number == self.point:
                size = round(hidden.shape[-1] * self.ratio)
                hidden = F.adaptive_avg_pool2d(hidden, size)
        return self.out(hidden.mean((2, 3)))


class SDPoint(Program):
    name = "SDPoint"
    features = frozenset(
        {Feature.BATCH, Feature.NUMBER, Feature.BRANCH, Feature.SHAPE, Feature.MUTATION, Feature.SCHEDULE}
    )

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net = Shrinking()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.modules, self.optimizers = {"net": self.net}, {"sgd": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        self.net.draw()
        self.note("point", self.net.point, "ratio", self.net.ratio)
        images, labels = torch.from_numpy(self.array(i, 3, 3, 8, 8)), torch.from_numpy(self.integers(i, 4, 3))
        loss = F.cross_entropy(self.net(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()


build = SDPoint
