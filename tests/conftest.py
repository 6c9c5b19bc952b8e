"""What holds for every test: slow ones wait to be asked for, those for a GPU skip without one, and random ones repeat
in CI.

In: pytest's options and the environment. Out: the collected tests, fewer or marked. Imports torch only where a test
asks for a GPU.
"""

import gc
import os

import pytest
from hypothesis import settings

# Before torch is imported, here and in the processes of tests: their tensors are too small to share out, and threads
# that wait for each other take the processor from other ranks.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The machines are shared and small, so a test's own time-out is the only clock; and a failure in CI must come back at
# home.
settings.register_profile("bpipe", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("bpipe")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow",
        action="store_true",
        default=os.environ.get("RUN_SLOW", "0") not in ("", "0"),
        help="also run slow tests",
    )
    parser.addoption(
        "--renew-snapshots",
        action="store_true",
        help="write what the command prints into tests/data/snapshots, where it differs (with -n 0)",
    )
    parser.addoption("--device", choices=("late", "cuda"), default="late", help="what tests/gpu runs on")


def pytest_sessionstart() -> None:
    """What is imported and collected is no garbage, and looking for some among it took a tenth of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _skip_without_gpu(items)
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
