"""Which transports a pair tries, which it cannot use and why, and which it takes."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bpipe.runtime.links import describe
from bpipe.transport import AUTO, NAMES, connect
from bpipe.transport.connect import Connection, Location, MeasuredLink, candidates, obstacle
from bpipe.transport.distributed import Distributed, PairGroups
from bpipe.transport.memory import ALIGNMENT_BYTES, BufferLayout
from bpipe.transport.one_sided import HostMemory, OneSidedCopies, Peer
from bpipe.transport.streams import Device
from tests.unit.transport.loopback import controls, together

HERE = Location("boot-1", "pid:[1]", "node-a")


@pytest.mark.parametrize(("device", "expected"), [("cpu", ("gloo", "peer")), ("cuda", ("nccl", "peer", "host"))])
def test_auto_tries_what_reaches_the_devices_memory(device: str, expected: tuple[str, ...]) -> None:
    assert candidates(AUTO, device) == expected
    assert candidates("peer", device) == ("peer",)


def test_what_cannot_reach_the_memory_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"--bpipe-transport nccl cannot move memory of device cpu: use gloo, peer"):
        candidates("nccl", "cpu")


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (Location("boot-1", "pid:[1]", "node-a"), None),
        (Location("boot-2", "pid:[1]", "node-b"), "node-a and node-b are different machines"),
        # Container images often give every machine the same name.
        (Location("boot-2", "pid:[1]", "node-a"), "node-a and node-a are different machines"),
        (Location("boot-1", "pid:[2]", "node-a"), "the two processes are in different containers (process namespaces)"),
    ],
)
def test_peer_needs_one_machine_and_one_process_namespace(theirs: Location, why: str | None) -> None:
    assert obstacle("peer", HERE, theirs) == why
    for name in set(NAMES) - {"peer"}:
        assert obstacle(name, HERE, theirs) is None


def test_a_pair_that_finds_no_room_in_host_memory_takes_another_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks pinned 9 GiB each and a node crashed: nothing had checked whether it had the memory."""
    monkeypatch.setattr(connect, "measure", lambda transport, *_: (1e9 if transport == "peer" else 9e9, None))
    links: dict[int, MeasuredLink] = {}

    def end(rank: int, control: Any) -> None:
        connection = SimpleNamespace(
            partner=1 - rank, control=control, transport=lambda name: name, timeout_s=1.0, abort=print
        )
        facts = replace(HERE, no_room="too little") if rank else HERE
        links[rank] = connect._find_link(connection, ("peer", "host"), rank, None, facts)  # type: ignore[arg-type]

    together(*(partial(end, *arguments) for arguments in enumerate(controls(rendezvous=True))))
    assert links[0] == links[1] == MeasuredLink((0, 1), "peer", {"peer": 1e9}, {"host": "too little"})


def test_a_connection_makes_the_transport_its_link_chose() -> None:
    device = Device(torch.device("cpu"))
    lanes = device.lanes(1.0)
    groups = {"gloo": PairGroups(1, None, None)}  # type: ignore[arg-type]
    connection = Connection(1, None, groups, device, lanes, 1.0)  # type: ignore[arg-type]
    connection.link = MeasuredLink((0, 1), "peer", {})
    assert isinstance(connection.transport(), Peer)
    assert isinstance(connection.transport("host"), HostMemory)
    assert isinstance(connection.transport("gloo"), Distributed)
    for lane in lanes:
        lane.close()


@pytest.mark.parametrize(
    ("chosen", "tried", "gone"),
    [("gloo", ["gloo"], ["gloo"]), ("peer", ["nccl"], []), ("nccl", ["nccl", "gloo"], ["nccl"])],
)
def test_a_connection_that_ends_destroys_what_its_link_used(
    chosen: str, tried: list[str], gone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that failed when it was tried is never destroyed: that may take for ever."""
    device, (control, _) = Device(torch.device("cpu")), controls()
    lanes = device.lanes(1.0)
    groups = {name: PairGroups(1, None, None) for name in tried}  # type: ignore[arg-type]
    parted: list[Any] = []
    monkeypatch.setattr(connect, "part", lambda control, groups: parted.append((control, groups)))
    connection = Connection(1, control, groups, device, lanes, 1.0)  # type: ignore[arg-type]
    connection.link = MeasuredLink((0, 1), chosen, {})
    connection.close()
    assert parted == [(control, [groups[name] for name in gone])]
    assert not any(lane._thread.is_alive() for lane in lanes)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("chosen", "measured", "gone"),
    [
        ("peer", {"nccl": 1e9, "peer": 2e9}, ["nccl"]),
        ("nccl", {"nccl": 2e9, "peer": 1e9}, []),
        # Destroying a group that failed may never end.
        ("peer", {"peer": 2e9}, []),
    ],
)
def test_groups_that_lost_are_destroyed_once_the_link_is_chosen(
    chosen: str, measured: dict[str, float], gone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two communicators took hundreds of megabytes of a GPU, for nothing, in the runs that are short of memory."""
    groups = {"nccl": PairGroups(1, "nccl up", "nccl down")}  # type: ignore[arg-type]
    destroyed: list[PairGroups] = []
    monkeypatch.setattr(connect, "destroy_groups", destroyed.append)
    connection = Connection(1, None, groups, Device(torch.device("cpu")), (None, None), 1.0)  # type: ignore[arg-type]
    connection.settle(MeasuredLink((0, 1), chosen, measured))
    assert destroyed == [groups[name] for name in gone]
    assert isinstance(connection.transport(), Distributed if chosen == "nccl" else OneSidedCopies)
    if gone:
        with pytest.raises(RuntimeError, match="this pair has no groups for nccl: it was connected by peer"):
            connection.transport("nccl")


def test_pairs_of_the_same_stages_share_a_line() -> None:
    links = [
        MeasuredLink((0, 6), "peer", {"nccl": 200e9, "peer": 180e9}, {"host": "RuntimeError: no pinned memory"}),
        MeasuredLink((1, 7), "peer", {"nccl": 210e9, "peer": 190e9}, {"host": "RuntimeError: no pinned memory"}),
        MeasuredLink((2, 4), "nccl", {"nccl": 20e9}, {"peer": "a and b are different machines"}),
    ]
    stages = {(0, 6): (0, 3), (1, 7): (0, 3), (2, 4): (2, 1)}
    assert describe(links, stages).split("\nbpipe: ") == [
        "links, measured in both directions:",
        "  stages 0 and 3, 2 pairs of ranks: peer 180 to 190 GB/s (nccl 200 to 210 GB/s; host not usable: RuntimeError: no "
        "pinned memory)",
        "  stages 1 and 2: nccl 20 GB/s (peer not usable: a and b are different machines)",
    ]


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
            used: set[int] = set()
            piece, offsets = layout.place(number, sizes[stage])
            assert piece == 0
            for offset, nbytes in zip(offsets, sizes[stage], strict=True):
                assert offset % ALIGNMENT_BYTES == 0
                place = range(offset, offset + nbytes)
                assert {owner[byte] for byte in place} <= {NOBODY, number}
                assert used.isdisjoint(place), "two storages of one micro-batch"
                used.update(place)
                owner[offset : offset + nbytes] = bytearray([number]) * nbytes


@given(buffers_and_sizes(), st.data())
def test_whatever_is_known_when_both_ends_make_room_alike_and_there_is_enough(
    drawn: tuple[list[frozenset[int]], dict[int, tuple[int, ...]]], data: st.DataObject
) -> None:
    """Stages become known one by one, and buffers are used in between."""
    buffers, sizes = drawn
    first, second = BufferLayout(buffers), BufferLayout(buffers)
    lengths_by_stage: dict[int, tuple[int, ...]] = {}
    filled: set[int] = set()
    order = data.draw(st.permutations(sorted(sizes)))
    for stage in order:
        lengths_by_stage[stage] = sizes[stage]
        copy = {stage: tuple(lengths) for stage, lengths in json.loads(json.dumps(list(lengths_by_stage.items())))}
        used = [
            (number, stage)
            for number, stages in enumerate(buffers)
            for stage in sorted(stages & lengths_by_stage.keys())
        ]
        for number, grown in data.draw(st.lists(st.sampled_from(used), max_size=3)) if used else ():
            before, rooms = first.pieces[:], {buffer: first.place(buffer, []) for buffer in filled if buffer != number}
            nbytes = first.make_room(number, grown, lengths_by_stage)
            filled.add(number)
            # The contents of other buffers stay in place.
            assert {buffer: first.place(buffer, []) for buffer in rooms} == rooms
            assert second.make_room(number, grown, copy) == nbytes
            assert first.pieces == second.pieces == [*before, *([nbytes] if nbytes else [])]
            piece, offsets = first.place(number, sizes[grown])
            assert (piece, offsets) == second.place(number, copy[grown])
            assert offsets[-1] + sizes[grown][-1] <= first.pieces[piece]
            assert first.make_room(number, grown, lengths_by_stage) == 0


def test_a_buffer_that_may_hold_something_stays_where_it_is() -> None:
    """It moved with the one that grew, and its contents were read from the wrong place."""
    layout = BufferLayout([{0, 3}, {0, 3}])
    assert layout.make_room(0, 0, {0: (600,)}) == 2 * 1024
    assert layout.make_room(1, 3, {0: (600,), 3: (2000,)}) == 2048
    assert (layout.place(0, [600]), layout.place(1, [2000])) == ((0, [0]), (1, [0]))
    assert layout.make_room(0, 3, {0: (600,), 3: (2000,)}) == 2048
    assert layout.place(0, [2000]) == (2, [0])
