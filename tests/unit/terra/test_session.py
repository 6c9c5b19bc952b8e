"""What a session does besides whole programs: who runs what, errors, what stays of placeholders, and what it leaves
alone."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

import terra
from terra.run.cell import Placeholder


@pytest.fixture(params=["threaded", "lazy"])
def session(request: pytest.FixtureRequest) -> Iterator[terra.Session]:
    beside = terra.Session(request.param)
    yield beside
    with contextlib.suppress(RuntimeError, IndexError):
        beside.close()


def run(session: terra.Session, step: Callable[[], object]) -> object:
    """From one place: the frame that enters is part of where operations are issued."""
    with session:
        return step()


def until_co_executed(session: terra.Session, step: Callable[[], object]) -> None:
    """Warm up, trace twice, and co-execute once."""
    for _ in range(4):
        run(session, step)
    assert (session.traces, session.fallbacks, session.co_executed) == (2, 0, 1)


def test_a_step_that_is_co_executed_only_issues(session: terra.Session) -> None:
    """Kernels run on the runner's thread, and Python on its own, in the order that it has."""
    ran: list[tuple[str, int]] = []

    @torch.library.custom_op(f"terra_test::seen_{session._is_lazy}", mutates_args=())
    def seen(given: torch.Tensor) -> torch.Tensor:
        ran.append(("kernel", threading.get_ident()))
        return given * 2

    weight = torch.randn(300, 300)

    def step() -> torch.Tensor:
        made = seen(weight @ weight)
        ran.append(("python", threading.get_ident()))
        return made.sum()

    until_co_executed(session, step)
    ran.clear()
    here = threading.get_ident()
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as profiled:
        run(session, step)
    assert session.co_executed == 2
    assert {who for who, thread in ran if thread == here} == {"python"}
    assert [who for who, thread in ran if thread != here] == ["kernel"]
    by_thread: dict[int, list[str]] = {}
    for event in profiled.events():
        by_thread.setdefault(event.thread, []).append(event.name)
    (python,) = [names for names in by_thread.values() if "PythonDispatchMode" in names]
    (beside,) = [names for names in by_thread.values() if "PythonDispatchMode" not in names]
    # Where an operation is issued it ends in the mode; where it runs its kernels need others.
    assert python.count("PythonDispatchMode") == 3
    inside = {"aten::resolve_conj", "aten::fill_", "aten::as_strided", "aten::empty"}
    assert inside & set(beside)
    assert not inside & set(python)
    assert beside.count("aten::mm") == beside.count("aten::sum") == 1


def test_in_a_traced_step_python_runs_all(session: terra.Session) -> None:
    threads = set()

    @torch.library.custom_op(f"terra_test::traced_{session._is_lazy}", mutates_args=())
    def traced(given: torch.Tensor) -> torch.Tensor:
        threads.add(threading.get_ident())
        return given * 2

    for _ in range(3):
        with session:
            traced(torch.ones(3))
    assert threads == {threading.get_ident()}


# -- errors
# ----------------------------------------------------------------------------------------------------------------------


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


def test_what_was_issued_before_an_error_of_the_program_has_run(session: terra.Session) -> None:
    weight, steps = torch.zeros(3), count()

    def step() -> None:
        weight.add_(1)
        if next(steps) == 4:
            raise KeyError("on purpose")
        weight.add_(1)

    until_co_executed(session, step)
    with pytest.raises(KeyError, match="on purpose"):
        run(session, step)
    assert weight.tolist() == [9.0] * 3
    run(session, step)
    assert (weight.tolist(), session.co_executed) == ([11.0] * 3, 2)


def test_a_fall_back_in_mid_step_goes_on_with_the_same_placeholders(session: terra.Session) -> None:
    weight, steps = torch.randn(4, requires_grad=True), count()
    gradients = []

    def step() -> torch.Tensor:
        hidden = (weight * 2).sin()
        if next(steps) == 4:
            hidden = hidden.cos()
        weight.grad = None
        loss = hidden.sum()
        loss.backward()
        gradients.append(weight.grad)
        return hidden

    until_co_executed(session, step)
    made = run(session, step)
    assert isinstance(made, torch.Tensor)
    assert session.fallbacks == 1
    with torch.no_grad():
        assert torch.equal(made, (weight * 2).sin().cos())
        assert torch.equal(gradients[-1], -(weight * 2).sin().sin() * ((weight * 2).cos() * 2))
    for _ in range(2):
        run(session, step)
    # What fell back is known; the next one was traced to see that nothing else is new.
    assert (session.traces, session.fallbacks, session.co_executed) == (3, 1, 2)


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


class Holder:
    """Its property is a function of Python's, which Python calls in a quicker way when it has seen it a few times."""

    def __init__(self) -> None:
        self.weight = torch.ones(3)

    @property
    def doubled(self) -> torch.Tensor:
        return self.weight * 2


def test_a_property_stays_one_place(session: terra.Session) -> None:
    """A Megatron stage was traced three times, for a hook reads `param.grad.data`: from then on the place was
    another instruction."""
    holder, turns = Holder(), count(1)

    def step() -> torch.Tensor:
        return sum((holder.doubled for _ in range(next(turns))), start=torch.zeros(3))

    for _ in range(12):
        run(session, step)
    assert (session.traces, session.fallbacks, session.co_executed) == (2, 0, 9)


def test_steps_do_not_nest(session: terra.Session) -> None:
    with session:
        with pytest.raises(RuntimeError, match="cannot contain another"), session:
            pass
        with pytest.raises(RuntimeError, match="cannot be used inside a step"), session.ahead():
            pass
    with pytest.raises(ValueError, match="'threaded' or 'lazy'"):
        terra.Session("eager")  # type: ignore[arg-type]


# -- placeholders
# ----------------------------------------------------------------------------------------------------------------------


def placeholder(session: terra.Session, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Made by a step that was co-executed and not waited for."""
    made = []
    with session.ahead():
        until_co_executed(session, lambda: made.append(make()))
        return made[-1]


def test_a_placeholder_is_read_like_any_tensor(session: terra.Session) -> None:
    weight = torch.arange(6.0).reshape(2, 3).requires_grad_()
    made = placeholder(session, lambda: weight * 2)
    plain = weight * 2
    assert type(made) is Placeholder
    assert isinstance(made, torch.Tensor)
    assert repr(made) == repr(plain)
    assert (made.tolist(), f"{made.sum():.2f}", float(made[1, 2])) == (plain.tolist(), "30.00", 10.0)
    with pytest.raises(RuntimeError, match="requires grad"):
        made.numpy()
    assert np.array_equal(made.detach().numpy(), plain.detach().numpy())
    assert torch.equal(copy.deepcopy(made.detach()), plain)
    saved = io.BytesIO()
    torch.save({"made": made.detach()}, saved)
    saved.seek(0)
    loaded = torch.load(saved)["made"]
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, plain)
    assert torch.equal(pickle.loads(pickle.dumps(made.detach())), plain)
    assert made.data_ptr() == made.untyped_storage().data_ptr() != 0


def test_a_placeholder_trains_outside_of_steps(session: terra.Session) -> None:
    weight = torch.arange(3.0).requires_grad_()
    made = placeholder(session, lambda: (weight * weight).sum())
    made.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0, 2.0, 4.0]


def test_a_placeholder_is_written_and_looked_at_outside_of_steps(session: terra.Session) -> None:
    made = placeholder(session, lambda: torch.zeros(4) + 1)
    part = made[1:3]
    part.add_(1)
    made.mul_(2)
    made.unsqueeze_(0)
    assert (made.tolist(), part.tolist(), list(made.shape)) == ([[2.0, 4.0, 4.0, 2.0]], [4.0, 4.0], [1, 4])


def test_a_tensor_s_memory_is_exchanged_when_what_is_pending_has_run(session: terra.Session) -> None:
    weight, sums = torch.ones(3), []
    kept = weight.data

    def step() -> None:
        hidden = weight + 1
        sums.append(hidden.sum())
        weight.data = torch.full((3,), 2.0 * len(sums))
        hidden.data = weight.data
        sums[-1] += hidden.sum()

    for _ in range(6):
        run(session, step)
    plain, now = [], 1.0
    for place in range(6):
        plain.append(3 * (now + 1) + 3 * 2.0 * (place + 1))
        now = 2.0 * (place + 1)
    assert [float(each) for each in sums] == plain
    assert kept.tolist() == [1.0] * 3


def test_memory_goes_where_it_is_last_used(session: terra.Session) -> None:
    """And not when its block has run: a stage's activations would not fit."""
    seen: list[weakref.ref[object]] = []
    alive: list[int] = []

    @torch.library.custom_op(f"terra_test::kept_{session._is_lazy}", mutates_args=())
    def kept(given: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(given.untyped_storage()))
        alive.append(sum(each() is not None for each in seen))
        return given * 2

    weight = torch.randn(10)

    def step() -> torch.Tensor:
        hidden = weight
        for _ in range(20):
            hidden = kept(hidden)
        return hidden

    for _ in range(4):
        seen.clear()
        run(session, step)
    assert session.co_executed == 1
    # What it was made of may still be there, and the weight is.
    assert max(alive[-20:]) <= 3


# -- what it leaves alone
# ------------------------------------------------------------------------------------------------------------------


def test_other_threads_are_let_alone(session: terra.Session) -> None:
    """A loader's thread reads tensors of its own in the middle of a step, which is not co-executed then."""
    weight, read = torch.ones(3), []

    def step() -> torch.Tensor:
        made = weight + 1
        other = threading.Thread(
            target=lambda: read.append((torch.arange(3).numpy().tolist(), torch.arange(2).tolist()))
        )
        other.start()
        other.join()
        return made * 2

    for _ in range(4):
        run(session, step)
    assert (session.traces, session.fallbacks, session.co_executed, session.at_once) == (2, 0, 0, 1)
    assert read == [([0, 1, 2], [0, 1])] * 4


def test_between_steps_ahead_operations_wait(session: terra.Session) -> None:
    weight, seen = torch.zeros(1000, 1000), []
    with session.ahead():
        for _ in range(6):
            with session:
                for _ in range(20):
                    weight.add_(1)
            seen.append(weight.max().item())
    assert seen == [20.0, 40.0, 60.0, 80.0, 100.0, 120.0]
    assert session.co_executed == 3


def test_python_hands_its_lock_on_soon_as_long_as_a_session_is_open() -> None:
    """With the 5 ms of its own the runner stood still beside Python that computes: nothing was gained."""
    before = sys.getswitchinterval()
    one, other = terra.Session(), terra.Session()
    assert sys.getswitchinterval() <= 2e-4 < before
    one.close()
    assert sys.getswitchinterval() <= 2e-4
    other.close()
    assert sys.getswitchinterval() == before
    sys.setswitchinterval(1e-4)
    try:
        with contextlib.closing(terra.Session()):
            assert sys.getswitchinterval() == pytest.approx(1e-4, rel=0.02), "who wants it sooner has it sooner"
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
