"""Arrays and tensors that share memory: what is fed is overwritten while the step goes on, and what was computed is
written by Python."""

from __future__ import annotations

import numpy as np
import torch

from tests.unit.terra.programs.program import Feature, Program


class NumpyMemory(Program):
    name = "numpy memory"
    features = frozenset({Feature.NUMPY_MEMORY, Feature.READ, Feature.LIBRARY, Feature.FROM_PYTHON})

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.buffer = np.zeros((4, 5), np.float32)
        self.fed = torch.from_numpy(self.buffer)
        self.weight = torch.randn(5, 5, requires_grad=True)
        self.means = torch.zeros(5)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.tensors = {"weight": self.weight, "means": self.means, "fed": self.fed}
        self.optimizers = {"sgd": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        self.buffer[:] = self.array(i, 4, 5)
        hidden = self.fed @ self.weight
        total = self.fed.sum(0)
        # What was fed has been used by now, as far as Python can tell.
        self.buffer[:] = -1
        self.buffer[0] = self.array(i + 1000, 5)
        hidden = hidden + self.fed * 0.1
        values = hidden.detach().clone().numpy()
        values *= 2
        scale = torch.tensor([float(values[0, 0]), 1.0 / (i + 1)])
        loss = (hidden * scale[1] + torch.from_numpy(values)).square().mean() + scale[0] * total.mean()
        self.optimizer.zero_grad()
        # It is saved for the backward, so what comes to lie here now would be wrong: a copy is fed.
        copied = torch.tensor(self.buffer)
        (loss + (copied * hidden).mean()).backward()
        self.buffer += 1
        self.optimizer.step()
        self.means.numpy()[:] += np.asarray(self.weight.detach()).mean(0)
        self.note("means", float(self.means.numpy().sum()), "values", float(values.max()))
        return loss.detach()


build = NumpyMemory
