"""Ranks as threads of one process, only one of which runs at a time: the draw decides which.

Raises the first error and, in a deadlock, says which rank waits for what. A run that neither fails nor makes progress
raises `Hangs` with each rank's stack; its threads remain, so nothing else can run in that process.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.late.devices import extension
from tests.late.group import world_of_threads

SAMPLE_S = 0.5
# Successive samples without progress and with every thread asleep. A thread that waits for a processor is not asleep, so
# load does not matter.
ASLEEP = 120
# Seconds of the process's own processor time without progress.
BUSY_S = 300.0


def awake(but: int) -> bool:
    """Whether a thread of this process, except `but`, runs or waits for a processor or a disk."""
    for task in Path("/proc/self/task").iterdir():
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state in "RD" and int(task.name) != but:
            return True
    return False


class Watch:
    """Distinguishes a hanging run from a slow one by its progress, not by its time.

    Devices detect deadlocks at once (csrc/hosts.h). This samples what they do not see: threads that wait for each
    other's locks, and endless loops.
    """

    def __init__(self) -> None:
        self._seen, self._asleep, self._since_s = -1, 0, 0.0

    def hangs(self, done: int) -> str:
        """Return why the run hangs, or nothing. `done` grows while it makes progress."""
        if done != self._seen:
            self._seen, self._asleep, self._since_s = done, 0, time.process_time()
        elif awake(threading.get_native_id()):
            self._asleep = 0
        else:
            self._asleep += 1
        if self._asleep >= ASLEEP:
            return f"nothing was done in {ASLEEP} looks at it, and every thread sleeps"
        if time.process_time() - self._since_s > BUSY_S:
            return f"nothing was done in {BUSY_S:g} s of processor time"
        return ""


class Hangs(RuntimeError):
    """A run hangs for a reason that devices do not detect."""


def run_hosts(count: int, does: Callable[[int], None]) -> None:
    late = extension()
    errors: list[BaseException] = []
    late.expect_hosts(count)

    def run_rank(rank: int) -> None:
        late.enter(rank)
        try:
            does(rank)
        except BaseException as error:
            # Catch any exception: if a host left silently, the others would seem to wait for nothing.
            errors.append(error)
        finally:
            late.leave(rank)

    with world_of_threads():
        threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(count)]
        for thread in threads:
            thread.start()
        _join(threads)
    if errors:
        raise RuntimeError(f"{errors[0]}\n{late.stuck()}") from errors[0]


def _join(threads: Sequence[threading.Thread]) -> None:
    """Wait for all ranks while there is progress."""
    watch = Watch()
    for rank, thread in enumerate(threads):
        while thread.is_alive():
            thread.join(SAMPLE_S)
            if thread.is_alive() and (why := watch.hangs(extension().progress())):
                raise Hangs(f"rank {rank} does not end: {why}\n{_doing(threads)}")


def _doing(threads: Sequence[threading.Thread]) -> str:
    frames = sys._current_frames()
    return "\n".join(
        f"rank {rank}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for rank, thread in enumerate(threads)
        if thread.ident in frames
    )
