"""DCGAN: a generator from noise and its judge, an Adam each, the judge's losses cut off from the generator."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.terra.programs.program import Counts, Feature, Program


def against(made: torch.Tensor, label: float) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(made, torch.full_like(made, label))


class DCGAN(Program):
    name = "DCGAN"
    features = frozenset(
        {Feature.BATCH, Feature.NUMBER, Feature.RANDOM, Feature.TWO_NETWORKS, Feature.READ, Feature.IN_PLACE}
    )
    expected = Counts(2, 0)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.generator = nn.Sequential(
            *(nn.ConvTranspose2d(5, 6, 4, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True)),
            *(nn.ConvTranspose2d(6, 1, 4, 2, 1, bias=False), nn.Tanh()),
        )
        self.judge = nn.Sequential(
            *(nn.Conv2d(1, 4, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.3)),
            *(
                nn.Conv2d(4, 6, 3, 1, 1, bias=False),
                nn.BatchNorm2d(6),
                nn.LeakyReLU(0.2),
                nn.Conv2d(6, 1, 4, bias=False),
            ),
        )
        for parameter in (*self.generator.parameters(), *self.judge.parameters()):
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.1)
        self.making = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        self.judging = torch.optim.Adam(self.judge.parameters(), lr=2e-3, betas=(0.5, 0.999))
        self.modules = {"generator": self.generator, "judge": self.judge}
        self.optimizers = {"making": self.making, "judging": self.judging}

    def step(self, i: int) -> torch.Tensor:
        real = torch.from_numpy(self.array(i, 3, 1, 8, 8)).tanh()
        fake = self.generator(torch.randn(3, 5, 1, 1))
        self.judging.zero_grad()
        true, false = against(self.judge(real), 0.9), against(self.judge(fake.detach()), 0.0)
        true.backward()
        false.backward()
        self.judging.step()
        self.making.zero_grad()
        fooled = against(self.judge(fake), 1.0)
        fooled.backward()
        self.making.step()
        self.note("judge", (true + false).item(), "generator", fooled.item())
        return (true + false + fooled).detach()


build = DCGAN
