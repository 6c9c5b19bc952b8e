"""DropBlock: a chance that the training changes step by step; as long as it is zero, nothing is drawn."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.terra.programs.program import Counts, Feature, Program

BLOCK = 3
# Steps without dropping.
STILL = 2


class DropBlock(nn.Module):
    """Zeroes squares of a map; `chance` is of an element to be dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.chance = 0.0

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if self.chance == 0:
            return given
        side = given.shape[-1]
        rate = self.chance * side**2 / BLOCK**2 / (side - BLOCK + 1) ** 2
        centres = (torch.rand_like(given[:, :1]) < rate).float()
        kept = 1 - F.max_pool2d(centres, BLOCK, 1, BLOCK // 2)
        return given * kept * (kept.numel() / kept.sum().clamp(min=1))


class DropBlockNet(Program):
    name = "DropBlock"
    features = frozenset({Feature.BATCH, Feature.NUMBER, Feature.RANDOM, Feature.MUTATION, Feature.BRANCH})
    expected = Counts(3, 0)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.drop = DropBlock()
        self.net = nn.Sequential(
            *(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), self.drop),
            *(
                nn.Conv2d(6, 6, 3, padding=1),
                nn.ReLU(),
                self.drop,
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(6, 4),
            ),
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        self.modules, self.optimizers = {"net": self.net}, {"sgd": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        self.drop.chance = min(0.3, 0.02 * max(0, i - STILL + 1))
        self.note("chance", self.drop.chance)
        images, labels = torch.from_numpy(self.array(i, 3, 3, 8, 8)), torch.from_numpy(self.integers(i, 4, 3))
        loss = F.cross_entropy(self.net(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


build = DropBlockNet
