"""Sections in bfloat16, one of them nested, weights cast once a section; losses scaled, and a step left out where a
gradient overflows."""

from __future__ import annotations

import torch
from torch import nn

from tests.unit.terra.programs.program import Feature, Program


class Autocast(Program):
    name = "autocast"
    features = frozenset({Feature.AUTOCAST, Feature.BATCH, Feature.NUMBER, Feature.BRANCH, Feature.READ})

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)])
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        self.modules, self.optimizers = {"net": self.net}, {"adamw": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        given = torch.from_numpy(self.array(i, 4, 6))
        if i % 4 == 3:
            given = given * 1e30
        with torch.autocast("cpu", torch.bfloat16):
            # Twice the same weight: the second time its copy is taken from autocast's own store.
            hidden = self.net[1](self.net[0](self.net[0](given)).relu())
            with torch.autocast("cpu", enabled=False):
                hidden = self.net[2](hidden.float())
            product = hidden @ hidden.t()
        self.note(product.dtype, hidden.dtype)
        loss = product.float().square().mean() + hidden[:, 0].mean() * given[0, 0]
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.note("scale", self.scaler.get_scale())
        return loss.detach()


build = Autocast
