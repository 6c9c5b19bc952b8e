"""A hanging run is distinguished from a slow one by its progress."""

import ctypes
import threading
import time

import pytest

from tests.late import hosts
from tests.late.cases import SCHEDULES
from tests.late.devices import Draw, begin, extension
from tests.late.hosts import Hangs, run_hosts
from tests.late.pipeline import LatePipeline, wrong_bits


def test_a_rank_that_waits_for_a_lock_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices do not detect it. Later runs in the same process are right once its threads have ended."""
    monkeypatch.setattr(hosts, "ASLEEP", 4)
    let_go = threading.Event()

    def wait(rank: int) -> None:
        let_go.wait()

    before = threading.active_count()
    begin(Draw(1))
    message = r"rank 0 does not end: nothing was done in 4 looks at it, and every thread sleeps\n(.|\n)*let_go\.wait"
    with pytest.raises(Hangs, match=message):
        run_hosts(2, wait)
    let_go.set()
    while threading.active_count() > before:
        time.sleep(0.01)
    assert wrong_bits(LatePipeline(SCHEDULES["1f1b"](), "host"), Draw(1)) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_device_s_thread_waits_beside_its_host(seed: int) -> None:
    """Autograd's thread, which cleans up after a backward, may wait while its host already runs. All known waits then
    reported a deadlock, and a wait for another host's turn took that host's place."""
    is_done = {"by the thread": False, "by host 0": False}

    def of_autograd() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_autograd_0", 0, 0, 0)  # PR_SET_NAME: as torch calls it
        extension().wait_until(lambda: is_done["by host 0"], "the thread waits")
        is_done["by the thread"] = True

    def host(rank: int) -> None:
        if rank == 0:
            thread = threading.Thread(target=of_autograd)
            thread.start()
            time.sleep(0.05)
            is_done["by host 0"] = True
            thread.join()
        extension().wait_until(lambda: is_done["by the thread"], f"host {rank} waits")

    begin(Draw(seed))
    run_hosts(2, host)
