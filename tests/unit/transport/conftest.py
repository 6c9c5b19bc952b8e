"""Fixtures for tests of the transports: two lanes and a fake CUDA runtime."""

from collections.abc import Iterator

import pytest

from bpipe.transport.streams import ThreadLane
from tests.support.threads import one_thread_a_rank as one_thread_a_rank
from tests.unit.transport.fake_cuda import FakeCuda, installed


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A CUDA runtime of this process's memory, in place of torch's."""
    return installed(FakeCuda(), monkeypatch)


@pytest.fixture
def lanes() -> Iterator[tuple[ThreadLane, ThreadLane]]:
    pair = ThreadLane("outbound", 5.0), ThreadLane("inbound", 5.0)
    yield pair
    for lane in pair:
        lane.close()
