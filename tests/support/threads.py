"""A fixture for tests that compute with torch: one thread per rank, as the launcher sets it.

With more, every computing thread has its own pool, and spinning pools on few cores turn milliseconds into seconds.
"""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_a_rank() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
