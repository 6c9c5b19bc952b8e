"""Ranks as threads of one process, of which one at a time goes on: whose turn it is, the draw says.

In: how many, and what each does. Out: nothing, or what the first to fail raised, and, where nobody could go on, who
waited for whom.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.late.devices import extension
from tests.late.group import world_of_threads

# Who waits for ever is known at once: this is for machines that have much else to do.
TIMEOUT_S = 600.0


def run_hosts(count: int, does: Callable[[int], None]) -> None:
    late = extension()
    errors: list[Exception] = []
    late.expect_hosts(count)

    def one(rank: int) -> None:
        late.enter(rank)
        try:
            does(rank)
        except Exception as error:
            errors.append(error)
        finally:
            late.leave(rank)

    with world_of_threads():
        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    alive = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if errors:
        raise RuntimeError(f"{errors[0]}\n{late.stuck()}") from errors[0]
    assert not alive, f"ranks {alive} did not end"
