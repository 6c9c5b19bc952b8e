"""Fixtures for tests of the runtime."""

from tests.support.threads import one_thread_a_rank as one_thread_a_rank
