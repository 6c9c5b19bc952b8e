"""Make the first failure of a run known to all of its ranks, so that each prints it last and nobody waits for a
time-out.

A rank whose error only says that a message did not come is not the first to have failed. It waits a moment for a report
of the one that did, and then calls the roll: each rank has a thread that answers, and one that does not answer was
killed or stopped. Ranks that are stuck in a collective with one that is gone are ended. All this goes over the store in
which the ranks found each other, because the run's own messages do not pass any longer.
"""

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
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from bpipe.runtime import TransferError

# Seconds between two looks at the store: short enough for a person, long enough for a store with thousands of ranks.
_LOOK_S = 1.0
_BEFORE_S = 0.2
_RANKS_PER_SECOND = 2000
# A store that does not answer for this long is gone.
_STORE_TIMEOUT = timedelta(seconds=20)
# A rank that fails because of another has this long for its own error, so that its traceback is printed before the
# cause.
_OWN_END_S = 8.0
_MOST_CHARACTERS = 300

_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|timeout|gloo|nccl|socket|peer", re.IGNORECASE
)


def _open_store() -> distributed_c10d.Store | None:
    """Return the store in which the ranks found each other, by a connection of its own for one thread.

    A restart of all ranks under torchrun may find the same store, so its keys have a prefix of their own.
    """
    if not dist.is_initialized():
        return None
    with contextlib.suppress(Exception):
        store = distributed_c10d._get_default_store().clone()
        store.set_timeout(_STORE_TIMEOUT)
        return distributed_c10d.PrefixStore(f"bpipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return None


def first_to_say(topic: str) -> bool:
    """Whether no other rank has said this before; true if the store does not answer."""
    store = _open_store()
    with contextlib.suppress(Exception):
        if store is not None:
            return int(store.add(f"said/{topic}", 1)) == 1
    return True


@dataclass(frozen=True)
class Failure:
    """The rank that failed first, and the cause in one line."""

    rank: int
    cause: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed first: {self.cause}"


def cause_of(error: BaseException) -> str:
    """Return an error in one line: its type, its first line, and its notes."""
    message = str(error).strip().partition("\n")[0]
    notes = [note.removeprefix("bpipe: ") for note in getattr(error, "__notes__", ())]
    where = f" ({'; '.join(notes)})" if notes else ""
    return f"{type(error).__name__}: {message[:_MOST_CHARACTERS]}{where}"


def is_secondary(error: BaseException) -> bool:
    """Whether the error only says that another rank did not send or did not answer."""
    kinds = (TransferError, dist.DistError, RuntimeError, OSError)
    return isinstance(error, kinds) and bool(isinstance(error, TransferError) or _LOST.search(str(error)))


class Watch:
    """Watches one training of this process, from `begin` to `end`; after an error `failed` is called."""

    def __init__(self, leave: Callable[[int], None] = os._exit) -> None:
        self._leave = leave
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Any = None
        self._first: Failure | None = None
        self._hearing = threading.Lock()
        self._heard = False
        self._rank = 0
        self._world = 1

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="bpipe-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the watch: the training is over on this rank, with or without an error."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def failed(self, error: Exception) -> Failure | None:
        """Find out which rank failed first, after this rank's training ended with an error, and print it last.

        Returns it on the rank that made it known; None on the others, and if the store does not answer.
        """
        store = self._store
        if store is None:
            return None
        own = Failure(self._rank, cause_of(error))
        reported = False
        try:
            if self._first is None:
                other = self._other_cause(store, own) if is_secondary(error) else None
                self._first, reported = _tell(store, other or own, self._rank)
            self._hear(store)
        except Exception:
            pass
        if self._first is None:
            # The owner of the store, rank 0 or the launcher, is gone.
            self._say_at_the_end("this run's store does not answer: rank 0 or its launcher has ended", lambda: None)
            return None
        self._say_at_the_end(str(self._first), lambda: self._linger(store))
        return self._first if reported else None

    def _say_at_the_end(self, line: str, linger: Callable[[], None]) -> None:
        """Print a line after the error, if that is printed, and exit before modules are taken apart.

        Some modules in C print more then: triton 3.9, which comes with torch 2.15, thirty lines on what it leaks.
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
            while not self._over.wait(_BEFORE_S if self._store is None else self._look_s()):
                store = self._store
                if store is None:
                    # The ranks have met, or not yet. One connection serves both threads: to connect to a store that is
                    # gone would take minutes.
                    opened = _open_store()
                    if opened is not None:
                        self._rank, self._world = dist.get_rank(), dist.get_world_size()
                        self._store = opened
                    continue
                if not answered and store.check(["call"]):
                    store.set(f"here/{self._rank}", "")
                    store.add("answers", 1)
                    answered = True
                if store.check(["first"]):
                    self._first = _read(store)
                    self._hear(store)
                    self._end_with(store, self._first)
                    return

    def _end_with(self, store: Any, first: Failure) -> None:
        """End this rank because another one has failed, at the latest when it should have noticed by itself."""
        if first.rank == self._rank or self._over.wait(_OWN_END_S):
            return
        print(f"bpipe: rank {self._rank} is stopped here, where it waits:", file=sys.stderr)
        faulthandler.dump_traceback()
        print(f"bpipe: {first}", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._linger(store)
        self._leave(1)

    # -- inside
    # ------------------------------------------------------------------------------------------------------------------

    def _look_s(self) -> float:
        return max(_LOOK_S, self._world / _RANKS_PER_SECOND)

    def _other_cause(self, store: Any, own: Failure) -> Failure | None:
        """Return the failure that another rank reports, now or within a moment; else a rank that does not answer."""
        if _wait(2 * self._look_s(), lambda: bool(store.check(["first"]))):
            return _read(store)
        store.set("call", "")
        _wait(3 * self._look_s(), lambda: int(store.add("answers", 0)) >= self._world)
        silent = [rank for rank in range(self._world) if not store.check([f"here/{rank}"])]
        if not silent or self._rank in silent:
            return None
        others = f"; ranks {', '.join(map(str, silent[1:9]))} do not answer either" if silent[1:] else ""
        return Failure(
            silent[0],
            f"it does not answer, so it was killed, was stopped or has exited{others}; rank {self._rank} noticed: "
            f"{own.cause}",
        )

    def _hear(self, store: Any) -> None:
        """Note that this rank knows the cause, by whichever of its two threads."""
        with self._hearing:
            if not self._heard:
                store.add("heard", 1)
                self._heard = True

    def _linger(self, store: Any) -> None:
        """Wait on rank 0, whose process may have the store, until the others have read the cause there."""
        if self._rank == 0:
            with contextlib.suppress(Exception):
                _wait(3 * self._look_s(), lambda: int(store.add("heard", 0)) >= self._world)


def _wait(seconds: float, done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _tell(store: Any, failure: Failure, by: int) -> tuple[Failure, bool]:
    """Report a failure. Return the first one that was reported, and whether by this rank."""
    reporter, first = json.loads(store.compare_set("first", "", json.dumps([by, asdict(failure)])).decode())
    return Failure(**first), reporter == by


def _read(store: Any) -> Failure:
    _, first = json.loads(store.get("first").decode())
    return Failure(**first)
