"""ResNet50: blocks with a way around, batch normalization, momentum, a rate that warms up. Its path never changes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.terra.programs.program import Counts, Feature, Program


class Bottleneck(nn.Module):
    def __init__(self, given: int, inner: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(given, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True)),
            *(nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True)),
            *(nn.Conv2d(inner, 2 * inner, 1, bias=False), nn.BatchNorm2d(2 * inner)),
        )
        self.around = nn.Sequential(nn.Conv2d(given, 2 * inner, 1, stride, bias=False), nn.BatchNorm2d(2 * inner))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(given) + self.around(given), inplace=True)


class ResNet50(Program):
    name = "ResNet50"
    features = frozenset({Feature.BATCH, Feature.NUMBER, Feature.SCHEDULE, Feature.IN_PLACE})
    expected = Counts(2, 0)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net = nn.Sequential(
            *(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
            *(Bottleneck(4, 2, 1), Bottleneck(4, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 20))
        self.modules, self.optimizers = {"net": self.net}, {"sgd": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        images, labels = torch.from_numpy(self.array(i, 3, 3, 8, 8)), torch.from_numpy(self.integers(i, 5, 3))
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.net(images), labels, label_smoothing=0.1)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.note("rate", self.schedule.get_last_lr()[0])
        return loss.detach()


build = ResNet50
