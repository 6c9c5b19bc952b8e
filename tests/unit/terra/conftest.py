"""What holds for tests of terra: threads that were there before a test look at none of its tensors."""

import threading

import pytest

from terra.run import guards


@pytest.fixture(autouse=True)
def threads_from_before_are_not_beside_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session runs eagerly while another thread lives, as pytest-xdist's always do."""
    before = frozenset(threading.enumerate())
    monkeypatch.setattr(
        guards, "living_threads", lambda: [each for each in threading.enumerate() if each not in before]
    )
