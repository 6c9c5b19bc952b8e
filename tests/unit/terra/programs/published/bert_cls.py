"""BERT-CLS: predictions become an array in mid-step, before the backward, and Python counts how good they are."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.terra.programs.layers import Block
from tests.unit.terra.programs.program import Counts, Feature, Program

VOCABULARY, LENGTH, WIDTH, CLASSES = 20, 5, 8, 3


class Metrics:
    """What was said where what was true, over all steps."""

    def __init__(self) -> None:
        self.pairs: Counter[tuple[int, int]] = Counter()

    def update(self, said: list[int], true: list[int]) -> float:
        self.pairs.update(zip(said, true, strict=True))
        return sum(number for (one, other), number in self.pairs.items() if one == other) / self.pairs.total()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.pool, self.drop, self.classes = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.places
        for block in self.blocks:
            hidden = block(hidden)
        return self.classes(self.drop(torch.tanh(self.pool(hidden[:, 0]))))


class BertCLS(Program):
    name = "BERT-CLS"
    features = frozenset({Feature.BATCH, Feature.NUMBER, Feature.RANDOM, Feature.READ, Feature.MUTATION})
    expected = Counts(2, 0)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net, self.metrics = Classifier(), Metrics()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=5e-3)
        self.modules, self.optimizers = {"net": self.net}, {"adam": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        tokens, labels = self.integers(i, VOCABULARY, 4, LENGTH), self.integers(i + 1000, CLASSES, 4)
        made = self.net(torch.from_numpy(tokens))
        said = made.detach().argmax(-1).numpy()
        accuracy = self.metrics.update(said.tolist(), labels.tolist())
        self.note("said", said.tolist(), "accuracy", accuracy)
        loss = F.cross_entropy(made, torch.from_numpy(labels))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


build = BertCLS
