"""Layers of the programs."""

import math

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, LENGTH, WIDTH = 24, 7, 8


class Attention(nn.Module):
    """Self-attention of two heads over [batch, length, width]; `mask` is added to its scores."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.all, self.out, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(dropout)

    def scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, width = hidden.shape
        heads = self.all(hidden).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        scores = self.scores(query, key)
        weights = self.drop((scores if mask is None else scores + mask).softmax(-1))
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A transformer layer with pre-normalization."""

    def __init__(self, width: int, dropout: float = 0.1, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = attention(width, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = inputs + self.attention(self.first(inputs), mask)
        return hidden + self.mlp(self.second(hidden))


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


def against(logits: torch.Tensor, label: float) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))
