"""The interface of the programs that test co-execution and the audit.

A program trains in plain torch on a CPU, a few milliseconds per step, and does not depend on what runs or observes it.
"""

import enum
import random
from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np
import torch


class Feature(enum.Enum):
    """A property of a program that the audit must find."""

    BATCH = "each step's data are in new memory"
    FROM_PYTHON = "a tensor is made from Python numbers"
    NUMBER = "a number that an operation takes changes each step"
    READ = "Python reads a tensor's value in mid-step"
    LIBRARY = "another library computes with a tensor's values in mid-step"
    BRANCH = "some steps have operations that others lack"
    LOOP = "a loop's count changes"
    IDENTITY = "the same operation takes another value"
    SHAPE = "sizes change from step to step"
    DATA_SIZE = "a result's size depends on data"
    GENERATOR = "random numbers of the program's own generator"
    RESEED = "a random state is set"
    CARRIED = "tensors are carried from step to step in Python's containers"
    SCHEDULE = "the learning rate changes"


class Program:
    """`step(i)` trains step i, counted from 0, and returns its loss. Call each step once, in order.

    A subclass fills `modules`, `optimizers`, `tensors` and `generators` with the state that its steps change. `log`
    records in order what its steps did besides torch.
    """

    name: ClassVar[str]
    features: ClassVar[tuple[Feature, ...]] = ()

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.log: list[str] = []
        self.modules: dict[str, torch.nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.generators: dict[str, torch.Generator] = {}
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    def step(self, i: int) -> torch.Tensor:
        raise NotImplementedError

    def note(self, *words: object) -> None:
        """Record something that Python did besides torch."""
        self.log.append(" ".join(map(_word, words)))

    def array(self, i: int, *shape: int) -> np.ndarray:
        """Return float32 data of step i, in new memory."""
        return np.random.default_rng((self.seed, i)).standard_normal(shape, dtype=np.float32)

    def integers(self, i: int, below: int, *shape: int) -> np.ndarray:
        """Return int64 data of step i, in new memory."""
        return np.random.default_rng((self.seed, i, 1)).integers(below, size=shape)

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of all state after steps, except random states and the log."""
        return {name: tensor.detach().clone() for name, tensor in self._state()}

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for owner, module in self.modules.items():
            yield from _with_gradients(owner, module.named_parameters())
            yield from ((f"{owner}.{name}", buffer) for name, buffer in module.named_buffers())
        for owner, optimizer in self.optimizers.items():
            yield from _of_optimizer(owner, optimizer)
        yield from _with_gradients("tensors", self.tensors.items())


def _word(word: object) -> str:
    # With all bits.
    return word.hex() if isinstance(word, float) else str(word)


def _with_gradients(owner: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        yield f"{owner}.{name}", tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield f"{owner}.{name}.grad", tensor.grad


def _of_optimizer(owner: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        for name, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                yield f"{owner}.{number}.{name}", torch.as_tensor(value)
    for number, group in enumerate(optimizer.param_groups):
        yield f"{owner}.group{number}.lr", torch.as_tensor(group["lr"], dtype=torch.float64)
