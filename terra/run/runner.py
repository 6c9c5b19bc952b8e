"""Run blocks in order, in a thread beside the program.

In: programs of blocks with what they are fed. Out: values in cells.

One queue in the program's order: a block needs only what stands before it, so nothing here ever waits for Python, and
nothing can lock. An operation's error is kept, with the place that issued it, until Python waits; what comes after it
is not run.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from terra.run.cell import Cell, below_autograd
from terra.run.state import State, apply

# Runs a block: takes what it is fed and the cells of what it makes, the last first, and empties both.
Program = Callable[[list[Any], list[Cell]], None]
# How long a session that ends waits for its thread.
_END_S = 5.0


class Block(NamedTuple):
    program: Program
    fed: list[Any]
    made: list[Cell]
    state: State


class RunnerThread(threading.Thread):
    """Thread of a runner, known from threads of the program, which may look at its tensors."""


class Runner:
    """Runs blocks in a thread.

    `held_back`: blocks run only when somebody waits: serial, without what overlapping gains.

    `failed`: the first operation's error, if one failed.
    """

    def __init__(self, held_back: bool = False) -> None:
        self._held: list[Block] | None = [] if held_back else None
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
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
        """Wait until all is done.

        Raises the first operation's error, with a note of the place that issued it; later calls do so too.
        """
        if self._busy:
            self.mark().wait()
            self._busy = False
        if self.failed:
            raise self.failed[0]

    def mark(self) -> threading.Event:
        """Return an event that is set when all that was put so far is done. What was held back is put now."""
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
                # Or it would be kept until the next comes.
                del message


def _stop(messages: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    messages.put(None)
    if thread is not threading.current_thread():
        thread.join(_END_S)
