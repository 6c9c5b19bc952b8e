"""Several trainings in one process: each releases its resources, and the next one trains the same bits.

On a GPU, a training failed with "resource already mapped" if an earlier one over `peer` had left its partner's memory
open. Late devices report the same if a process starts another training with others' memory open, and refuse to free
memory that is still open elsewhere.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gloo.conftest import Outcome
from tests.late.devices import AS_LATE, Draw
from tests.late.test_megatron import BPIPE
from tests.late.training import LateCase, close_parents, train

pytestmark = pytest.mark.timeout(500)

FLAGS = f"--global-batch-size 8 --train-iters 2 --eval-iters 1 {BPIPE}"
OWN_LOOP = "--bpipe-executor"
TEN = 10


@pytest.fixture(scope="module", autouse=True)
def parents() -> Iterator[None]:
    yield
    close_parents()


def trained(folder: Path, device: str, transports: tuple[str, ...], further: str = "") -> Outcome:
    """Train once over each of the transports, in the same four processes."""
    cases = [
        LateCase(f"{number}_{transport}", f"{FLAGS} {transport} {further}", Draw(number, AS_LATE))
        for number, transport in enumerate(transports)
    ]
    outcome = train(device, 4, cases, folder, 400.0, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    for rank in range(4):
        first, *later = [outcome.record(case.name, rank) for case in cases]
        assert len(first["iterations"]) == 2
        assert later == [first] * len(later)
        first_left, *later_left = [
            json.loads(outcome.said(case.name, rank).partition("holding: ")[2].splitlines()[0]) for case in cases
        ]
        assert later_left == [first_left] * len(later_left)
        # Megatron itself keeps memory on a device.
        del first_left["device_bytes" if device == "late" else "groups"]
        assert not any(first_left.values()), first_left
    return outcome


def test_a_training_behind_one_over_peer_trains_the_same(tmp_path: Path) -> None:
    trained(tmp_path, "late", ("peer", "nccl", "peer"))


@pytest.mark.slow
def test_a_training_behind_one_over_shared_memory_trains_the_same(tmp_path: Path) -> None:
    trained(tmp_path, "cpu", ("peer", "gloo", "peer"))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["late", "cpu"])
def test_ten_trainings_leave_nothing(device: str, tmp_path: Path) -> None:
    trained(tmp_path, device, ("peer",) * TEN)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "further"), [("late", ""), ("late", OWN_LOOP), ("cpu", OWN_LOOP), ("cpu", "")])
def test_every_transport_gives_back_what_it_had(device: str, further: str, tmp_path: Path) -> None:
    two_sided = "nccl" if device == "late" else "gloo"
    trained(tmp_path, device, ("host", "peer", two_sided, "host", "auto"), further)
