"""Verification passes in any order, and reports a flipped bit or a missing wait before gradients are used."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from bpipe.schedule.memory import num_transfers
from bpipe.transport.distributed import Distributed, Works
from bpipe.transport.one_sided import OneSidedCopies
from tests.late.cases import SCHEDULES
from tests.late.devices import DIRECTED, DRAWN, Draw
from tests.late.pipeline import KINDS, LatePipeline, wrong_bits
from tests.late.test_pipelines import number_of
from tests.late.waits import WAITS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["1f1b of 6", "pool", "own memory", "bidirectional"])
def test_what_is_right_is_certified(name: str, kind: str) -> None:
    number = number_of(name, kind)
    for draw, differing in ((DIRECTED[number % len(DIRECTED)], False), (Draw.of(number), True)):
        pipeline = LatePipeline(SCHEDULES[name](), kind, verify=True, differing=differing)
        assert wrong_bits(pipeline, draw) == []
        for rank in pipeline.ranks:
            assert rank.verifier is not None
            certificate = rank.verifier.certificate
            assert certificate.iterations == 2
            if not pipeline.differing:
                # If sizes differ, some micro-batches do not fit into their buffers at first.
                leave = num_transfers(pipeline.schedule, rank.rank).evictions
                assert certificate.microbatches == 2 * leave


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bit flips on the way back, in the order of the stream that carries it."""
    original_give_back, original_get, times = Distributed.give_back, OneSidedCopies.get, 0

    def damage(tensor: torch.Tensor) -> None:
        nonlocal times
        times += 1
        if times == 3:
            tensor[8:9].bitwise_xor_(1)

    def give_back(self: Distributed, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Works:
        damage(tensors[1])
        return original_give_back(self, host_buffer, tensors)

    def get(self: OneSidedCopies, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Any:
        pending = original_get(self, host_buffer, tensors)
        damage(tensors[1])
        return pending

    monkeypatch.setattr(Distributed, "give_back", give_back)
    monkeypatch.setattr(OneSidedCopies, "get", get)
    # The damage comes after the copy's own end, so let the device run that far at once.
    draw = Draw(1, eagerness=1.0)
    with pytest.raises(
        RuntimeError, match=rf"data that came back from .* over {kind} differs from what was evicted: .* storage 2 of "
    ):
        LatePipeline(SCHEDULES["1f1b"](), kind, verify=True).run(draw)


# The last wait is noticed first by the buffer's own states.
CHECKED = [name for name in WAITS if name.startswith("[") and not name.endswith("last transfer")]


@pytest.mark.parametrize("name", CHECKED)
def test_a_wait_that_is_missing_is_noticed_by_the_check(name: str) -> None:
    """It is noticed in one of a few orders, before gradients are used."""
    wait = WAITS[name][0]
    message = ""
    with wait.taken_out():
        for draw in (*reversed(DIRECTED[:5]), *(Draw(seed, DRAWN) for seed in range(10))):
            try:
                LatePipeline(SCHEDULES[wait.schedule](), wait.kind, verify=True).run(draw)
            except RuntimeError as error:
                message = str(error).splitlines()[0]
                if "since the start, micro-batch" in message:
                    return
    pytest.fail(f"{name}: no check noticed{f', but: {message}' * bool(message)}")
