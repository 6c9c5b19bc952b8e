"""MusicTransformer: attention by distance, in pieces of changing length; layers keep what they saw as their own
attributes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.terra.programs.layers import Attention, Block
from tests.unit.terra.programs.program import Counts, Feature, Program

NOTES, LONGEST, WIDTH = 16, 12, 8


class Relative(Attention):
    """Scores depend on how far a note lies back; the distances' table is shifted into place by reading it in other
    rows."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__(width, dropout)
        self.distances = nn.Parameter(torch.randn(LONGEST, width // 2) * 0.1)
        self.longest, self.seen = 0, []

    def scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        length = query.shape[-2]
        self.longest = max(self.longest, length)
        by_distance = query @ self.distances[LONGEST - length :].t()
        rows = F.pad(by_distance, (1, 0)).reshape(*by_distance.shape[:2], length + 1, length)
        scores = super().scores(query, key) + rows[:, :, 1:]
        self.seen.append(scores.detach())
        return scores


class MusicTransformer(Program):
    name = "MusicTransformer"
    features = frozenset(
        {Feature.BATCH, Feature.NUMBER, Feature.RANDOM, Feature.SHAPE, Feature.MUTATION, Feature.VIEW, Feature.READ}
    )
    expected = Counts(2, 0)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.embedding, self.out = nn.Embedding(NOTES, WIDTH), nn.Linear(WIDTH, NOTES)
        self.blocks = nn.ModuleList(Block(WIDTH, 0.1, Relative) for _ in range(2))
        self.modules = {"embedding": self.embedding, "blocks": self.blocks, "out": self.out}
        parameters = [each for module in self.modules.values() for each in module.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-2, betas=(0.9, 0.98))
        self.optimizers = {"adam": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        length = 5 + int(self.integers(i + 1000, LONGEST - 4))
        piece = torch.from_numpy(self.integers(i, NOTES, 2, length + 1))
        hidden = self.embedding(piece[:, :-1])
        later = torch.full((length, length), -1e9).triu(1)
        for block in self.blocks:
            hidden = block(hidden, later)
        loss = F.cross_entropy(self.out(hidden).transpose(1, 2), piece[:, 1:])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for block in self.blocks:
            attention = block.attention
            (scores,) = attention.seen
            self.note("length", length, "longest", attention.longest, "score", scores.amax().item())
            attention.seen.clear()
        return loss.detach()


build = MusicTransformer
