"""Values decide what comes: branches, loops of changing count, one in the other, and an early way out."""

from __future__ import annotations

import torch

from tests.unit.terra.programs.program import Feature, Program


class Branches(Program):
    name = "branches"
    features = frozenset({Feature.READ, Feature.BRANCH, Feature.LOOP, Feature.BATCH, Feature.NUMBER, Feature.IDENTITY})

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weight, self.gate = torch.randn(5, 5, requires_grad=True), torch.randn(5, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight, self.gate], lr=0.05)
        self.tensors, self.optimizers = {"weight": self.weight, "gate": self.gate}, {"sgd": self.optimizer}

    def settle(self, hidden: torch.Tensor) -> torch.Tensor:
        """Until it is small, five times at most."""
        for turn in range(5):
            size = hidden.detach().abs().max().item()
            self.note("turn", turn, size)
            if size < 0.8:
                return hidden
            hidden = hidden * (0.8 / size) if turn == 2 else hidden.tanh()
        return hidden.clamp(-1, 1)

    def step(self, i: int) -> torch.Tensor:
        hidden = torch.from_numpy(self.array(i, 3, 5)) * (1 + i % 3) @ self.weight
        for outer in range(1 + i % 3):
            hidden = hidden.sin() if outer else hidden + 0.1
            for inner in range(outer):
                hidden = hidden + self.gate * (inner + 1)
        hidden = self.settle(hidden)
        if hidden.mean() > 0:
            self.note("up")
            hidden = hidden * self.gate.sigmoid()
        elif i % 2:
            hidden = hidden - self.gate.cos()
        loss = hidden.square().mean() + 0 * self.gate.sum()
        self.optimizer.zero_grad()
        loss.backward()
        while float(self.weight.grad.norm()) > 0.5:
            self.weight.grad.mul_(0.5)
            self.note("halved")
        self.optimizer.step()
        self.note("stepped")
        return loss.detach()


build = Branches
