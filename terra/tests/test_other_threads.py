"""Other threads and processes see a step's tensors as without a session, and nothing hangs."""

import _thread
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import terra
from tests.equal import KINDS, Steps, is_equal, opened


def trained(weight: torch.nn.Parameter) -> torch.Tensor:
    """Run some operations that write a parameter, of which a block is pending."""
    with torch.no_grad():
        for _ in range(5):
            weight.mul_(1.5).add_(1)
        return weight.sum()


def saved_beside(start: Callable[[Callable[[], None]], Callable[[], object]]) -> Steps:
    """Save a parameter in another thread that the step joins, as asynchronous checkpoints do."""
    weight = torch.nn.Parameter(torch.ones(200))
    while True:
        saved = []
        loss = trained(weight)

        def save(saved: list[Any] = saved, loss: torch.Tensor = loss) -> None:
            saved.extend([weight.clone(), weight.detach().numpy().copy(), float(loss), loss * 2])

        wait = start(save)
        hidden = weight.detach() * 2
        wait()
        trained(weight)
        yield saved[0], torch.from_numpy(saved[1]), saved[2:], hidden


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
    """An asynchronous checkpoint had parameters with pending updates."""
    is_equal(kind, partial(saved_beside, start))


@pytest.mark.parametrize("kind", KINDS)
def test_a_logger_reads_losses_while_steps_go_on(kind: str) -> None:
    """The logger took a block from the thread that issued it, which caused errors or wrong numbers."""
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
        # From the next step on, the logger has ended.
        with session:
            with torch.no_grad():
                weight.fill_(number).add_(1)
            losses.put(weight.square().mean())
    assert logged == [(float((number + 1) ** 2), str(torch.tensor(2.0 * (number + 1) ** 2))) for number in range(40)]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_child_that_a_step_forks_goes_on(kind: str) -> None:
    """The child waited forever for a runner that only its parent has."""
    weight, forks, children = torch.ones(3), iter([False] * 5 + [True]), []
    with opened(kind) as session:
        for _ in range(6):
            with session:
                weight.mul_(2)
                result = weight + 1
                child = os.fork() if next(forks) else -1
                weight.mul_(3)
                result = result * weight
            if child == 0:
                os._exit(_status(session, weight, result))
            children.append(child)
    left_s = 20.0
    while (ended := os.waitpid(children[-1], os.WNOHANG))[0] == 0 and (left_s := left_s - 0.02) > 0:
        time.sleep(0.02)
    if not ended[0]:
        os.kill(children[-1], signal.SIGKILL)
        os.waitpid(children[-1], 0)
    assert os.waitstatus_to_exitcode(ended[1]) == (7 if ended[0] else None)
    assert weight.tolist() == [6.0**6] * 3


def _status(session: terra.Session, weight: torch.Tensor, result: torch.Tensor) -> int:
    """Return 7 in the child if all is right, and another step runs, too."""
    try:
        right = weight.tolist() == [6.0**6] * 3 and result.tolist() == [(6.0**5 * 2 + 1) * 6.0**6] * 3
        with session:
            weight.mul_(2)
        session.close()
        return 7 if right and weight.tolist() == [6.0**6 * 2] * 3 else 8
    except BaseException:
        return 9
