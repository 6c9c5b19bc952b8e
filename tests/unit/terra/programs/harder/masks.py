"""The data say how large results are: masks as indices, what is not zero, what is unique; Python reads in mid-step
in every way it can."""

from __future__ import annotations

import copy
import pickle

import torch

from tests.unit.terra.programs.program import Feature, Program


class Masks(Program):
    name = "masks"
    features = frozenset(
        {
            Feature.DATA_SIZE,
            Feature.READ,
            Feature.BATCH,
            Feature.NUMBER,
            Feature.IN_PLACE,
            Feature.BRANCH,
            Feature.SHAPE,
        }
    )

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weight = torch.randn(5, 5, requires_grad=True)
        self.counts = torch.zeros(4, dtype=torch.long)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.05)
        self.tensors, self.optimizers = {"weight": self.weight, "counts": self.counts}, {"sgd": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        hidden = torch.from_numpy(self.array(i, 4, 5)) @ self.weight
        positive = hidden[hidden > 0]
        places = (hidden.detach().abs() > 1).nonzero()
        kinds, number = torch.from_numpy(self.integers(i, 4, 6)).unique(return_counts=True)
        self.counts.index_add_(0, kinds, number)
        hidden = hidden.clone()
        hidden[hidden < -1] = -1
        hidden = hidden.index_put((places[:, 0], places[:, 1]), torch.tensor(0.5), accumulate=True)
        self.note("sizes", len(positive), places.tolist(), kinds.numpy().tolist())
        self.note(
            "said", repr(hidden[0].detach()), f"{hidden[0, 0]:.5f}", int(self.counts[0]), bool((hidden > 2).any())
        )
        kept = pickle.loads(pickle.dumps(hidden.detach()[0])), copy.deepcopy(places)
        repeated = torch.repeat_interleave(hidden[0, :4], self.counts.clamp(max=3))
        loss = positive.square().sum() * 0.1 + hidden.square().mean() + repeated.sum() * 0.01 + kept[0].sum() * 0
        if len(places) % 2:
            loss = loss + torch.masked_select(hidden, hidden > 0.5).sum() * 0.01
        if self.weight.abs().max() in torch.tensor([9.0]) or 3 in kinds:
            self.note("three")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


build = Masks
