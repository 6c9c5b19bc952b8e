"""Co-execution of whole programs is bit-equal to plain execution, and traces no more often than necessary."""

import contextlib
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import terra
from terra.run import guards, runner
from tests.programs import grammar
from tests.programs.judge import Build, compare
from tests.programs.paths import counts, paths
from tests.programs.program import Program
from tests.programs.trainings import PROGRAMS

STEPS = 8

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
    # Some take seconds even on an idle machine.
    pytest.mark.timeout(200),
]


def co_executed(
    build: Build, kind: Any = "threaded", steps: int = STEPS, seed: int = 0, ahead: bool = True
) -> tuple[str | None, terra.Session]:
    with contextlib.closing(terra.Session(kind)) as session, session.ahead() if ahead else contextlib.nullcontext():

        def run(step: Callable[[], torch.Tensor]) -> torch.Tensor:
            with session:
                return step()

        return compare(build, steps, run, seed=seed, each_step=not ahead), session


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("kind", ["threaded", "lazy"])
def test_a_program_is_computed_to_the_bit_and_traced_as_often_as_it_must_be(name: str, kind: str) -> None:
    difference, session = co_executed(PROGRAMS[name], kind, ahead=kind == "threaded")
    assert difference is None
    assert session.co_executed > 0
    assert (session.traces, session.fallbacks) == counts(paths(PROGRAMS[name], STEPS))


@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_a_drawn_program_is_computed_to_the_bit(seed: int) -> None:
    difference, session = co_executed(grammar.build, steps=10, seed=seed)
    assert difference is None
    assert session.co_executed > 0
    assert (session.traces, session.fallbacks) == counts(paths(grammar.build, 10, seed))


class Delays:
    """Random waits on both sides, so that they meet in ever different orders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        draws, apply, issued = random.Random(seed), runner.apply, terra.Session.issue

        def delayed(do: Callable[..., Any], often: float) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if draws.random() < often:
                    time.sleep(draws.random() * 0.002)
                return do(*args, **kwargs)

            return run

        monkeypatch.setattr(runner, "apply", delayed(apply, 0.2))
        monkeypatch.setattr(terra.Session, "issue", delayed(issued, 0.01))


@pytest.mark.parametrize("name", ["branches", "randoms", "numpy memory"])
def test_with_delays_on_both_sides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Delays(monkeypatch, 1)
    assert co_executed(PROGRAMS[name])[0] is None


class HostNumbers(Program):
    """A number in the CPU's memory that operations read, and one that they write; Python uses both."""

    name = "host numbers"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        weight = torch.randn(8, requires_grad=True)
        self.tensors = {"weight": weight, "count": torch.tensor(1.0), "mean": torch.tensor(0.0)}

    def step(self, i: int) -> torch.Tensor:
        weight, count, mean = self.tensors.values()
        weight.grad = None
        loss = (weight * count).square().sum()
        loss.backward()
        count.add_(1)
        with torch.no_grad():
            mean.copy_(loss)
            weight.mul_(0.9 + 0.01 * (mean * 0.5).sin())
        self.note(i)
        return loss


def _differs(build: Build) -> bool:
    """Run lazily, so that operations that were not waited for have certainly not run."""
    try:
        return co_executed(build, "lazy", ahead=False)[0] is not None
    except RuntimeError as error:
        return "terra" in str(error) or "inplace operation" in str(error) or bool(getattr(error, "__notes__", ()))


def test_host_numbers_are_right() -> None:
    assert not _differs(HostNumbers)
    assert co_executed(HostNumbers)[0] is None


class ReadsWeights(Program):
    """Reads a tensor's memory as an array while operations on it are pending."""

    name = "reads weights"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.tensors = {"weight": torch.randn(8)}

    def step(self, i: int) -> torch.Tensor:
        weight = self.tensors["weight"]
        weight.mul_(0.5 + i)
        self.note(weight.tolist())
        return weight.sum()


def test_reads_of_weights_are_right() -> None:
    assert not _differs(ReadsWeights)


def test_at_the_end_nothing_is_patched() -> None:
    assert not guards._before
    assert "numpy" not in vars(torch.Tensor)
    assert torch.random.default_generator is torch.default_generator
