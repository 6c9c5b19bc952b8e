"""FasterRCNN: a library of arrays suppresses overlapping proposals, so that the data say how many regions the second
stage has."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.terra.programs.program import Counts, Feature, Program

SIDE, CLASSES = 4, 3


def suppress(boxes: np.ndarray, scores: np.ndarray, limit: float) -> np.ndarray:
    """Indices of boxes [x0, y0, x1, y1], best first, without those that share more than `limit` with a better one."""
    kept: list[int] = []
    for each in np.argsort(-scores, kind="stable"):
        low, high = np.maximum(boxes[kept, :2], boxes[each, :2]), np.minimum(boxes[kept, 2:], boxes[each, 2:])
        shared = np.clip(high - low, 0, None).prod(-1)
        areas = (boxes[kept, 2:] - boxes[kept, :2]).prod(-1) + (boxes[each, 2:] - boxes[each, :2]).prod()
        if not (shared > limit * (areas - shared)).any():
            kept.append(int(each))
    return np.array(kept)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 6, 3, 2, 1), nn.ReLU())
        self.proposals = nn.Conv2d(6, 5, 1)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(6 * 4, 8), nn.ReLU(), nn.Linear(8, CLASSES + 4))


class FasterRCNN(Program):
    name = "FasterRCNN"
    features = frozenset(
        {Feature.BATCH, Feature.NUMBER, Feature.READ, Feature.LIBRARY, Feature.SHAPE, Feature.MUTATION}
    )
    expected = Counts(2, 0)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net, self.num_regions = Net(), []
        y, x = np.divmod(np.arange(SIDE * SIDE, dtype=np.float32), SIDE)
        self.centres = (np.stack([x, y], -1) + 0.5) / SIDE
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.modules, self.optimizers = {"net": self.net}, {"sgd": self.optimizer}

    def regions(self, made: torch.Tensor) -> torch.Tensor:
        """[regions, 4] in parts of the image, from the proposals' scores and offsets [cells, 5]."""
        values = made.detach().numpy()
        centres = self.centres + 0.2 * np.tanh(9 * values[:, 1:3])
        sizes = 0.25 * np.exp(np.tanh(9 * values[:, 3:5]))
        boxes = np.clip(np.concatenate([centres - sizes / 2, centres + sizes / 2], -1), 0, 1).astype(np.float32)
        kept = suppress(boxes, values[:, 0], 0.1)
        self.num_regions.append(len(kept))
        self.note("regions", kept.tolist())
        return torch.from_numpy(boxes[kept])

    def step(self, i: int) -> torch.Tensor:
        hidden = self.net.body(torch.from_numpy(self.array(i, 1, 3, 16, 16)))
        made = self.net.proposals(hidden).flatten(2)[0].t()
        there = torch.from_numpy((self.array(i + 1000, SIDE * SIDE) > 0.5).astype(np.float32))
        first = F.binary_cross_entropy_with_logits(made[:, 0], there) + F.smooth_l1_loss(
            made[:, 1:], torch.zeros_like(made[:, 1:])
        )
        regions = self.regions(made)
        size, middle = regions[:, 2:] - regions[:, :2], regions[:, 2:] + regions[:, :2] - 1
        ways = torch.diag_embed(size)
        grid = F.affine_grid(torch.cat([ways, middle.unsqueeze(-1)], -1), [len(regions), 6, 2, 2], align_corners=False)
        pooled = F.grid_sample(hidden.expand(len(regions), -1, -1, -1), grid, align_corners=False)
        kinds, boxes = self.net.head(pooled).split([CLASSES, 4], -1)
        labels = torch.from_numpy(self.integers(i, CLASSES, len(regions)))
        loss = first + F.cross_entropy(kinds, labels) + F.smooth_l1_loss(boxes, regions)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


build = FasterRCNN
