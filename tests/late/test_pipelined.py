"""Torch's own runtime on late devices runs balanced schedules to the last bit, and a removed wait is noticed."""

import pytest
from torch.distributed.pipelining import schedules

from tests.late.devices import DIRECTED, Draw
from tests.late.pipeline import noticed, wrong_bits
from tests.late.pipelined import LISTED, TorchPipeline, kinds_of
from tests.late.waits import WAITS

DAILY = (
    "torch's 1F1B",
    "torch's InterleavedZeroBubble",
    "torch's DualPipeV",
    "grouped under torch",
    "pool under torch",
)


@pytest.mark.parametrize(
    "name",
    [
        name if name in DAILY else pytest.param(name, marks=pytest.mark.slow)
        for name in LISTED
        if name != "torch's 1F1B of 8"
    ],
)
def test_no_bit_differs(name: str) -> None:
    """Test one transport per schedule, in a directed or a random order; `test_tail.py` tests them all."""
    number, kinds = [*LISTED].index(name), kinds_of(name)
    kind, draw = kinds[number % len(kinds)], DIRECTED[number % len(DIRECTED)] if number % 2 else Draw.of(number)
    print(f"{kind}: {draw}")
    pipeline = TorchPipeline(LISTED[name](), kind, poison=True)
    assert wrong_bits(pipeline, draw) == []
    assert any(rank.moved_bytes for rank in pipeline.ranks), "nothing has moved"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("torch's 1F1B", "two-sided"),
        ("grouped under torch", "peer"),
        pytest.param("torch's 1F1B", "peer", marks=pytest.mark.slow),
        pytest.param("grouped under torch", "two-sided", marks=pytest.mark.slow),
        pytest.param("torch's InterleavedZeroBubble", "host", marks=pytest.mark.slow),
        pytest.param("pool under torch", "two-sided", marks=pytest.mark.slow),
    ],
)
def test_sizes_that_differ_change_no_bit(name: str, kind: str) -> None:
    """Each micro-batch saves different sizes, which are sent before it moves; if it outgrows its buffer, it stays."""
    for draw in (DIRECTED[1], Draw.of(3)):
        pipeline = TorchPipeline(LISTED[name](), kind, poison=True, differing=True)
        assert wrong_bits(pipeline, draw) == [], draw
        assert any(rank.moved_bytes for rank in pipeline.ranks), "nothing has moved"


OF_TRANSFERS = [
    name if name[:3] in ("[3]", "[7]") else pytest.param(name, marks=pytest.mark.slow)
    for name in WAITS
    if name.startswith("[")
]


@pytest.mark.parametrize("name", OF_TRANSFERS)
def test_a_wait_for_a_transfer_that_is_missing_is_noticed(name: str) -> None:
    for wait in WAITS[name]:
        plan = "torch's 1F1B of 8" if wait.schedule == "1f1b of 8" else "torch's 1F1B"
        schedule = LISTED[plan]()
        with wait.taken_out():
            is_noticed = noticed(lambda kind=wait.kind, schedule=schedule: TorchPipeline(schedule, kind))
        assert is_noticed, f"{name} by {wait.kind}: not noticed"


@pytest.mark.parametrize("name", ["torch's 1F1B", "torch's ZBVZeroBubble"])
def test_a_message_that_torch_does_not_wait_for_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_wait_batch_p2p", lambda works: None)
    assert noticed(lambda: TorchPipeline(LISTED[name](), "host"))
