"""Where an optimizer's moments are in every moment of a step, with two ranks as threads, in a process of its own:
importing Megatron takes seconds. The step is not Megatron's; its optimizer is torch's Adam. Ends with 0 when all is
well."""

# ruff: noqa: E402

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Queue
from typing import Any
from unittest import mock

from megatron.scheduling.start import startup

startup.prepare()

# isort: split
import torch

from bpipe.flags.budgets import HostedState
from megatron.scheduling.hooks import patches
from megatron.scheduling.memory import optimizer_state
from megatron.scheduling.memory.optimizer_state import OptimizerState

SIZES = (40, 30, 20, 10)


class TwoRanks:
    """What is used of torch.distributed, between two threads. `lost`: what arrives of moments is zeros."""

    def __init__(self, lost: bool = False) -> None:
        self.lost = lost
        self.ways: dict[tuple[int, int], Queue[torch.Tensor]] = {(0, 1): Queue(), (1, 0): Queue()}
        self.here = threading.local()

    def get_rank(self, group: Any = None) -> int:
        rank: int = self.here.rank
        return rank

    def get_global_rank(self, group: Any, rank: int) -> int:
        return rank

    def send(self, tensor: torch.Tensor, other: int, group: Any = None) -> None:
        self.ways[self.get_rank(), other].put(tensor.clone())

    def recv(self, tensor: torch.Tensor, other: int, group: Any = None) -> None:
        arrived = self.ways[other, self.get_rank()].get(timeout=20)
        assert arrived.shape == tensor.shape
        assert arrived.dtype == tensor.dtype
        tensor.copy_(torch.zeros_like(arrived) if self.lost and tensor.dtype is torch.uint8 else arrived)


class Rank:
    """Trains weights of its own.

    `seen`: for each step the bytes of its moments, and whether they can be read, while it computes.
    """

    def __init__(self, rank: int, moves: Sequence[HostedState], ranks: TwoRanks) -> None:
        self.rank, self.ranks = rank, ranks
        generator = torch.Generator().manual_seed(rank)
        self.weights = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]
        self.optimizer = torch.optim.Adam(self.weights, lr=0.1)
        self.model = torch.nn.ParameterList(self.weights)
        self.state = OptimizerState(moves)
        self.step = self.state.wraps({})[patches.TRAIN_STEP](self._step)
        self.seen: list[tuple[int, int]] = []
        self.failed: BaseException | None = None

    def _step(self, model: Any, optimizer: Any, iteration: int) -> None:
        moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
        self.seen.append((sum(value.untyped_storage().nbytes() for value in moments), len(moments)))
        for weight in self.weights:
            weight.grad = (weight.detach() * (iteration + 1)).cos()
        optimizer.step()

    def run(self, steps: int) -> None:
        self.ranks.here.rank = self.rank
        try:
            for iteration in range(steps):
                self.step(model=[self.model], optimizer=self.optimizer, iteration=iteration)
                if iteration:
                    assert all(len(state) == 3 for state in self.optimizer.state.values()), (
                        "all at home between two steps"
                    )
        except BaseException as error:
            self.failed = error


def trained(moves: Sequence[HostedState], lost: bool = False, steps: int = 4) -> list[Rank]:
    ranks = TwoRanks(lost)
    both = [Rank(rank, moves, ranks) for rank in range(2)]
    with (
        mock.patch.object(optimizer_state, "dist", ranks),
        mock.patch.object(optimizer_state, "say"),
        mock.patch.object(optimizer_state.parallel_state, "get_pipeline_model_parallel_group", return_value=None),
    ):
        threads = [threading.Thread(target=one.run, args=(steps,)) for one in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    return both


def weights(one: Rank) -> list[torch.Tensor]:
    return [weight.detach() for weight in one.weights]


def check_moments_are_away_while_it_computes_and_no_bit_changes() -> None:
    plain, hosted = trained(()), trained((HostedState(0, 1, 300),))
    for one, other in zip(plain, hosted, strict=True):
        assert one.failed is None
        assert other.failed is None
        assert all(map(torch.equal, weights(one), weights(other)))
    whole = 2 * 4 * sum(SIZES)
    assert plain[0].seen == [(0, 0)] + [(whole, 8)] * 3
    # Of 160, 160, 120, 120, 80, 80, 40, 40 bytes the largest that are not too much, 160 and 120, and the smallest for
    # the last 20.
    assert hosted[0].seen == [(0, 0)] + [(whole - 320, 5)] * 3
    assert hosted[1].seen == plain[1].seen
    kept = [tensor.nbytes for stay in hosted[1].state._stays for tensor in stay.kept]
    assert sum(kept) == 320


def check_what_arrives_is_what_is_used() -> None:
    """Where moments are lost on their way weights are others: the test above could tell."""
    plain, lost = trained(()), trained((HostedState(0, 1, 300),), lost=True)
    assert not all(map(torch.equal, weights(plain[0]), weights(lost[0])))
    assert all(map(torch.equal, weights(plain[1]), weights(lost[1])))


def check_what_is_not_there_is_said_on_both() -> None:
    both = trained((HostedState(1, 0, 801),))
    assert [type(one.failed) for one in both] == [ValueError, ValueError]
    assert "801" not in str(both[1].failed)
    assert "but only 0.000 GiB can move: give that or less" in str(both[1].failed)
    assert "but it has less" in str(both[0].failed)
    assert trained((HostedState(1, 0, 800),))[1].failed is None


def check_weights_are_no_moments() -> None:
    (one, _) = trained((), steps=1)
    found = list(optimizer_state.moments(one.optimizer))
    assert sorted(part.name for part in found) == ["exp_avg"] * 4 + ["exp_avg_sq"] * 4


CHECKS: tuple[Callable[[], None], ...] = (
    check_moments_are_away_while_it_computes_and_no_bit_changes,
    check_what_arrives_is_what_is_used,
    check_what_is_not_there_is_said_on_both,
    check_weights_are_no_moments,
)

if __name__ == "__main__":
    for check in CHECKS:
        check()
        print(check.__name__, flush=True)
