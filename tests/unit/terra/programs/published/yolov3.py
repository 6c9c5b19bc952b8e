"""YOLOv3: two scales, the coarse one enlarged and joined to the fine one; a library finds each box its anchor before
the step computes."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.terra.programs.program import Counts, Feature, Program

# Width and height in parts of the image, two of each scale.
ANCHORS = np.array([[[0.5, 0.4], [0.7, 0.8]], [[0.1, 0.15], [0.25, 0.2]]], np.float32)
SIDES = (2, 4)
CLASSES = 3


def conv(given: int, made: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(given, made, 3, stride, 1, bias=False), nn.BatchNorm2d(made), nn.LeakyReLU(0.1))


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Sequential(conv(3, 4, 2), conv(4, 6, 2)), conv(6, 8, 2)
        self.heads = nn.ModuleList([nn.Conv2d(8, 2 * (5 + CLASSES), 1), nn.Conv2d(14, 2 * (5 + CLASSES), 1)])

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        fine = self.fine(images)
        coarse = self.coarse(fine)
        joined = torch.cat([F.interpolate(coarse, scale_factor=2, mode="nearest"), fine], dim=1)
        made = []
        for head, hidden, side in zip(self.heads, (coarse, joined), SIDES, strict=True):
            made.append(head(hidden).view(-1, 2, 5 + CLASSES, side, side).permute(0, 1, 3, 4, 2).contiguous())
        return made


class YoloV3(Program):
    name = "YOLOv3"
    features = frozenset({Feature.BATCH, Feature.NUMBER, Feature.VIEW})
    expected = Counts(2, 0)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net = Detector()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        self.modules, self.optimizers = {"net": self.net}, {"adam": self.optimizer}

    def targets(self, i: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each scale: which cells have a box, and what it is."""
        drawn = np.random.default_rng((self.seed, i, 2))
        made = [
            (np.zeros((2, 2, side, side, 1), np.float32), np.zeros((2, 2, side, side, 5), np.float32)) for side in SIDES
        ]
        for image in range(2):
            x, y, width, height = drawn.uniform(0.05, 0.9, 4).astype(np.float32)
            shared = np.minimum(ANCHORS, [width, height]).prod(-1)
            scale, anchor = divmod(int((shared / (ANCHORS.prod(-1) + width * height - shared)).argmax()), 2)
            side = SIDES[scale]
            cell = image, anchor, int(y * side), int(x * side)
            made[scale][0][cell] = 1
            made[scale][1][cell] = [x * side % 1, y * side % 1, width, height, drawn.integers(CLASSES)]
            self.note("anchor", scale, anchor)
        return [(torch.from_numpy(there), torch.from_numpy(box)) for there, box in made]

    def step(self, i: int) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        losses = []
        for made, (there, box) in zip(
            self.net(torch.from_numpy(self.array(i, 2, 3, 16, 16))), self.targets(i), strict=True
        ):
            losses.append(F.binary_cross_entropy_with_logits(made[..., 4:5], there))
            losses.append((there * (torch.sigmoid(made[..., :2]) - box[..., :2]) ** 2).sum())
            losses.append((there * (made[..., 2:4] - box[..., 2:4]) ** 2).sum())
            kind = F.one_hot(box[..., 4].long(), CLASSES).float()
            losses.append(F.binary_cross_entropy_with_logits(made[..., 5:], kind, weight=there, reduction="sum"))
        loss = torch.stack(losses).sum() / 2
        loss.backward()
        self.optimizer.step()
        return loss.detach()


build = YoloV3
