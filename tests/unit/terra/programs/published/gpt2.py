"""GPT2: a causal model whose output layer is its embedding, two micro-batches per step, decay for matrices only, a
rate on a cosine."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.terra.programs.layers import Block
from tests.unit.terra.programs.program import Counts, Feature, Program

VOCABULARY, LENGTH, WIDTH = 24, 7, 8


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop, self.blocks, self.norm = (
            nn.Dropout(0.1),
            nn.ModuleList(Block(WIDTH) for _ in range(2)),
            nn.LayerNorm(WIDTH),
        )
        self.register_buffer("later", torch.full((LENGTH, LENGTH), float("-inf")).triu(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        hidden = self.drop(self.tokens(tokens) + self.places.weight[:length])
        for block in self.blocks:
            hidden = block(hidden, self.later[:length, :length])
        return self.norm(hidden) @ self.tokens.weight.t()


class GPT2(Program):
    name = "GPT2"
    features = frozenset(
        {
            Feature.BATCH,
            Feature.NUMBER,
            Feature.SCHEDULE,
            Feature.RANDOM,
            Feature.VIEW,
            Feature.ACCUMULATION,
            Feature.CLIPPING,
            Feature.READ,
        }
    )
    expected = Counts(2, 0)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net = Decoder()
        groups = [
            {
                "params": [each for each in self.net.parameters() if (each.dim() > 1) is matrices],
                "weight_decay": 0.1 * matrices,
            }
            for matrices in (True, False)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        self.modules, self.optimizers = {"net": self.net}, {"adamw": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for each in torch.from_numpy(self.integers(i, VOCABULARY, 4, LENGTH + 1)).chunk(2):
            made = self.net(each[:, :-1])
            loss = F.cross_entropy(made.reshape(-1, VOCABULARY), each[:, 1:].reshape(-1)) / 2
            loss.backward()
            total = total + loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.note("norm", norm.item())
        return total


build = GPT2
