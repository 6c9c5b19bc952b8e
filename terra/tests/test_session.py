"""Sessions apart from whole programs: errors, nesting, placeholders, what they leave unchanged, and merged traces."""

import contextlib
import copy
import inspect
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import terra
from terra.run.cell import Placeholder
from terra.trace.graph import Key, TraceGraph


@pytest.fixture(params=["threaded", "lazy"])
def session(request: pytest.FixtureRequest) -> Iterator[terra.Session]:
    session = terra.Session(request.param)
    yield session
    with contextlib.suppress(RuntimeError, IndexError):
        session.close()


def run(session: terra.Session, step: Callable[[], object]) -> object:
    """Run a step from one place, because the entering frame is part of an operation's location."""
    with session:
        return step()


def until_co_executed(session: terra.Session, step: Callable[[], object]) -> None:
    """Warm up, trace twice, and co-execute once."""
    for _ in range(4):
        run(session, step)
    assert (session.traces, session.fallbacks, session.co_executed) == (2, 0, 1)


def test_an_operation_s_error_is_raised_with_the_line_that_issued_it(session: terra.Session) -> None:
    table, places = torch.arange(5.0), iter([1, 2, 3, 4, 99, 0])

    def step() -> torch.Tensor:
        return torch.index_select(table, 0, torch.tensor([next(places)])).sum()

    until_co_executed(session, step)
    line = inspect.getsourcelines(step)[1] + 1
    with pytest.raises(IndexError, match="out of range") as raised:
        run(session, step)
    assert raised.value.__notes__ == [f"terra: aten.index_select.default was issued at {__file__}:{line}"]
    with pytest.raises(IndexError, match="out of range"):
        run(session, step)


def test_a_step_that_ends_early_falls_back(session: terra.Session) -> None:
    weight, steps = torch.zeros(3), count()

    def step() -> None:
        weight.add_(1)
        if next(steps) != 4:
            weight.mul_(2)

    until_co_executed(session, step)
    run(session, step)
    assert session.fallbacks == 1
    assert weight.tolist() == [31.0] * 3


def test_steps_do_not_nest(session: terra.Session) -> None:
    with session:
        with pytest.raises(RuntimeError, match="cannot contain another"), session:
            pass
        with pytest.raises(RuntimeError, match="cannot be used inside a step"), session.ahead():
            pass
    with pytest.raises(ValueError, match="'threaded' or 'lazy'"):
        terra.Session("eager")  # type: ignore[arg-type]


def placeholder(session: terra.Session, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return a result of a step that was co-executed and not waited for."""
    tensors = []
    with session.ahead():
        until_co_executed(session, lambda: tensors.append(make()))
        return tensors[-1]


def test_a_placeholder_is_read_like_any_tensor(session: terra.Session) -> None:
    weight = torch.arange(6.0).reshape(2, 3).requires_grad_()
    tensor = placeholder(session, lambda: weight * 2)
    plain = weight * 2
    assert type(tensor) is Placeholder
    assert isinstance(tensor, torch.Tensor)
    assert repr(tensor) == repr(plain)
    assert (tensor.tolist(), f"{tensor.sum():.2f}", float(tensor[1, 2])) == (plain.tolist(), "30.00", 10.0)
    with pytest.raises(RuntimeError, match="requires grad"):
        tensor.numpy()
    assert np.array_equal(tensor.detach().numpy(), plain.detach().numpy())
    assert torch.equal(copy.deepcopy(tensor.detach()), plain)
    saved = io.BytesIO()
    torch.save({"made": tensor.detach()}, saved)
    saved.seek(0)
    loaded = torch.load(saved)["made"]
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, plain)
    assert torch.equal(pickle.loads(pickle.dumps(tensor.detach())), plain)
    assert tensor.data_ptr() == tensor.untyped_storage().data_ptr() != 0


def test_a_tensor_s_memory_is_exchanged_when_what_is_pending_has_run(session: terra.Session) -> None:
    weight, sums = torch.ones(3), []
    old_data = weight.data

    def step() -> None:
        hidden = weight + 1
        sums.append(hidden.sum())
        weight.data = torch.full((3,), 2.0 * len(sums))
        hidden.data = weight.data
        sums[-1] += hidden.sum()

    for _ in range(6):
        run(session, step)
    expected, value = [], 1.0
    for place in range(6):
        expected.append(3 * (value + 1) + 3 * 2.0 * (place + 1))
        value = 2.0 * (place + 1)
    assert [float(total) for total in sums] == expected
    assert old_data.tolist() == [1.0] * 3


def test_python_hands_its_lock_on_soon_as_long_as_a_session_is_open() -> None:
    """With Python's own 5 ms, the runner was blocked by a computing Python, and nothing was gained."""
    before = sys.getswitchinterval()
    first, second = terra.Session(), terra.Session()
    assert sys.getswitchinterval() <= 2e-4 < before
    first.close()
    assert sys.getswitchinterval() <= 2e-4
    second.close()
    assert sys.getswitchinterval() == before
    sys.setswitchinterval(1e-4)
    try:
        with contextlib.closing(terra.Session()):
            assert sys.getswitchinterval() == pytest.approx(1e-4, rel=0.02), "a shorter interval stays"
        # Python counts in whole microseconds, rounded down.
        assert sys.getswitchinterval() == pytest.approx(1e-4, rel=0.03)
    finally:
        sys.setswitchinterval(before)


def test_a_closed_session_leaves_nothing(session: terra.Session) -> None:
    until_co_executed(session, lambda: torch.ones(3) + 1)
    before = threading.active_count()
    session.close()
    assert threading.active_count() == before - 1
    assert "numpy" not in vars(torch.Tensor)
    assert torch.random.default_generator is torch.default_generator
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def keys(names: str) -> tuple[Key, ...]:
    return tuple((name, (), "line") for name in names)


# A few letters, so that traces meet, part and meet again.
@given(st.lists(st.text("abcdef", max_size=9), min_size=1, max_size=12))
def test_merging_says_what_is_new_and_takes_nothing_twice(traces: list[str]) -> None:
    """Merged traces need nothing new, and neither does another trace without a new pair."""
    graph, seen = TraceGraph(), set[tuple[str, str]]()
    for trace in traces:
        pairs = set(zip(f"<{trace}", f"{trace}>", strict=True))
        assert graph.merge(keys(trace)) == (not pairs <= seen)
        seen |= pairs
    size = len(graph)
    assert not any(graph.merge(keys(trace)) for trace in traces)
    assert len(graph) == size
