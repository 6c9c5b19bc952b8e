"""BERT-Q&A: an encoder that points at an answer's first and last token; padding, dropout, clipping, a rate that
falls."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.terra.programs.layers import Block
from tests.unit.terra.programs.program import Counts, Feature, Program

VOCABULARY, LENGTH, WIDTH = 20, 6, 8


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.parts = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Embedding(LENGTH, WIDTH),
            nn.Embedding(2, WIDTH),
        )
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.ends = nn.Linear(WIDTH, 2)

    def forward(self, tokens: torch.Tensor, parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.drop(self.norm(self.tokens(tokens) + self.places(torch.arange(LENGTH)) + self.parts(parts)))
        # Token 0 is padding.
        mask = (tokens == 0)[:, None, None, :].float() * -1e4
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.ends(hidden).split(1, dim=-1)


class BertQA(Program):
    name = "BERT-Q&A"
    features = frozenset(
        {Feature.BATCH, Feature.NUMBER, Feature.SCHEDULE, Feature.RANDOM, Feature.CLIPPING, Feature.VIEW}
    )
    expected = Counts(2, 0)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.reader = Reader()
        plain = [each for name, each in self.reader.named_parameters() if name.endswith("bias")]
        decayed = [each for name, each in self.reader.named_parameters() if not name.endswith("bias")]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=1e-2
        )
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=50)
        self.modules, self.optimizers = {"reader": self.reader}, {"adamw": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        tokens = torch.from_numpy(self.integers(i, VOCABULARY, 3, LENGTH))
        answers = torch.from_numpy(self.integers(i + 1000, LENGTH, 2, 3))
        parts = (torch.arange(LENGTH) >= 2).long().expand(3, LENGTH)
        first, last = self.reader(tokens, parts)
        loss = (F.cross_entropy(first.squeeze(-1), answers[0]) + F.cross_entropy(last.squeeze(-1), answers[1])) / 2
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.reader.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.note("step", i)
        return loss.detach()


build = BertQA
