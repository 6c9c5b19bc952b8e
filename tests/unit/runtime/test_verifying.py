"""Checksums notice changed data and say where it is; unchanged data is certified."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bpipe.runtime.checksums import SENDING, Certificate, Checksums, Verifier, weights
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.schedule.action import Action, Kind
from bpipe.transport.config import TransferConfig
from tests.unit.runtime.loop import gradient, schedule
from tests.unit.runtime.test_engine import LateTransport

CPU = torch.device("cpu")
# Small chunks: 133 bytes are two of them and a rest, whose last word is not whole.
SMALL = Checksums(CPU, chunk_bytes=64)


def drawn(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))


def sums(tensor: torch.Tensor) -> list[int]:
    return SMALL.of([tensor], SENDING).tolist()


@pytest.mark.parametrize("nbytes", [1, 7, 8, 64, 72, 133, 136])
def test_every_bit_shows(nbytes: int) -> None:
    tensor = drawn(nbytes)
    before = sums(tensor)
    assert len(before) == SMALL.num_sums(nbytes)
    for position in range(nbytes):
        for bit in range(8):
            tensor[position] ^= 1 << bit
            assert sums(tensor) != before
            tensor[position] ^= 1 << bit
    assert sums(tensor) == before


def test_sums_are_those_of_a_slow_and_obvious_loop() -> None:
    tensor = drawn(136)
    odd = weights(8).tolist()
    words = [int.from_bytes(bytes(tensor[start : start + 8].tolist()), "little") for start in range(0, 136, 8)]
    totals = []
    for chunk in range(0, len(words), 8):
        total = sum(word * weight for word, weight in zip(words[chunk : chunk + 8], odd, strict=False)) % 2**64
        totals.append(total - 2**64 if total >= 2**63 else total)
    assert sums(tensor) == totals


def engine(transport: Any, verifier: Verifier | None, rank: int = 0, **named: Any) -> Engine:
    transfers = TransferConfig(minimum_bytes=1, timeout_s=1.0, **named)
    config = EngineConfig(f"rank {rank}", CPU, transfers, verifier=verifier, links={3: "gloo"})
    return Engine(schedule(), rank, transport, config)


@pytest.mark.parametrize("differing", [False, True])
@pytest.mark.parametrize("synchronous", [False, True])
def test_what_came_back_is_certified_and_nothing_changes(synchronous: bool, differing: bool) -> None:
    verifier, plan = Verifier("rank 0", CPU, 2), schedule()
    actual = gradient(engine(LateTransport(), verifier, synchronous=synchronous, differing=differing), plan, 3)
    assert torch.equal(actual, gradient(None, plan, 3))
    certificate = verifier.certificate
    # Stage 0 of 4 evicts 3 of its 8 micro-batches; two of three iterations are checked.
    assert (certificate.iterations, certificate.microbatches) == (2, 6)
    assert certificate.storages % 6 == 0
    assert certificate.nbytes > 10_000
    assert not verifier.on


def test_a_rank_that_moves_nothing_is_certified_of_nothing() -> None:
    verifier = Verifier("rank 3", CPU, 1)
    gradient(engine(LateTransport(), verifier, rank=1), schedule(), rank=1)
    assert verifier.certificate == Certificate(iterations=1)
    verifier.leaves(Action(0, Kind.EVICT, 0), "stage 1", [], [])
    verifier.end()
    assert verifier.certificate == Certificate(iterations=1)


@pytest.mark.parametrize(("iterations", "told_after"), [(1, [0]), (2, [1]), (math.inf, [1])])
def test_what_was_checked_is_told_once(iterations: float, told_after: list[int]) -> None:
    verifier, reports = Verifier("rank 0", CPU, iterations), []
    for number in range(4):
        verifier.end()
        reports += [number] * verifier.first_over
    assert reports == told_after
