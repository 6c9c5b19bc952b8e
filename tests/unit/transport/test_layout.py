"""Host buffers in one allocation: aligned, disjoint, and laid out alike by both ends of a pair."""

import json

from hypothesis import given
from hypothesis import strategies as st

from bpipe.transport.layout import ALIGNMENT_BYTES, BufferLayout, aligned

SIZES = st.dictionaries(
    st.integers(0, 5), st.lists(st.integers(1, 1200), min_size=1, max_size=4).map(tuple), min_size=1, max_size=3
)
NOBODY = 255


@st.composite
def buffers_and_sizes(draw: st.DrawFn) -> tuple[list[frozenset[int]], dict[int, tuple[int, ...]]]:
    sizes = draw(SIZES)
    stages = st.frozensets(st.sampled_from(sorted(sizes)), min_size=1)
    return draw(st.lists(stages, max_size=5)), sizes


@given(buffers_and_sizes())
def test_no_two_storages_of_different_buffers_share_a_byte(
    drawn: tuple[list[frozenset[int]], dict[int, tuple[int, ...]]],
) -> None:
    """Slow and obvious: paint every byte that any stage may write in a buffer, and see whose it was."""
    buffers, sizes = drawn
    layout = BufferLayout.of(buffers, sizes)
    owner = bytearray([NOBODY]) * layout.nbytes
    for number, stages in enumerate(buffers):
        for stage in stages:
            mine: set[int] = set()
            piece, offsets = layout.place(number, sizes[stage])
            assert piece == 0
            for offset, nbytes in zip(offsets, sizes[stage], strict=True):
                assert offset % ALIGNMENT_BYTES == 0
                place = range(offset, offset + nbytes)
                assert {owner[byte] for byte in place} <= {NOBODY, number}
                assert mine.isdisjoint(place), "two storages of one micro-batch"
                mine.update(place)
                owner[offset : offset + nbytes] = bytearray([number]) * nbytes


@given(buffers_and_sizes())
def test_buffers_take_no_more_than_their_largest_stage(
    drawn: tuple[list[frozenset[int]], dict[int, tuple[int, ...]]],
) -> None:
    buffers, sizes = drawn
    largest = [max(sum(aligned(nbytes) for nbytes in sizes[stage]) for stage in stages) for stages in buffers]
    assert BufferLayout.of(buffers, sizes).nbytes == sum(largest)


@given(buffers_and_sizes(), st.data())
def test_whatever_is_known_when_both_ends_make_room_alike_and_there_is_enough(
    drawn: tuple[list[frozenset[int]], dict[int, tuple[int, ...]]], data: st.DataObject
) -> None:
    """Stages become known one by one, and buffers are used in between."""
    buffers, sizes = drawn
    here, there = BufferLayout(buffers), BufferLayout(buffers)
    known: dict[int, tuple[int, ...]] = {}
    filled: set[int] = set()
    order = data.draw(st.permutations(sorted(sizes)))
    for stage in order:
        known[stage] = sizes[stage]
        told = {each: tuple(lengths) for each, lengths in json.loads(json.dumps(list(known.items())))}
        used = [(number, each) for number, stages in enumerate(buffers) for each in sorted(stages & known.keys())]
        for number, each in data.draw(st.lists(st.sampled_from(used), max_size=3)) if used else ():
            before, rooms = here.pieces[:], {other: here.place(other, []) for other in filled if other != number}
            nbytes = here.make_room(number, each, known)
            filled.add(number)
            # What lies in another buffer stays there.
            assert {other: here.place(other, []) for other in rooms} == rooms
            assert there.make_room(number, each, told) == nbytes
            assert here.pieces == there.pieces == [*before, *([nbytes] if nbytes else [])]
            piece, offsets = here.place(number, sizes[each])
            assert (piece, offsets) == there.place(number, told[each])
            assert offsets[-1] + sizes[each][-1] <= here.pieces[piece]
            assert here.make_room(number, each, known) == 0


def test_a_buffer_that_may_hold_something_stays_where_it_is() -> None:
    """It moved with the one that grew, and its contents were read from the wrong place."""
    layout = BufferLayout([{0, 3}, {0, 3}])
    assert layout.make_room(0, 0, {0: (600,)}) == 2 * 1024
    assert layout.make_room(1, 3, {0: (600,), 3: (2000,)}) == 2048
    assert (layout.place(0, [600]), layout.place(1, [2000])) == ((0, [0]), (1, [0]))
    assert layout.make_room(0, 3, {0: (600,), 3: (2000,)}) == 2048
    assert layout.place(0, [2000]) == (2, [0])
