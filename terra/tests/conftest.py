"""Settings of terra's tests: one computing thread, sessions ignore earlier threads, and slow tests run on request."""

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from terra.run import guards

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("terra", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("terra")


def pytest_addoption(parser: pytest.Parser) -> None:
    is_requested = os.environ.get("RUN_SLOW", "0") not in ("", "0")
    parser.addoption("--slow", action="store_true", default=is_requested, help="also run slow tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = [] if config.getoption("--slow") else [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """With more threads, spinning pools on few cores make a test of milliseconds take seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def threads_from_before_are_not_beside_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide threads from before the test: a session runs eagerly while another exists, as pytest-xdist's always do."""
    before = frozenset(threading.enumerate())
    monkeypatch.setattr(
        guards, "living_threads", lambda: [thread for thread in threading.enumerate() if thread not in before]
    )
