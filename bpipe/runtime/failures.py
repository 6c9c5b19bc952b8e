"""Make the first failure of a run known to all of its ranks, so that the last error of each is the cause and nobody
waits for a time-out.

In: the error that ended this rank's training. Out: the first failure of the run, as its last line on every rank; and
the end of ranks that are stuck in a collective with one that is gone. Everything goes over the board (`board`), for the
run's own messages do not pass any more.

A rank whose error only says that a message did not come is not the first to have failed. It waits a moment for the word
of the one that was, and then calls the roll: each rank has a thread that answers, and who does not answer was killed,
or stopped.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import sys
import threading
import time
import types
from atexit import _run_exitfuncs as at_exit
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from bpipe.runtime.board import open_board
from bpipe.runtime.errors import TransferError

# How often each rank looks at the board: often enough for a person, seldom enough for a store with thousands of ranks.
_LOOK_S = 1.0
_BEFORE_S = 0.2
_RANKS_A_SECOND = 2000
# Who fails because another did, is given this long for its own error: then its traceback is on the screen before the
# cause.
_OWN_END_S = 8.0
_MOST_CHARACTERS = 300

_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|timeout|gloo|nccl|socket|peer", re.IGNORECASE
)


@dataclass(frozen=True)
class Failure:
    """The rank that failed first, and what of."""

    rank: int
    cause: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed first: {self.cause}"


def cause_of(error: BaseException) -> str:
    """Return an error in one line: its type, what it says first, and the notes that say where."""
    said = str(error).strip().partition("\n")[0]
    notes = [note.removeprefix("bpipe: ") for note in getattr(error, "__notes__", ())]
    where = f" ({'; '.join(notes)})" if notes else ""
    return f"{type(error).__name__}: {said[:_MOST_CHARACTERS]}{where}"


def is_secondary(error: BaseException) -> bool:
    """Return whether the error only says that another rank did not send, or did not answer."""
    kinds = (TransferError, dist.DistError, RuntimeError, OSError)
    return isinstance(error, kinds) and bool(isinstance(error, TransferError) or _LOST.search(str(error)))


class Watch:
    """Watches one training of this process, from `begin` to `end`; `failed` where an error left it."""

    def __init__(self, leave: Callable[[int], None] = os._exit) -> None:
        self._leave = leave
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._board: Any = None
        self._first: Failure | None = None
        self._hearing = threading.Lock()
        self._heard = False
        self._rank = 0
        self._world = 1

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="bpipe-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the watch: the training is over on this rank, one way or the other."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def failed(self, error: Exception) -> Failure | None:
        """Find out which rank failed first, after this rank's training ended with an error, and print it last.

        Returns it on the rank that made it known; None on the others, and where nobody can be asked.
        """
        board = self._board
        if board is None:
            return None
        mine = Failure(self._rank, cause_of(error))
        told = False
        try:
            if self._first is None:
                known = self._other_cause(board, mine) if is_secondary(error) else None
                self._first, told = _tell(board, known or mine, self._rank)
            self._hear(board)
        except Exception:
            pass
        if self._first is None:
            # Whoever keeps the store, rank 0 or the launcher, is gone.
            self._say_at_the_end("this run's store does not answer: rank 0 or its launcher has ended", lambda: None)
            return None
        self._say_at_the_end(str(self._first), lambda: self._linger(board))
        return self._first if told else None

    def _say_at_the_end(self, line: str, linger: Callable[[], None]) -> None:
        """When the error has been printed, if it is; and leave before modules are taken apart.

        Some in C have words of their own then: triton 3.9, which comes with torch 2.15, thirty lines on what it leaks.
        """
        printing = sys.excepthook

        def printed(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
            printing(kind, error, trace)
            print(f"bpipe: {line}", file=sys.stderr, flush=True)
            linger()
            # As the interpreter does.
            at_exit()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            self._leave(1)

        sys.excepthook = printed

    # -- on the thread
    # -------------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        answered = False
        with contextlib.suppress(Exception):
            while not self._over.wait(_BEFORE_S if self._board is None else self._look_s()):
                board = self._board
                if board is None:
                    self._open()
                    continue
                if not answered and board.check(["call"]):
                    board.set(f"here/{self._rank}", "")
                    board.add("answers", 1)
                    answered = True
                if board.check(["first"]):
                    self._first = _read(board)
                    self._hear(board)
                    self._end_with(board, self._first)
                    return

    def _end_with(self, board: Any, first: Failure) -> None:
        """Another rank has failed: this one follows, at the latest when it should have noticed by itself."""
        if first.rank == self._rank or self._over.wait(_OWN_END_S):
            return
        print(f"bpipe: rank {self._rank} is stopped here, where it waits:", file=sys.stderr)
        faulthandler.dump_traceback()
        print(f"bpipe: {first}", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._linger(board)
        self._leave(1)

    def _open(self) -> None:
        """The ranks have met, or not yet.

        One connection serves both threads: to connect to a store that is gone would take minutes.
        """
        board = open_board()
        if board is not None:
            self._rank, self._world = dist.get_rank(), dist.get_world_size()
            self._board = board

    # -- inside
    # ------------------------------------------------------------------------------------------------------------------

    def _look_s(self) -> float:
        return max(_LOOK_S, self._world / _RANKS_A_SECOND)

    def _other_cause(self, board: Any, mine: Failure) -> Failure | None:
        """What somebody else has said, or does within a moment; else who does not answer; else None."""
        if _wait(2 * self._look_s(), lambda: bool(board.check(["first"]))):
            return _read(board)
        board.set("call", "")
        _wait(3 * self._look_s(), lambda: int(board.add("answers", 0)) >= self._world)
        silent = [rank for rank in range(self._world) if not board.check([f"here/{rank}"])]
        if not silent or self._rank in silent:
            return None
        others = f"; ranks {', '.join(map(str, silent[1:9]))} do not answer either" if silent[1:] else ""
        return Failure(
            silent[0],
            f"it does not answer, so it was killed, was stopped or has exited{others}; rank {self._rank} noticed: "
            f"{mine.cause}",
        )

    def _hear(self, board: Any) -> None:
        """This rank knows the cause, by whichever of its two threads."""
        with self._hearing:
            if not self._heard:
                board.add("heard", 1)
                self._heard = True

    def _linger(self, board: Any) -> None:
        """Rank 0 may keep the store in its own process: it stays until the others have read the cause there."""
        if self._rank == 0:
            with contextlib.suppress(Exception):
                _wait(3 * self._look_s(), lambda: int(board.add("heard", 0)) >= self._world)


def _wait(seconds: float, done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _tell(board: Any, failure: Failure, by: int) -> tuple[Failure, bool]:
    """Return the first failure that was told, and whether it was this rank that told it."""
    teller, first = json.loads(board.compare_set("first", "", json.dumps([by, asdict(failure)])).decode())
    return Failure(**first), teller == by


def _read(board: Any) -> Failure:
    _, first = json.loads(board.get("first").decode())
    return Failure(**first)
