"""Random numbers of every kind: dropout, draws, a generator of its own, states saved, set again and seeded anew in
mid-step."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.nn import functional as F

from tests.unit.terra.programs.program import Feature, Program


class Randoms(Program):
    name = "randoms"
    features = frozenset(
        {
            Feature.RANDOM,
            Feature.GENERATOR,
            Feature.RESEED,
            Feature.BATCH,
            Feature.NUMBER,
            Feature.READ,
            Feature.IN_PLACE,
        }
    )

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weight = torch.randn(6, 6, requires_grad=True)
        self.own, self.other = torch.Generator().manual_seed(seed + 1), torch.Generator().manual_seed(seed + 2)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.tensors, self.optimizers = {"weight": self.weight}, {"sgd": self.optimizer}
        self.generators = {"own": self.own, "other": self.other}

    def step(self, i: int) -> torch.Tensor:
        given = torch.from_numpy(np.random.standard_normal((4, 6)).astype(np.float32))
        hidden = F.dropout(given @ self.weight, 0.2) + torch.randn(6, generator=self.own)
        before = torch.get_rng_state()
        noise = torch.rand(4, 6)
        torch.set_rng_state(before)
        again = torch.rand(4, 6)
        self.note("again", torch.equal(noise, again))
        hidden = hidden[torch.randperm(4)] * torch.empty(4, 6).bernoulli_(0.7, generator=self.other)
        chosen = torch.multinomial(hidden.detach().softmax(-1), 2, generator=self.own)
        hidden = hidden.gather(1, chosen) + torch.normal(0.0, 0.1, (4, 2)) + again[:, :2]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(i)
            hidden = hidden + torch.randint(3, (4, 2)) * 0.1
        scale = random.uniform(0.5, 1.0)
        self.note("scale", scale, "next", torch.rand(()).item())
        torch.manual_seed(self.seed + 7 * i)
        self.own.manual_seed(i)
        loss = (F.dropout(hidden, 0.5) * scale).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            self.weight.add_(torch.empty_like(self.weight).exponential_().log_normal_(0, 0.1), alpha=1e-3)
        return loss.detach()


build = Randoms
