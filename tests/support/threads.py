"""One thread a rank, as the launcher sets it: a fixture for the tests that compute with torch; a conftest or a test
module imports it.

With more, every thread that computes brings a pool of its own, and pools that spin on few cores make a test of
milliseconds take seconds.
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
