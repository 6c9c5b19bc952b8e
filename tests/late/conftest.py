from pathlib import Path

import pytest

from tests.late import devices
from tests.support.threads import one_thread_a_rank as one_thread_a_rank

# The first test on a machine builds the device.
BUILDING_S = 600


def pytest_collection_finish(session: pytest.Session) -> None:
    devices.before_the_first_backward(session, Path(__file__).parent)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(BUILDING_S))


@pytest.fixture(autouse=True, scope="session")
def late_device() -> None:
    devices.needed()
