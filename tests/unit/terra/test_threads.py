"""Which thread runs what, by the profiler, over all programs: in co-executed steps kernels run on the runner's thread,
but for what is declared here.

In Python's thread an operation that is issued ends in the mode. One that Python runs itself is called again from inside
of the mode, and one that passes it by has no mode below it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

import terra
from tests.support.threads import one_thread_a_rank as one_thread_a_rank
from tests.unit.terra.programs.judge import random_states_kept
from tests.unit.terra.programs.registry import PROGRAMS

STEPS = 12
MODE = "PythonDispatchMode"
# They compute nothing: another look at memory that there is.
VIEWS = frozenset(
    {
        *(
            "_conj",
            "_neg_view",
            "alias",
            "as_strided",
            "detach",
            "expand",
            "permute",
            "select",
            "slice",
            "split",
            "split_with_sizes",
        ),
        *("t", "transpose", "transpose_", "unbind", "unsqueeze", "view"),
    }
)
# Of memory that Python may write before the runner reads it, and memory without numbers.
COPIES = frozenset({"copy_", "empty", "empty_strided"})
# Of single numbers of the host's alone, as optimizers count their steps, and what Python reads.
NUMBERS = frozenset({"add_", "_local_scalar_dense", "item"})
# What else Python's thread computes, and why.
DECLARED: dict[str, frozenset[str]] = {
    # Step counts in lists, whose sizes the profiler does not have.
    "optimizers": frozenset({"_foreach_add_"}),
    # Random numbers of generators of the program's, and a comparison that Python reads.
    "randoms": frozenset({"randn", "bernoulli_", "multinomial", "equal"}),
    # Memory that an array has too is written.
    "numpy memory": frozenset({"add_"}),
    # Lazily conjugated numbers.
    "complex numbers": frozenset({"mm", "clone"}),
    # Sizes that the data decide, and what takes them: those are others each step.
    "masks": frozenset(
        {
            *(
                "_has_compatible_shallow_copy_type",
                "_unique2",
                "index",
                "index_put",
                "masked_scatter",
                "masked_select",
                "mul",
            ),
            *("new_zeros", "nonzero", "pow", "repeat_interleave", "set_", "sum"),
        }
    ),
}
# Calls that give back what they were given, or memory without numbers; beside them what passes the mode by.
NOTHING = frozenset({"to", "resolve_conj", "resolve_neg", "broadcast_tensors", "empty", "detach"})
PAST: dict[str, frozenset[str]] = {
    # Recomputation is stopped by an error where the multiplication saves its arguments: it never runs.
    "recompute": frozenset({"mul"}),
    # It prints values.
    "masks": frozenset(
        {
            *(
                "_local_scalar_dense",
                "abs",
                "as_strided",
                "bitwise_and",
                "ceil",
                "copy_",
                "div",
                "empty_strided",
                "eq",
                "fill_",
                "flatten",
            ),
            *("gt", "lt", "mul", "ne", "set_", "view"),
        }
    ),
}
# No step of theirs has only sizes and places that were met before.
NEVER_THE_SAME = frozenset({"masks", "views"})

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
]


class Seen:
    """`inside`: operations that Python's thread ran from inside of the mode, with whether any has a size; `past`:
    those that it ran with no mode below them; `beside`: those of the runner's thread."""

    def __init__(self, step: Callable[[], object]) -> None:
        settings = _ExperimentalConfig(profile_all_threads=True)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, experimental_config=settings) as profiled:
            step()
        self.inside: set[tuple[str, bool]] = set()
        self.past: set[str] = set()
        self.beside: list[str] = []
        by_thread: defaultdict[int, list[Any]] = defaultdict(list)
        for event in profiled.events():
            by_thread[event.thread].append(event)
        for events in by_thread.values():
            if not any(event.name == MODE for event in events):
                self.beside += [event.name for event in events if event.cpu_parent is None]
                continue
            for event in events:
                self._look(event)

    def _look(self, event: Any) -> None:
        space, _, name = event.name.partition("::")
        above = _above(event)
        if above[:1] == [MODE]:
            self.inside.add((name or space, any(event.input_shapes)))
        elif space == "aten" and not event.cpu_children and MODE not in above:
            self.past.add(name)


def _above(event: Any) -> list[str]:
    names = []
    while (event := event.cpu_parent) is not None:
        names.append(event.name)
    return names


def undeclared(name: str, seen: Seen) -> set[str]:
    allowed = VIEWS | COPIES | DECLARED.get(name, frozenset())
    inside = {each for each, has_size in seen.inside if each not in allowed and (has_size or each not in NUMBERS)}
    return inside | (seen.past - NOTHING - PAST.get(name, frozenset()))


def steps(name: str) -> Iterator[tuple[bool, bool, Seen]]:
    """Of each step after the warm-up: whether it was co-executed, whether it met sizes for the first time, and what
    was seen."""
    with random_states_kept(), contextlib.closing(terra.Session()) as session:
        program = PROGRAMS[name](0)

        def step() -> None:
            with session:
                program.step(number)

        for number in range(STEPS):
            if number == 0:
                step()
                continue
            before, known = session.co_executed, len(session._results.known)
            seen = Seen(step)
            yield session.co_executed > before, len(session._results.known) > known, seen


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_co_executed_steps_the_runner_alone_computes(name: str) -> None:
    looked_at = 0
    for is_co_executed, is_new, seen in steps(name):
        # An operation on sizes that were never met runs at once, to learn what it makes: that is declared too.
        if is_co_executed and (not is_new or name in NEVER_THE_SAME):
            looked_at += 1
            assert undeclared(name, seen) == set()
            assert seen.beside
    assert looked_at >= 3


def test_a_kernel_in_pythons_thread_would_be_seen() -> None:
    """Traced steps have all of them there."""
    is_co_executed, _, seen = next(steps("ResNet50"))
    assert not is_co_executed
    assert {"convolution", "native_batch_norm", "addmm"} <= undeclared("ResNet50", seen)
    assert not seen.beside


def test_what_is_declared_is_there() -> None:
    """And nothing is declared that no step needs."""
    for name, declared in DECLARED.items():
        found = {each for is_co_executed, _, seen in steps(name) if is_co_executed for each, _ in seen.inside}
        assert declared <= found, name
    for name, declared in PAST.items():
        found = {each for is_co_executed, _, seen in steps(name) if is_co_executed for each in seen.past}
        assert declared <= found, name
