"""Tensors in lists, deques, dictionaries and objects, carried from step to step, some with their graph, some let go
in mid-step."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass

import torch
from torch import nn

from tests.unit.terra.programs.program import Feature, Program


@dataclass
class Memory:
    hidden: torch.Tensor
    best: torch.Tensor | None = None


class Containers(Program):
    name = "containers"
    features = frozenset(
        {Feature.CARRIED, Feature.BATCH, Feature.BRANCH, Feature.LOOP, Feature.MUTATION, Feature.READ, Feature.NUMBER}
    )

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.cell, self.out = nn.GRUCell(4, 5), nn.Linear(5, 4)
        self.average = copy.deepcopy(self.out)
        self.memory, self.replayed = Memory(torch.zeros(3, 5)), deque[torch.Tensor](maxlen=4)
        self.by_name: dict[str, list[torch.Tensor]] = {"losses": []}
        self.optimizer = torch.optim.Adam([*self.cell.parameters(), *self.out.parameters()], lr=0.01)
        self.modules = {"cell": self.cell, "out": self.out, "average": self.average}
        self.optimizers = {"adam": self.optimizer}

    def state(self) -> dict[str, torch.Tensor]:
        carried = {
            "hidden": self.memory.hidden,
            **{f"replayed{number}": each for number, each in enumerate(self.replayed)},
        }
        if self.memory.best is not None:
            carried["best"] = self.memory.best
        return {**super().state(), **{name: each.detach().clone() for name, each in carried.items()}}

    def step(self, i: int) -> torch.Tensor:
        # Through two steps: the graph of the one before is gone through again at every other step.
        hidden = self.memory.hidden.detach() if i % 2 == 0 else self.memory.hidden
        self.replayed.append(torch.from_numpy(self.array(i, 3, 4)))
        losses = []
        for given in self.replayed:
            hidden = self.cell(given, hidden)
            losses.append((self.out(hidden) - given).square().mean())
        loss = torch.stack(losses).mean()
        self.optimizer.zero_grad()
        loss.backward(retain_graph=i % 2 == 0)
        if i % 2:
            self.optimizer.step()
        self.memory.hidden = hidden
        self.note("replayed", len(losses))
        if self.memory.best is None or loss.detach() < self.memory.best:
            self.memory.best = loss.detach().clone()
        self.by_name["losses"].append(loss.detach())
        if len(self.by_name["losses"]) == 3:
            self.note("mean", torch.stack(self.by_name.pop("losses")).mean().item())
            self.by_name["losses"] = []
        with torch.no_grad():
            for mean, weight in zip(self.average.parameters(), self.out.parameters(), strict=True):
                mean.mul_(0.9).add_(weight, alpha=0.1)
        return loss.detach()


build = Containers
