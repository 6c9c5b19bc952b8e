"""Cases run on late devices, or by `--device cuda` on a GPU."""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.gpu.accelerators import CUDA


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") != CUDA:
        # Triton reads this when it is imported, which torch does by itself.
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("--device") != CUDA:
        from tests.late import devices

        devices.before_the_first_backward(session, Path(__file__).parent)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove the tests for the other device."""
    on_gpu = config.getoption("--device") == CUDA
    for item in [*items]:
        if Path(__file__).parent in item.path.parents and bool(item.get_closest_marker("gpu")) is not on_gpu:
            items.remove(item)


@pytest.fixture(scope="session", autouse=True)
def device_name(request: pytest.FixtureRequest) -> str:
    """Return the requested device, if it exists here."""
    name: str = request.config.getoption("--device")
    if name == CUDA and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if name != CUDA:
        from tests.late import devices

        devices.needed()
        # As in separate processes: tensors are too small to be split over threads.
        torch.set_num_threads(1)
    return name


@pytest.fixture(scope="session")
def gpu_check() -> ModuleType:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
    return importlib.import_module("gpu_check")
