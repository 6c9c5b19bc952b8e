"""The same line takes another value each time: nothing but which tensor it is tells one step's operation from the
other's."""

from __future__ import annotations

import torch

from tests.unit.terra.programs.program import Feature, Program


class Identity(Program):
    name = "identity"
    features = frozenset({Feature.IDENTITY, Feature.CARRIED, Feature.BATCH, Feature.MUTATION, Feature.IN_PLACE})

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
        self.optimizer = torch.optim.SGD(self.weights, lr=0.05)
        self.averages = [torch.zeros(4, 4), torch.ones(4, 4)]
        self.tensors = {
            **{f"weight{number}": weight for number, weight in enumerate(self.weights)},
            **{f"average{number}": average for number, average in enumerate(self.averages)},
        }
        self.optimizers = {"sgd": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        given = torch.from_numpy(self.array(i, 3, 4))
        first, second, third = (self.weights[(i + place) % 3] for place in range(3))
        x, y = given @ first, given @ second + third[0]
        one = (x if i % 2 else y) + 1
        two = (y if i % 2 else x) * 2
        # Python's containers say which one comes where.
        values = {"a": one.sin(), "b": two.cos(), "c": (given @ third).tanh()}
        order = sorted(values, key=lambda key: (ord(key) * (i + 1)) % 5)
        total = values[order[0]] - values[order[1]] * values[order[2]]
        loss = total.square().mean() + sum(weight.square().mean() for weight in self.weights) * 0.01
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            # They change places, and names with them.
            self.averages[0].lerp_(self.weights[i % 3], 0.5)
            self.averages.reverse()
        self.note(*order)
        return loss.detach()


build = Identity
