"""A float says how large a result is: enlarged maps, ranges, crops; Python reads the sizes and goes on with them."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.unit.terra.programs.program import Feature, Program


class FloatShapes(Program):
    name = "float shapes"
    features = frozenset({Feature.SHAPE, Feature.NUMBER, Feature.BATCH, Feature.LOOP})

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weight = torch.randn(2, 2, 3, 3, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.05)
        self.tensors, self.optimizers = {"weight": self.weight}, {"sgd": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        factor = 1.0 + 0.25 * (i % 4)
        maps = F.conv2d(torch.from_numpy(self.array(i, 1, 2, 6, 6)), self.weight)
        larger = F.interpolate(maps, scale_factor=factor, mode="bilinear", recompute_scale_factor=False)
        side = larger.shape[-1]
        grid = torch.arange(0, 1, 1 / (side * factor))
        kept = larger[..., : int(side * 0.7)]
        # The same numbers, for which the sizes are others.
        steps = torch.linspace(0, 1, len(grid))
        self.note("sizes", list(larger.shape), len(grid), kept.numel())
        loss = kept.square().mean() + (grid - steps).sum() * larger.mean()
        for part in larger.tensor_split(side // 2, dim=-1):
            loss = loss + part.amax() * 0.01
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


build = FloatShapes
