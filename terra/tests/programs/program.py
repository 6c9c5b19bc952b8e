"""The interface of the programs by which co-execution and the audit are tested.

In: a seed. Out: steps that train, and the state that they leave.

Plain torch on a CPU, a few milliseconds per step. A program is independent of what runs or observes it.
"""

import enum
import random
from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np
import torch


class Feature(enum.Enum):
    """A property of a program that the audit must find."""

    BATCH = "each step's data lie in new memory"
    FROM_PYTHON = "a tensor is made of numbers that Python holds"
    NUMBER = "a number that an operation takes is another one each step"
    READ = "Python reads a tensor's value in mid-step"
    LIBRARY = "another library computes with a tensor's values in mid-step"
    BRANCH = "operations come in some steps only"
    LOOP = "a loop's count changes"
    IDENTITY = "the same operation takes another value"
    SHAPE = "sizes change from step to step"
    DATA_SIZE = "the data say how large a result is"
    GENERATOR = "random numbers of a generator of the program's"
    RESEED = "the state of random numbers is set"
    CARRIED = "tensors are carried from step to step in Python's containers"
    SCHEDULE = "the learning rate changes"


class Program:
    """`step(i)` trains step i, counted from 0, and returns its loss; steps are to be called in order, each once.

    A subclass fills `modules`, `optimizers`, `tensors` and `generators` with what its steps change. `log` has what its
    steps did besides torch, in order.
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
    # Every bit of it.
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
