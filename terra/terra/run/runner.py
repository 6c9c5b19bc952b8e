"""Run blocks in order, in a thread next to the program.

There is one queue, in the program's order: a block needs only what precedes it, so nothing here ever waits for Python,
and nothing can lock. An operation's error is kept, with the place that issued it, until Python waits; later blocks are
not run.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from terra.run.cell import Cell, below_autograd

# Runs a block. Takes its inputs, and the cells of its results with the last one first, and empties both.
Program = Callable[[list[Any], list[Cell]], None]
# How long a session that ends waits for its thread.
_END_S = 5.0


class State(NamedTuple):
    """Settings that torch keeps for each thread."""

    with_gradients: bool
    num_threads: int


def current() -> tuple[bool, int]:
    """Return this thread's `State` as a plain tuple, because every operation needs it."""
    return torch.is_grad_enabled(), torch.get_num_threads()


def apply(state: State) -> None:
    """Apply a state in the thread that runs operations."""
    if torch.is_grad_enabled() is not state.with_gradients:
        torch._C._set_grad_enabled(state.with_gradients)
    if torch.get_num_threads() != state.num_threads:
        torch.set_num_threads(state.num_threads)


class Block(NamedTuple):
    program: Program
    fed: list[Any]
    made: list[Cell]
    state: State


class RunnerThread(threading.Thread):
    """A class of its own, so that it is not taken for a thread of the program, which may look at its tensors."""


class Runner:
    """Runs blocks in a thread. With `held_back` they run only when somebody waits: serially, for comparison."""

    def __init__(self, held_back: bool = False) -> None:
        self._held: list[Block] | None = [] if held_back else None
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # The first operation's error, if one failed.
        self.failed: list[BaseException] = []
        self._thread: threading.Thread | None = None
        self._busy = False
        self.end: Callable[[], Any] = lambda: None

    def put(self, block: Block) -> None:
        self._busy = True
        if self._held is not None:
            self._held.append(block)
            return
        self._started().put(block)

    def wait(self) -> None:
        """Wait until all is done. Raises the first operation's error, in later calls too."""
        if self._busy:
            self.mark().wait()
            self._busy = False
        if self.failed:
            raise self.failed[0]

    def mark(self) -> threading.Event:
        """Return an event that is set when all blocks so far are done, those held back too."""
        messages = self._started()
        for block in self._held or ():
            messages.put(block)
        if self._held:
            self._held.clear()
        done = threading.Event()
        messages.put(done)
        return done

    def _started(self) -> queue.SimpleQueue[Any]:
        if self._thread is None:
            self._thread = RunnerThread(target=self._loop, args=(self._queue, self.failed), name="terra", daemon=True)
            self._thread.start()
            self.end = weakref.finalize(self, _stop, self._queue, self._thread)
        return self._queue

    @staticmethod
    def _loop(messages: queue.SimpleQueue[Any], failed: list[BaseException]) -> None:
        with below_autograd():
            while (message := messages.get()) is not None:
                if isinstance(message, threading.Event):
                    message.set()
                elif not failed:
                    try:
                        apply(message.state)
                        message.program(message.fed, message.made)
                    except BaseException as error:
                        # Its frames hold the block's values.
                        failed.append(error.with_traceback(None))
                # Otherwise it would be kept until the next one comes.
                del message


def _stop(messages: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    messages.put(None)
    if thread is not threading.current_thread():
        thread.join(_END_S)
