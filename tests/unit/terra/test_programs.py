"""The programs that co-execution is judged by, and the judge: each computes the same twice, and no changed bit
passes."""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.terra.programs import grammar
from tests.unit.terra.programs.judge import Difference, compare, difference, plain, random_states_kept, run
from tests.unit.terra.programs.program import Feature, Program
from tests.unit.terra.programs.registry import GRAMMAR, HARDER, PROGRAMS, PUBLISHED

STEPS = 5
FOLDER = Path(grammar.__file__).parent

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_computes_the_same_twice_and_something_else_of_another_seed(name: str) -> None:
    with random_states_kept():
        one, other = (run(PROGRAMS[name], 2, plain, seed=seed) for seed in (0, 1))
    assert any(difference(*losses) for losses in zip(one.losses, other.losses, strict=True))
    assert compare(PROGRAMS[name], STEPS, plain, each_step=True) is None


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_and_says_so(name: str) -> None:
    """What changes nothing could not be computed wrongly."""
    with random_states_kept():
        seen = run(PROGRAMS[name], STEPS, plain)
    weights = [each for each in seen.states[0] if f"{each}.grad" in seen.states[0]]
    assert any(difference(seen.states[0][each], seen.states[STEPS - 1][each]) for each in weights)
    assert len({loss.item() for loss in seen.losses}) == STEPS
    assert all(seen.num_notes[number] > number for number in range(STEPS)), "a step without a side effect"


def test_there_are_ten_and_sixteen_and_every_feature_is_had() -> None:
    assert (len(PUBLISHED), len(HARDER), len(PROGRAMS)) == (10, 16, 26)
    had = {feature for build in PROGRAMS.values() for feature in build.features}
    assert had == set(Feature)
    lengths = {
        path.name: len(path.read_text().splitlines())
        for path in (*FOLDER.glob("published/*.py"), *FOLDER.glob("harder/*.py"))
    }
    assert len(lengths) == 26
    assert max(lengths.values()) <= 100, lengths


# -- the judge
# ----------------------------------------------------------------------------------------------------------------------


class Small(Program):
    """Adds what it draws."""

    name, features = "small", frozenset()

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weight, self.bias = torch.ones(2, 3, requires_grad=True), torch.zeros(1, requires_grad=True)
        self.own = torch.Generator().manual_seed(seed)
        self.tensors, self.generators = {"weight": self.weight, "bias": self.bias}, {"own": self.own}
        self.optimizers = {"sgd": torch.optim.SGD([self.weight], lr=0.1, momentum=0.9)}

    def step(self, i: int) -> torch.Tensor:
        self.optimizers["sgd"].zero_grad()
        loss = (self.weight * torch.randn(3)).sum()
        loss.backward()
        self.optimizers["sgd"].step()
        self.note("first", i)
        self.note("second", 0.5)
        return loss.detach()


def flip(tensor: torch.Tensor) -> None:
    """The last bit of its fifth element, or of its only one."""
    with torch.no_grad():
        bits = tensor.view(-1).view(torch.int32)
        bits[min(4, len(bits) - 1)] ^= 1


def swap(log: list[str]) -> None:
    log[-2:] = reversed(log[-2:])


MISCHIEF: dict[str, tuple[Callable[[Small], Any], tuple[str, str, int]]] = {
    "weight": (lambda program: flip(program.weight), ("state", "tensors.weight", 2)),
    "gradient": (lambda program: flip(program.weight.grad), ("state", "tensors.weight.grad", 2)),
    "gradient from nowhere": (
        lambda program: setattr(program.bias, "grad", torch.zeros(1)),
        ("state", "tensors.bias.grad", 2),
    ),
    "momentum": (
        lambda program: flip(program.optimizers["sgd"].state[program.weight]["momentum_buffer"]),
        ("state", "sgd.0.momentum_buffer", 2),
    ),
    "rate": (lambda program: program.optimizers["sgd"].param_groups[0].update(lr=0.2), ("state", "sgd.group0.lr", 2)),
    "torch's generator": (lambda program: torch.rand(()), ("random", "torch", 2)),
    "its own generator": (lambda program: torch.rand((), generator=program.own), ("random", "own", 2)),
    "Python's generator": (lambda program: random.random(), ("random", "python", 2)),
    "numpy's generator": (lambda program: np.random.rand(), ("random", "numpy", 2)),
    "order of the log": (lambda program: swap(program.log), ("log", "log", 2)),
    "note left out": (lambda program: program.log.pop(), ("log", "log", 2)),
    "note too many": (lambda program: program.note("third"), ("log", "log", 2)),
}


def mischievous(do: Callable[[Any], Any], at: int) -> Callable[[Any], torch.Tensor]:
    def runner(step: Any) -> torch.Tensor:
        loss = step()
        if step.args == (at,):
            do(step.func.__self__)
        return loss

    return runner


@pytest.mark.parametrize("what", MISCHIEF)
def test_the_judge_names_what_a_runner_did_to_a_step(what: str) -> None:
    do, expected = MISCHIEF[what]
    found = compare(Small, 5, mischievous(do, at=2), each_step=True)
    assert found is not None
    assert (found.what, found.name, found.step) == expected
    # Looked at after the last step only, it is found too, at the latest there; a gradient and a momentum are computed
    # anew meanwhile.
    at_end = compare(Small, 3, mischievous(do, at=2))
    assert at_end == found


def test_the_judge_reads_losses_at_the_end() -> None:
    def later(step: Any) -> torch.Tensor:
        loss = step()
        if step.args == (1,):
            flip(loss)
        return loss

    found = compare(Small, 3, later)
    assert found is not None
    assert (found.what, found.step) == ("loss", 1)
    assert re.fullmatch(r"loss loss after step 1: 1 of 1 elements, the first at 0: \S+ in place of \S+", str(found))


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (torch.tensor([0.0, 0.0]), torch.tensor([0.0, -0.0]), "1 of 2 elements, the first at 1: -0.0 in place of 0.0"),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), ""),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "torch.float64 [2] in place of torch.float32 [2]"),
        (torch.ones(2), torch.ones(1, 2), "torch.float32 [1, 2] in place of torch.float32 [2]"),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), ""),
        (
            torch.tensor([1 + 2j]).conj(),
            torch.tensor([1 + 2j]),
            "1 of 1 elements, the first at 0: (1+2j) in place of (1-2j)",
        ),
        (torch.ones(0), torch.ones(0), ""),
        (torch.ones(1), None, "is missing"),
        (None, torch.ones(1), "should not be there"),
    ],
    ids=["sign of zero", "nan", "type", "shape", "lazy conjugate", "conjugate", "empty", "missing", "too many"],
)
def test_bits_are_compared(one: torch.Tensor | None, other: torch.Tensor | None, said: str) -> None:
    assert difference(one, other) == said


def test_judging_leaves_random_states_alone() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert compare(PROGRAMS["randoms"], 2, plain) is None
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_an_error_of_a_runner_is_not_swallowed() -> None:
    def broken(step: Any) -> torch.Tensor:
        raise OSError("on purpose")

    with pytest.raises(OSError, match="on purpose"):
        compare(Small, 2, broken)


# -- the grammar
# ----------------------------------------------------------------------------------------------------------------------


def test_every_rule_of_the_grammar_is_drawn() -> None:
    drawn = [grammar.draw(seed).features for seed in GRAMMAR]
    often = {name: sum(name in features for features in drawn) for name in frozenset().union(*drawn)}
    assert {rule.__name__ for rule in grammar.RULES} < often.keys()
    assert len(often) == len(grammar.RULES) + 12, "optimizers, ways with gradients, clipping and a schedule"
    assert min(often.values()) >= 5, often
    assert len({grammar.draw(seed).listing for seed in GRAMMAR}) == len(GRAMMAR)


@pytest.mark.parametrize("seed", range(0, len(GRAMMAR), 20))
def test_a_listing_builds_its_program_again(seed: int) -> None:
    drawing = grammar.draw(seed)
    assert drawing == grammar.draw(seed)
    assert compare_two(drawing.listing, seed) is None
    # And what it says is what runs.
    other = drawing.listing.replace("mean() * 0.01\n", "mean() * 0.02\n")
    assert compare_two(other, seed) is not None


def compare_two(listing: str, seed: int) -> Difference | None:
    builds = iter([grammar.build, lambda seed: grammar.from_listing(listing, seed)])
    return compare(lambda seed: next(builds)(seed), 2, plain, seed=seed, each_step=True)


def test_a_failure_shows_the_listings_line() -> None:
    listing = grammar.draw(7).listing.replace("x1 = x0 @ self.weights[0]", "x1 = x0 @ self.weights[9]")
    with random_states_kept(), pytest.raises(IndexError) as raised:
        grammar.from_listing(listing, 7).step(0)
    assert "x1 = x0 @ self.weights[9]" in "".join(traceback.format_tb(raised.tb))


@pytest.mark.parametrize(
    ("seeds", "steps"), [(GRAMMAR[:40], 3), pytest.param(GRAMMAR, 6, marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.timeout(300)
def test_programs_of_the_grammar_compute_the_same_twice(seeds: range, steps: int) -> None:
    for seed in seeds:
        found = compare(grammar.build, steps, plain, seed=seed, each_step=True)
        assert found is None, f"{found}\n{grammar.draw(seed).listing}"
