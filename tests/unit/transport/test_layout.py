"""Host buffers in one piece of memory: nothing overlaps, everything is aligned, and both ends of a pair lay out the same."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from bpipe.ir.host_buffers import host_buffers, stages_in_buffers
from bpipe.program import BalanceConfig, ScheduleConfig, build
from bpipe.transport.layout import ALIGNMENT_BYTES, BufferLayout, aligned

SIZES = st.dictionaries(st.integers(0, 5), st.lists(st.integers(1, 1200), min_size=1, max_size=4), min_size=1, max_size=3)
NOBODY = 255


@st.composite
def buffers_and_sizes(draw: st.DrawFn) -> tuple[list[frozenset[int]], dict[int, list[int]]]:
    sizes = draw(SIZES)
    stages = st.frozensets(st.sampled_from(sorted(sizes)), min_size=1)
    return draw(st.lists(stages, max_size=5)), sizes


@given(buffers_and_sizes())
def test_no_two_storages_of_different_buffers_share_a_byte(drawn: tuple[list[frozenset[int]], dict[int, list[int]]]) -> None:
    """Slow and obvious: paint every byte that any stage may write in a buffer, and see whose it was."""
    buffers, sizes = drawn
    layout = BufferLayout.of(buffers, sizes)
    owner = bytearray([NOBODY]) * layout.nbytes
    for number, stages in enumerate(buffers):
        for stage in stages:
            mine: set[int] = set()
            for offset, nbytes in zip(layout.offsets(number, sizes[stage]), sizes[stage], strict=True):
                assert offset % ALIGNMENT_BYTES == 0
                place = range(offset, offset + nbytes)
                assert {owner[byte] for byte in place} <= {NOBODY, number}
                assert mine.isdisjoint(place), "two storages of one micro-batch"
                mine.update(place)
                owner[offset : offset + nbytes] = bytearray([number]) * nbytes


@given(buffers_and_sizes())
def test_buffers_take_no_more_than_their_largest_stage(drawn: tuple[list[frozenset[int]], dict[int, list[int]]]) -> None:
    buffers, sizes = drawn
    largest = [max(sum(aligned(nbytes) for nbytes in sizes[stage]) for stage in stages) for stages in buffers]
    assert BufferLayout.of(buffers, sizes).nbytes == sum(largest)


@given(
    p=st.integers(4, 8),
    rounds=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 10**6), min_size=1, max_size=17),
)
def test_both_ends_of_a_pair_lay_out_the_same(p: int, rounds: int, lengths: list[int]) -> None:
    """The evictor from what it knows, the acceptor from the sizes that came as a message."""
    plan = build(ScheduleConfig(schedule="1f1b", num_ranks=p, num_microbatches=p * rounds, balance=BalanceConfig()))
    assert plan.partners is not None
    for evictor, acceptor in enumerate(plan.partners):
        buffers = stages_in_buffers(host_buffers(plan, acceptor))
        sizes = {stage: [nbytes + stage for nbytes in lengths] for stage in sorted(frozenset().union(*buffers), reverse=True)}
        told = {stage: tuple(each) for stage, each in json.loads(json.dumps(list(sizes.items())))}
        here, there = BufferLayout.of(stages_in_buffers(host_buffers(plan, plan.partners[evictor])), sizes), BufferLayout.of(buffers, told)
        assert here == there
        for number, stages in enumerate(buffers):
            for stage in stages:
                assert here.offsets(number, sizes[stage]) == there.offsets(number, told[stage])


def test_a_rank_that_hosts_nothing_needs_nothing() -> None:
    assert BufferLayout.of([], {}) == BufferLayout((), 0)
