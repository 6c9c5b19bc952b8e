"""Micro-batches of one stage that differ in size: what is too large for its room stays at home, and no bit differs.

The first iteration has the room of each stage's first micro-batch and a reserve; the next has room for all that was
seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.balance.config import BalanceConfig, named_balance
from bpipe.balance.pairs import balance
from bpipe.build import ScheduleConfig, build
from bpipe.runtime.errors import TransferError
from bpipe.runtime.sizing import Sizing, Unmoved
from bpipe.schedule.memory import RESERVE, num_transfers
from bpipe.schedule.schedule import Schedule
from bpipe.transport.layout import aligned, allocated_bytes
from tests.support.hand_made import v_flat
from tests.unit.runtime.keeping import Keeping
from tests.unit.runtime.pipeline import Model, in_one_piece
from tests.unit.runtime.threaded import KINDS, Pipeline

PLAN = build(ScheduleConfig(schedule="1f1b", num_ranks=4, num_microbatches=8, balance=named_balance("bpipe")))
# By iteration and micro-batch, how many bytes each further storage has that its forward saves.
Pattern = Sequence[Sequence[Sequence[int]]]


class Differing(Model):
    """A model whose stages save what a pattern says, iteration after iteration."""

    def __init__(self, num_stages: int, pattern: Pattern) -> None:
        super().__init__(num_stages)
        self.pattern = pattern
        self._runs: dict[tuple[int, int], int] = {}

    def part(self, stage: int, microbatch: int, *received: torch.Tensor) -> torch.Tensor:
        iteration = self._runs[stage, microbatch] = self._runs.get((stage, microbatch), -1) + 1
        made = super().part(stage, microbatch, *received)
        generator = torch.Generator().manual_seed(1000 * iteration + 10 * microbatch + stage)
        kept = [
            torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator)
            for n in self.pattern[iteration][microbatch]
        ]
        return Keeping.apply(made, *kept) if kept else made  # type: ignore[no-any-return,no-untyped-call]


def trained(schedule: Schedule, kind: str, pattern: Pattern, timeout_s: float = 20.0) -> Pipeline:
    """The pipeline that ran it; its gradients were those of the model in one piece."""
    pipeline = Pipeline(schedule, kind, timeout_s, model=Differing(schedule.num_stages, pattern), differing=True)
    found = pipeline.run(len(pattern))
    model = Differing(schedule.num_stages, pattern)
    assert all(
        map(torch.equal, found, in_one_piece(schedule.num_stages, schedule.num_microbatches, len(pattern), model))
    )
    return pipeline


# What 1F1B of 4 sends ahead, of every micro-batch but the first two and the last, at one time or another.
SMALL, LARGE = [2000], [2000, 9000, 30]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_too_large_stays_at_home_once_and_has_room_from_then_on(kind: str) -> None:
    pipeline = Pipeline(
        PLAN,
        kind,
        timeout_s=20.0,
        model=Differing(4, [[LARGE if m in (1, 3) else SMALL for m in range(8)]] * 3),
        differing=True,
    )
    evictor = pipeline.engines[0]
    seen = []
    ended = evictor.end

    def noted() -> None:
        ended()
        assert evictor.sizing is not None
        seen.append(
            (evictor.sizing.stayed.microbatches, evictor.sizing.stayed.passed_microbatches, evictor.sizing.num_grown)
        )

    evictor.end = noted  # type: ignore[method-assign]
    pipeline.run(3)
    # 0EVICT1 and 0EVICT3, not at once; 0EVICT5 is small and left.
    assert seen == [(2, 1, 0), (0, 0, 1), (0, 0, 1)]
    # Of the last iteration, in which all that is to leave does.
    assert pipeline.meters[0].peak_microbatches == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_of_which_nothing_moves_at_first_moves_once_it_can(kind: str) -> None:
    """Both ends know of a stage without room that nothing of it travels, and both learn that something does."""
    pattern: Pattern = [[[] for _ in range(8)], [[4000]] * 8, [[4000]] * 8]
    pipeline = Pipeline(PLAN, kind, timeout_s=20.0, model=Differing(4, pattern), differing=True)
    for engine in pipeline.engines:
        if engine._evictor is not None:
            # The stages' own storages are smaller.
            config = engine._config
            transfers = replace(config.transfers, minimum_bytes=3000)
            engine._evictor._config = replace(config, transfers=transfers)
    found = pipeline.run(3)
    assert all(map(torch.equal, found, in_one_piece(4, 8, 3, Differing(4, pattern))))
    sizing = pipeline.engines[0].sizing
    assert sizing is not None
    assert sizing.num_grown == 1
    assert sizing.stayed == Unmoved()
    assert sizing.most_bytes[0] == aligned(4000)


@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_iteration_in_which_all_stayed_hangs_nobody(kind: str, iterations: int) -> None:
    """The acceptor lent its memory, the evictor never reached for it: one waited to hear that it was closed, the other
    had not opened it.

    What was lent and not taken was taken for what was lent next.
    """
    trained(PLAN, kind, [[[2000], *[[90_000]] * 7], [[200_000]] * 8, [[2000]] * 8][:iterations], timeout_s=5.0)


SIZES = st.lists(st.sampled_from([1, 7, 511, 512, 513, 3000, 9000]), max_size=3)
PATTERNS = st.lists(st.lists(SIZES, min_size=8, max_size=8), min_size=1, max_size=3)


@settings(max_examples=12, deadline=None)
@given(PATTERNS)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_the_sizes_are_no_bit_differs(kind: str, pattern: Pattern) -> None:
    trained(PLAN, kind, pattern)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "plan",
    [
        lambda: balance(v_flat(2, 4), (3, 16)),
        lambda: balance(v_flat(2, 4), (16, 3)),
        lambda: balance(build(ScheduleConfig("v-half", 4, 6, num_chunks=2)), (4, 16, 16, 4), (1, 0, 3, 2)),
    ],
    ids=["v-flat", "v-flat the other way", "v-half"],
)
def test_several_stages_of_a_rank_and_either_rank_of_a_pair(plan: Callable[[], Schedule], kind: str) -> None:
    schedule = plan()
    sizes = [
        [[100 * (1 + (7 * m + 3 * i) % 5)] * ((m + i) % 3) for m in range(schedule.num_microbatches)] for i in range(3)
    ]
    trained(schedule, kind, sizes)
    assert any(num_transfers(schedule, rank).evictions for rank in range(schedule.num_ranks))


POOLED = {
    "one to several": (4, (2, 3, 3, 3)),
    "several to one": (4, (3, 2, 2, 6)),
    "both": (6, (3, 3, 4, 5, 4, 4)),
}


def pooled(name: str, num_microbatches: int = 8) -> Schedule:
    p, bounds = POOLED[name]
    how = BalanceConfig(bounds, hosts="pool")
    return build(ScheduleConfig("1f1b", p, num_microbatches, balance=how))


@settings(max_examples=4, deadline=None)
@given(PATTERNS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", POOLED)
def test_in_a_pool_no_bit_differs_either(name: str, kind: str, pattern: Pattern) -> None:
    """Each host has rooms of its own for what comes to it, and each link grows by itself, in one order on all ranks."""
    trained(pooled(name), kind, pattern)


@pytest.mark.slow
@settings(max_examples=350, deadline=None)
@given(PATTERNS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", POOLED)
@pytest.mark.timeout(1800)
def test_in_a_pool_two_thousand_patterns_differ_in_no_bit(name: str, kind: str, pattern: Pattern) -> None:
    trained(pooled(name), kind, pattern)


@pytest.mark.parametrize("kind", KINDS)
def test_what_stays_on_account_of_several_hosts_is_counted_together(kind: str) -> None:
    """The first is small, so no host has room for the others until the second iteration; stage 0 then holds what it
    would alone."""
    schedule = pooled("one to several")
    pipeline = Pipeline(schedule, kind, timeout_s=20.0, model=Differing(4, [[SMALL, *[LARGE] * 7]] * 2), differing=True)
    evictor, seen = pipeline.engines[0], []
    ended = evictor.end

    def noted() -> None:
        ended()
        assert evictor.sizing is not None
        seen.append(evictor.sizing)

    evictor.end = noted  # type: ignore[method-assign]
    pipeline.run(2)
    first, second = seen
    assert first.stayed.microbatches == num_transfers(schedule, 0).evictions - 1
    # Without any of them stage 0 has four, of which two are its bound.
    assert first.stayed.passed_microbatches == 2
    assert first.stayed.passed_bytes == 2 * first.stayed.nbytes // first.stayed.microbatches
    assert sorted(size > 0 for size in first.moved_each.values()) == [False] * first.stayed.microbatches + [True]
    assert (second.stayed, second.num_grown) == (Unmoved(), 1)
    assert all(second.moved_each.values())


def test_a_partner_that_does_not_begin_is_named() -> None:
    pipeline = Pipeline(PLAN, "peer", timeout_s=0.5, model=Differing(4, [[[]] * 8] * 2), differing=True)
    pipeline.run(release=False)
    with pytest.raises(
        TransferError,
        match=r"rank 3, stage 3: at the start .* stage 0 did not send the sizes .*0\.5 s, --bpipe-timeout: no message",
    ):
        pipeline.engines[3].begin()
    pipeline.close()


# -- rooms
# ----------------------------------------------------------------------------------------------------------------------


def test_alike_is_exactly_as_large() -> None:
    sizing = Sizing(differing=False)
    assert sizing.first(0, (100, 600)) == (100, 600)
    assert sizing.grow() == {}


def test_a_room_has_a_reserve_and_grows_to_the_most_that_was_seen() -> None:
    sizing = Sizing(differing=True)
    (room,) = sizing.first(0, (5000, 600))
    assert room == aligned(int(allocated_bytes((5000, 600)) * (1 + RESERVE)))
    assert sizing.leaves(0, 1, (room,))
    assert not sizing.leaves(0, 2, (room, 1))
    sizing.computes()
    assert sizing.stayed == Unmoved(1, room + 1), "beside its eviction it may be here"
    sizing.away(0, 2)
    sizing.computes()
    assert not sizing.leaves(0, 3, (2 * room,))
    sizing.away(0, 3)
    sizing.back(0, 2)
    sizing.computes()
    assert sizing.stayed == Unmoved(2, 3 * room + 1, 1, 2 * room)
    (grown,) = sizing.grow()[0]
    assert grown >= 2 * room * (1 + RESERVE)
    assert sizing.grow() == {}
    sizing.begin()
    assert sizing.leaves(0, 3, (2 * room,))
    assert (sizing.stayed, sizing.num_grown, sizing.moved_bytes[0]) == (Unmoved(), 1, 2 * room)


def test_what_was_seen_is_remembered_by_the_next_program() -> None:
    sizing = Sizing(differing=True)
    sizing.first(0, (600,))
    sizing.leaves(0, 1, (90_000,))
    sizing.release()
    (room,) = sizing.first(0, (600,))
    assert room >= 90_000
