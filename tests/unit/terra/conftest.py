"""What holds for tests of terra: threads of whoever runs the tests look at no tensors."""

from __future__ import annotations

import threading

import pytest

from terra.run import guards

# Those of pytest-xdist, which hear what to run next.
_THERE_BEFORE = frozenset(threading.enumerate())


@pytest.fixture(autouse=True)
def runner_of_tests_is_no_thread_beside_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session runs at once, and so in no test beside Python, while another thread lives."""
    monkeypatch.setattr(guards, "living_threads", lambda: [each for each in threading.enumerate() if each not in _THERE_BEFORE])
