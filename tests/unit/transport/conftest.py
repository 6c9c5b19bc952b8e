"""What holds for tests of the transports, and two lanes for those that ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bpipe.transport.lanes import ThreadLane
from tests.support.threads import one_thread_a_rank as one_thread_a_rank


@pytest.fixture
def lanes() -> Iterator[tuple[ThreadLane, ThreadLane]]:
    pair = ThreadLane("outbound", 5.0), ThreadLane("inbound", 5.0)
    yield pair
    for lane in pair:
        lane.close()
