"""What programs do with a step's tensors that is no operation: they copy, swap and lend them, fork, and read them in other threads.

Every step here is run plainly and with a session; what it gives must be equal in every bit, with its type.
"""

from __future__ import annotations

import _thread
import contextlib
import copy
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import terra
from tests.unit.threads import one_thread_a_rank as one_thread_a_rank

Step = Callable[[], Any]
STEPS = 6
KINDS = ("threaded", "lazy", "script")


def opened(kind: str) -> contextlib.closing[terra.Session]:
    return contextlib.closing(terra.Session(backend="script") if kind == "script" else terra.Session(kind))  # type: ignore[arg-type]


def bits(made: Any) -> Any:
    """Numbers with their types, out of whatever a step gives."""
    if isinstance(made, torch.Tensor):
        return made.dtype, made.detach().numpy().tobytes(), tuple(made.shape), made.requires_grad
    if isinstance(made, dict):
        return {name: bits(each) for name, each in made.items()}
    return [bits(each) for each in made] if isinstance(made, (list, tuple)) else made


def plainly(build: Callable[[], Step]) -> list[Any]:
    step = build()
    return [bits(step()) for _ in range(STEPS)]


def in_session(session: terra.Session, build: Callable[[], Step]) -> list[Any]:
    step, made = build(), []
    for _ in range(STEPS):
        with session:
            made.append(step())
        made[-1] = bits(made[-1])
    return made


def is_equal(kind: str, build: Callable[[], Step]) -> None:
    expected = plainly(build)
    with opened(kind) as session:
        assert in_session(session, build) == expected
        assert (session.fallbacks, session.co_executed + session.at_once) == (0, STEPS - 3)


# -- copies --------------------------------------------------------------------------------------------------------------------------------


def best_weights() -> Step:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    net.load_state_dict({name: torch.full_like(each, place) for place, (name, each) in enumerate(net.state_dict().items())})

    def step() -> Any:
        with torch.no_grad():
            for each in net.parameters():
                each.add_(1)
        return copy.deepcopy(net.state_dict())

    return step


@pytest.mark.parametrize("kind", KINDS)
def test_a_deep_copy_of_several_has_each_of_them(kind: str) -> None:
    """Every copy was that of the first: it was remembered by the identity of a value that was gone, which the next one got."""
    is_equal(kind, best_weights)
    with opened(kind) as session, session:
        copied = best_weights()()
    assert {type(each) for each in copied.values()} == {torch.Tensor}


@pytest.mark.parametrize("kind", KINDS)
def test_a_deep_copy_is_built_as_what_is_copied(kind: str) -> None:
    """The same tensor twice is one copy, tensors of one memory have one, and what hangs on a tensor goes with it."""
    weight = torch.arange(6.0)

    def copied() -> list[torch.Tensor]:
        made = weight * 2
        made.label = "half"  # type: ignore[attr-defined]
        leaf = (weight * 3).requires_grad_()
        (leaf * leaf).sum().backward()
        memory: dict[int, Any] = {}
        return copy.deepcopy([made, made, made[2:4], leaf, torch.nn.Parameter(weight * 4), weight], memory)

    with opened(kind) as session:
        for _ in range(STEPS):
            with session:
                made, again, part, leaf, parameter, outer = copied()
    assert made is again
    part.zero_()
    assert made.tolist() == [0.0, 2.0, 0.0, 0.0, 8.0, 10.0]
    assert (made.label, type(parameter), parameter.requires_grad) == ("half", torch.nn.Parameter, True)  # type: ignore[attr-defined]
    assert leaf.requires_grad
    assert leaf.grad is not None
    assert leaf.grad.tolist() == (weight * 6).tolist()
    assert (parameter.tolist(), outer.tolist(), weight.tolist()) == ((weight * 4).tolist(), weight.tolist(), list(range(6)))


def test_a_deep_copy_of_what_has_a_history_is_refused_as_ever() -> None:
    weight = torch.ones(3, requires_grad=True)
    with opened("threaded") as session, session, pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(weight * 2)
    with opened("threaded") as session:
        for _ in range(4):
            with session:
                hidden = weight * 2
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(hidden)


def parameters_made_in_the_step() -> Step:
    weight = torch.arange(3.0)

    def step() -> Any:
        loaded = pickle.loads(pickle.dumps([torch.nn.Parameter(weight + 1), weight * 2]))
        return isinstance(loaded[0], torch.nn.Parameter), loaded

    return step


# -- memory that is lent, swapped and written ----------------------------------------------------------------------------------------------


def capsules() -> Step:
    weight = torch.randn(4, generator=torch.Generator().manual_seed(1))

    def step() -> Any:
        weight.mul_(1.5)
        made = weight * 2
        taken = [torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(each)) for each in (made, weight)]
        taken += [torch.from_dlpack(made * 1), torch.from_dlpack((made * 1).__dlpack__()), torch.from_numpy(np.from_dlpack(made * 1))]
        made.add_(1)
        return [*taken, made]

    return step


def called_on_each_number() -> Step:
    weight = torch.arange(4.0)

    def step() -> Any:
        weight.mul_(1.5)
        made, other = weight * 2, weight * 3
        one = torch.ones(())
        made.apply_(lambda each: each + float(one * 2))
        weight.apply_(lambda each: each + 1)
        other.map_(made, lambda one, other: one * other)
        weight.map_(other, lambda one, other: one - other)
        other.map2_(made, weight, lambda one, two, three: one + two * three)
        return made, other, weight * 1, made.apply_(lambda each: each) is made

    return step


def lists_of_tensors() -> Step:
    weight, mean = torch.arange(4.0), torch.zeros(())

    def step() -> Any:
        weight.mul_(1.5)
        loss = weight.sum()
        mean.copy_(loss)
        lists = [torch.tensor([loss, mean, 2.0]), torch.as_tensor([[loss], [mean]]), torch.asarray([loss]), weight.new_tensor([loss, 1])]
        return [*lists, torch.Tensor([loss, mean]), weight.new([loss, mean]), torch.tensor([1, 2]), torch.tensor(weight * 2)]

    return step


def swapped() -> Step:
    one, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.arange(2.0))

    def step() -> Any:
        with torch.no_grad():
            one.add_(1)
            other.mul_(3)
        made, another = one.detach() * 2, other.detach() * 3
        torch.utils.swap_tensors(one, other)
        torch.utils.swap_tensors(made, another)
        with torch.no_grad():
            one.mul_(0.5)
        return one * 1, other * 1, made + 1, another - 1

    return step


def set_apart_by_a_made_index() -> Step:
    table, at = torch.arange(12.0).reshape(6, 2), torch.tensor([1, 3])

    def step() -> Any:
        table.add_(1)
        at.copy_(at.flip(0).sort().values)
        return [
            torch.tensor_split(table * 2, at + 1),
            (table * 2).tensor_split(at),
            torch.tensor_split(table, at, dim=0),
            table.tensor_split(3),
        ]

    return step


def packed(kind: str) -> Callable[[], Step]:
    def build() -> Step:
        torch.manual_seed(4)
        layer = getattr(torch.nn, kind)(3, 4, batch_first=True)
        words, batch, lengths = torch.nn.Embedding(7, 3), torch.arange(15).reshape(3, 5) % 7, torch.tensor([5, 3, 2])

        def step() -> Any:
            made = pack_padded_sequence(words(batch) * 2, lengths * 1, batch_first=True)
            hidden, last = layer(made)
            again = PackedSequence(hidden.data * 2, hidden.batch_sizes + 0)
            padded, sizes = pad_packed_sequence(hidden, batch_first=True)
            padded = padded + pad_packed_sequence(again, batch_first=True)[0]
            for each in (layer, words):
                each.zero_grad()
            padded.square().sum().backward()
            return padded, sizes, last, [each.grad for each in (*layer.parameters(), words.weight)]

        return step

    return build


def states_of_layers(kind: str) -> Callable[[], Step]:
    """A state stands where a packed batch has its sizes, and has gradients."""

    def build() -> Step:
        torch.manual_seed(4)
        layer = getattr(torch.nn, kind)(3, 4, batch_first=True)
        batch, state = torch.randn(2, 5, 3), torch.randn(1, 2, 4, requires_grad=True)

        def step() -> Any:
            state.grad = None
            made, _ = layer(batch, (state * 2, state * 3) if kind == "LSTM" else state * 2)
            made.square().sum().backward()
            return made, state.grad

        return step

    return build


def default_type_of_the_step() -> Step:
    numbers, turns = torch.arange(3), count()

    def step() -> Any:
        first = torch.ones(3)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if next(turns) % 2 else before)
        try:
            return first, torch.ones(3) + numbers / 2
        finally:
            torch.set_default_dtype(before)

    return step


def truths_for_numbers() -> Step:
    numbers, mask = torch.arange(3), torch.tensor([True, False, True])

    def step() -> Any:
        one_hot = torch.nn.functional.one_hot(numbers + 0, 4)
        truths = [(numbers > 1) == True, mask.masked_fill(~mask, True), torch.full((2,), True), numbers + True]  # noqa: E712
        return [one_hot * 2, one_hot == True, *truths, numbers.clamp(max=True) * 2]  # noqa: E712

    return step


def singular_values() -> Step:
    weight = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))

    def step() -> Any:
        weight.mul_(1.1)
        made, even = weight * 2, weight + weight.T
        norms = torch.linalg.matrix_norm(made, ord=2), torch.linalg.norm(weight, "nuc"), torch.norm(made, "nuc"), made.norm("nuc")
        each = torch.vmap(torch.linalg.svdvals)(torch.stack([made, even]))
        return each, torch.linalg.svdvals(made), torch.linalg.svdvals(weight), torch.linalg.eigvalsh(even), torch.linalg.cond(made), *norms

    return step


PROGRAMS = {
    **{each.__name__: each for each in (parameters_made_in_the_step, capsules, called_on_each_number, lists_of_tensors, swapped)},
    **{each.__name__: each for each in (set_apart_by_a_made_index, default_type_of_the_step, truths_for_numbers)},
    **{f"packed {kind}": packed(kind) for kind in ("LSTM", "GRU", "RNN")},
    **{f"state of {kind}": states_of_layers(kind) for kind in ("LSTM", "GRU", "RNN")},
    "singular_values": singular_values,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_gives_what_it_gives_without_a_session(name: str, kind: str) -> None:
    """Each of these ended the process, raised, or gave other numbers without a word."""
    is_equal(kind, PROGRAMS[name])


class Labelled(torch.Tensor):
    """A subclass that does not take itself apart."""


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: (weight * 2).as_subclass(Labelled),
        lambda weight: weight.as_subclass(Labelled) + 1,
        lambda weight: Labelled(weight * 2),
        lambda weight: torch.FloatTensor([weight.sum()]),
    ],
    ids=["made", "given", "constructed", "legacy"],
)
def test_what_cannot_be_is_refused_with_what_to_do(use: Callable[[torch.Tensor], object]) -> None:
    """Torch's own words are of compilers and custom kernels."""
    weight = torch.ones(3)
    use(weight)
    with opened("threaded") as session:
        with session:
            use(weight)
        with pytest.raises(RuntimeError) as refused, session:
            use(weight)
    assert "has to run outside of `with session:`" in refused.value.__notes__[0]


def with_a_dual(weight: torch.Tensor) -> None:
    with forward_ad.dual_level():
        forward_ad.make_dual(weight, weight)


def with_jvp(weight: torch.Tensor) -> None:
    torch.func.jvp(torch.sin, (weight,), (weight,))


@pytest.mark.parametrize("use", [with_a_dual, with_jvp])
def test_derivatives_ahead_are_refused_in_steps(use: Callable[[torch.Tensor], None]) -> None:
    """They ended the process (`masked_fill`, dropout), or differed in their last digits (`normalize`)."""
    weight = torch.linspace(-1, 1, 5)
    with opened("threaded") as session:
        with pytest.raises(RuntimeError, match=r"take them outside of `with session:`"), session:
            use(weight)
        use(weight)
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode derivatives"), session:
            pass
        with session:
            torch.func.grad(lambda each: each.sin().sum())(weight)


def test_a_product_s_gradient_is_refused_in_steps() -> None:
    """It differed in its last digits: torch takes another formula where a mode looks on."""
    weight = torch.linspace(-1, 1, 5).requires_grad_()
    with opened("threaded") as session:
        # The first step is plain.
        with session:
            (weight * 2).prod().backward()
        with pytest.raises(RuntimeError, match=r"multiply the numbers one by one"), session:
            (weight * 2).prod()
        with session, torch.no_grad():
            weight.prod()
        with session:
            weight.detach().prod(0)


def test_denormal_numbers_are_flushed_where_the_program_has_them_flushed() -> None:
    """The processor flushes for a thread: the runner's went on without."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    torch.set_flush_denormal(False)

    def build() -> Step:
        tiny, turns = torch.full((3,), 1e-38), count()

        def step() -> Any:
            torch.set_flush_denormal(next(turns) > 3)
            return tiny * 1e-3, (tiny * 0.5).sum()

        return step

    try:
        expected = plainly(build)
        torch.set_flush_denormal(False)
        with opened("threaded") as session:
            assert in_session(session, build) == expected
        torch.set_flush_denormal(True)
        with opened("threaded") as session:
            assert in_session(session, partial(flushed, torch.full((3,), 1e-38))) == [bits(torch.zeros(3))] * STEPS
            assert (session.co_executed, session.at_once) == (0, 3)
    finally:
        torch.set_flush_denormal(False)
    assert len(set(map(str, expected))) == 2


def flushed(tiny: torch.Tensor) -> Step:
    return lambda: tiny * 1e-3


# -- other threads -------------------------------------------------------------------------------------------------------------------------


def trained(weight: torch.nn.Parameter) -> torch.Tensor:
    """Some operations that write a parameter, of which a block is pending."""
    with torch.no_grad():
        for _ in range(5):
            weight.mul_(1.5).add_(1)
        return weight.sum()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as workers:
        # It starts its thread with the first task.
        workers.submit(int).result()
        yield workers


def saved_beside(start: Callable[[Callable[[], None]], Callable[[], object]]) -> Step:
    """Saves a parameter in another thread, which is waited for at the end of the step as an asynchronous checkpoint is."""
    weight = torch.nn.Parameter(torch.ones(200))

    def step() -> Any:
        saved = []
        loss = trained(weight)
        wait = start(lambda: saved.extend([weight.clone(), weight.detach().numpy().copy(), float(loss), loss * 2]))
        hidden = weight.detach() * 2
        wait()
        trained(weight)
        return saved[0], torch.from_numpy(saved[1]), saved[2:], hidden

    return step


def by_thread(save: Callable[[], None]) -> Callable[[], object]:
    thread = threading.Thread(target=save)
    thread.start()
    return thread.join


def by_unknown_thread(save: Callable[[], None]) -> Callable[[], object]:
    done = threading.Event()

    def run() -> None:
        save()
        done.set()

    _thread.start_new_thread(run, ())
    return done.wait


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [by_thread, by_unknown_thread])
def test_a_thread_that_a_step_starts_reads_what_was_written_before(
    start: Callable[[Callable[[], None]], Callable[[], object]], kind: str
) -> None:
    """An asynchronous checkpoint had parameters of which some updates were still pending."""
    is_equal(kind, partial(saved_beside, start))


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_from_before_reads_what_was_written_before(kind: str, pool: ThreadPoolExecutor) -> None:
    is_equal(kind, partial(saved_beside, lambda save: pool.submit(save).result))


@pytest.mark.parametrize("kind", KINDS)
def test_a_logger_reads_losses_while_steps_go_on(kind: str) -> None:
    """It took a block out of the hands of the thread that issued it: the run ended with an error, or with other numbers."""
    weight, losses, logged = torch.nn.Parameter(torch.ones(50)), queue.SimpleQueue[Any](), []

    def log() -> None:
        while (loss := losses.get()) is not None:
            logged.append((float(loss.detach()), str(loss.detach() * 2)))

    logger = threading.Thread(target=log)
    with opened(kind) as session, session.ahead():
        for number in range(40):
            if number == 8:
                assert session.co_executed >= 4
                logger.start()
            with session:
                with torch.no_grad():
                    weight.fill_(number).add_(1)
                losses.put(weight.square().mean())
        losses.put(None)
        logger.join()
        assert session.at_once == 32
        # From the next step on it is gone.
        with session:
            with torch.no_grad():
                weight.fill_(number).add_(1)
            losses.put(weight.square().mean())
    assert logged == [(float((number + 1) ** 2), str(torch.tensor(2.0 * (number + 1) ** 2))) for number in range(40)]


def test_a_step_is_co_executed_again_when_the_other_thread_has_ended() -> None:
    weight, threads = torch.ones(3), iter([True] * 6 + [False] * 4)

    def step() -> torch.Tensor:
        made = weight * 2
        if next(threads):
            by_thread(lambda: None)()
        return made + 1

    with opened("threaded") as session:
        for _ in range(10):
            with session:
                step()
        assert (session.co_executed, session.at_once, session.fallbacks) == (4, 3, 0)


# -- other processes -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_child_that_a_step_forks_goes_on(kind: str) -> None:
    """It waited for ever, for a runner that only its parent has."""
    weight, forks, children = torch.ones(3), iter([False] * 5 + [True]), []
    with opened(kind) as session:
        for _ in range(6):
            with session:
                weight.mul_(2)
                made = weight + 1
                child = os.fork() if next(forks) else -1
                weight.mul_(3)
                made = made * weight
            if child == 0:
                os._exit(_status(session, weight, made))
            children.append(child)
    left = 20.0
    while (ended := os.waitpid(children[-1], os.WNOHANG))[0] == 0 and (left := left - 0.02) > 0:
        time.sleep(0.02)
    if not ended[0]:
        os.kill(children[-1], signal.SIGKILL)
        os.waitpid(children[-1], 0)
    assert os.waitstatus_to_exitcode(ended[1]) == (7 if ended[0] else None)
    assert weight.tolist() == [6.0**6] * 3


def _status(session: terra.Session, weight: torch.Tensor, made: torch.Tensor) -> int:
    """In the child: 7 where all is right, and another step too."""
    try:
        right = weight.tolist() == [6.0**6] * 3 and made.tolist() == [(6.0**5 * 2 + 1) * 6.0**6] * 3
        with session:
            weight.mul_(2)
        session.close()
        return 7 if right and weight.tolist() == [6.0**6 * 2] * 3 else 8
    except BaseException:
        return 9
