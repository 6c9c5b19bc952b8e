"""What holds for tests of the runtime."""

from tests.unit.threads import one_thread_a_rank as one_thread_a_rank
