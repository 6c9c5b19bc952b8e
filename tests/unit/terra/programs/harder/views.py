"""Views of views, writes through them, and results that share memory with what was given."""

from __future__ import annotations

import torch

from tests.unit.terra.programs.program import Feature, Program


class Views(Program):
    name = "views"
    features = frozenset({Feature.VIEW, Feature.IN_PLACE, Feature.NUMBER, Feature.FROM_PYTHON})

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weight = torch.randn(4, 6, requires_grad=True)
        self.table = torch.randn(5, 6)
        # The first is a view of the table, the second its own memory: the same line makes both.
        self.rows = [self.table[1:3].reshape(2, 6), self.table.t()[:2].reshape(2, 5)]
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.tensors = {"weight": self.weight, "table": self.table, "kept": self.rows[0], "copied": self.rows[1]}
        self.optimizers = {"sgd": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        hidden = self.weight * 1
        corner = hidden[1:, 2:]
        turned = corner.t()
        turned[0] += 1
        turned.diagonal().mul_(0.5)
        hidden.view(-1)[::5].copy_(self.table[0, :5])
        left, right = hidden.split(3, dim=1)
        folded = hidden.as_strided((3, 4), (6, 1), 2) + left.expand(2, 4, 3).sum(0).t() - right.unfold(0, 2, 2).sum()
        # What was made before the write shows it after.
        hidden[0].fill_(0.25)
        loss = folded.tanh().square().mean() + hidden.flatten().narrow(0, 3, 9).square().sum() * 0.1
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            self.rows[0].add_(self.weight[:2], alpha=1 / (i + 2))
            self.rows[1].copy_(self.table[:2, :5])
            same = self.table.view(30).detach()
            same[i % 30] = torch.tensor(2.0)
            self.table.transpose_(0, 1).transpose_(0, 1)
            flat = self.weight.data.ravel()
            flat.clamp_(-2, 2)
        self.note(
            "shared",
            self.rows[0].data_ptr() == self.table[1].data_ptr(),
            self.rows[1]._base is None,
            folded.is_contiguous(),
        )
        return loss.detach()


build = Views
