"""Ranks as threads of one process, of which one at a time goes on: whose turn it is, the draw says.

In: how many, and what each does. Out: nothing, or what the first to fail raised, and, where nobody could go on, who
waited for whom. A run that neither fails nor goes on raises `Hangs`, with what each rank was doing: its threads stay,
so nothing more can run in that process.
"""

import sys
import threading
import traceback
from collections.abc import Callable, Sequence

from tests.late.devices import extension
from tests.late.group import world_of_threads
from tests.late.watching import SAMPLE_S, Watch


class Hangs(RuntimeError):
    """A run does not go on, for a reason that devices do not know."""


def run_hosts(count: int, does: Callable[[int], None]) -> None:
    late = extension()
    errors: list[BaseException] = []
    late.expect_hosts(count)

    def one(rank: int) -> None:
        late.enter(rank)
        try:
            does(rank)
        except BaseException as error:
            # Of whatever kind: a host that left without a word looks as if the others waited for nobody.
            errors.append(error)
        finally:
            late.leave(rank)

    with world_of_threads():
        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(count)]
        for thread in threads:
            thread.start()
        _join(threads)
    if errors:
        raise RuntimeError(f"{errors[0]}\n{late.stuck()}") from errors[0]


def _join(threads: Sequence[threading.Thread]) -> None:
    """Wait for all, however long that takes while something is done."""
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
