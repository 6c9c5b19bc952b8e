"""Every rank learns which rank failed first, and stuck ranks are ended. Here, ranks are threads of one process."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from bpipe.runtime import TransferError, failures
from bpipe.runtime.failures import Failure, Watch


class Ranks:
    """Some ranks of a world that share a store. `left` has the exit status of each rank whose process was ended."""

    def __init__(self, world: int, alive: list[int]) -> None:
        store = dist.HashStore()
        self.left: dict[int, int] = {}
        self.watches: dict[int, Watch] = {}
        for rank in alive:
            watch = self.watches[rank] = Watch(lambda status, rank=rank: self.left.update({rank: status}))  # type: ignore[misc]
            watch._store, watch._rank, watch._world = store, rank, world
            watch.begin()

    def until_left(self, number: int) -> None:
        deadline = time.monotonic() + 20
        while len(self.left) < number:
            assert time.monotonic() < deadline, self.left
            time.sleep(0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(failures, "_LOOK_S", 0.25)
    monkeypatch.setattr(failures, "_OWN_END_S", 0.2)
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    monkeypatch.setattr(failures, "at_exit", lambda: print("at exit", file=sys.stderr))
    yield
    for thread in threading.enumerate():
        if thread.name == "bpipe-watch":
            thread.join(timeout=5)


def test_who_is_stuck_is_ended_with_the_cause(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(3, [0, 1, 2])
    error = torch.OutOfMemoryError("CUDA out of memory.\nMuch more")
    error.add_note("bpipe: rank 1, stage 1, after 1F1, at 1F2")
    failure = ranks.watches[1].failed(error)
    ranks.watches[1].end()
    assert failure == Failure(1, "OutOfMemoryError: CUDA out of memory. (rank 1, stage 1, after 1F1, at 1F2)")
    ranks.until_left(2)
    assert ranks.left == {0: 1, 2: 1}
    printed = capfd.readouterr().err
    assert printed.count(f"bpipe: {failure}\n") == 2
    assert "is stopped here, where it waits" in printed
    assert "test_who_is_stuck_is_ended_with_the_cause" in printed, "it does not show where the process waits"


def test_a_closed_connection_waits_for_the_word_of_who_closed_it() -> None:
    """The neighbour's error may come first: its connection closes before the failed rank has reported the cause."""
    ranks = Ranks(2, [0, 1])
    failures: list[Failure | None] = []
    neighbour = threading.Thread(
        target=lambda: failures.append(ranks.watches[0].failed(RuntimeError("Connection closed by peer [::1]:4")))
    )
    neighbour.start()
    time.sleep(0.05)
    failure = ranks.watches[1].failed(ValueError("no such token"))
    neighbour.join()
    assert failure == Failure(1, "ValueError: no such token")
    assert failures == [None]
    assert ranks.watches[0]._first == failure


def test_who_does_not_answer_the_roll_is_named() -> None:
    ranks = Ranks(4, [0, 1, 2])
    failure = ranks.watches[0].failed(TransferError("rank 0, stage 0: 0EVICT2 with stage 3 did not end"))
    assert failure is not None
    assert failure.rank == 3
    assert "rank 0 noticed: TransferError: rank 0, stage 0: 0EVICT2 with stage 3 did not end" in failure.cause


def test_where_all_answer_the_one_that_noticed_is_the_first() -> None:
    """No rank is missing: a message really did not arrive."""
    ranks = Ranks(2, [0, 1])
    assert ranks.watches[1].failed(RuntimeError("timed out")) == Failure(1, "RuntimeError: timed out")


def test_the_last_line_comes_after_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    sys.excepthook = lambda *error: print("Traceback", file=sys.stderr)
    ranks = Ranks(1, [0])
    error = ValueError("no such token")
    ranks.watches[0].failed(error)
    ranks.watches[0].end()
    sys.excepthook(ValueError, error, None)
    # The process leaves right after, so C modules cannot print anything while the interpreter shuts down.
    assert capsys.readouterr().err == "Traceback\nbpipe: rank 0 failed first: ValueError: no such token\nat exit\n"
    assert ranks.left == {0: 1}
