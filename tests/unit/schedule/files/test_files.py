"""CSV and JSON are exact both ways, and nothing else is accepted as a schedule."""

import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.check.rules import ScheduleError, check
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.unit_grid import align
from bpipe.schedule.files.document import read, read_json, write_json
from bpipe.schedule.files.grid import write_grid
from bpipe.schedule.files.text import TextError, read_action, read_costs, read_csv, write_csv
from bpipe.schedule.memory import peak_counts
from bpipe.schedule.schedule import Schedule
from tests.support.oracle import is_sound
from tests.support.torch_schedules import COUNTS, LOOPED, MULTIPLE, SINGLE, as_csv, parsed, peak, rows, torch_schedule

BALANCED = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))
CONFIGS = [
    ScheduleConfig("1f1b", 1, 1),
    ScheduleConfig("1f1b", 4, 8),
    ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()),
    ScheduleConfig("1f1b", 3, 2, balance=BalanceConfig()),
    ScheduleConfig("gpipe", 3, 4),
    ScheduleConfig("interleaved-1f1b", 4, 8, num_chunks=2, balance=BalanceConfig()),
    ScheduleConfig("interleaved-1f1b", 12, 13, num_chunks=2, balance=BalanceConfig()),
]


JSON = """\
{"schedule": "1f1b", "stages": 2, "microbatches": 1, "chunks": 1, "balance": "none", "bounds": null, \
"partners": null, "stage_to_rank": [0, 1],
 "ranks": [
  {"rank": 0, "peak": 1, "evictions": 0, "slots": [{"compute": "0F0", "transfers": []}, {"compute": null, "transfers": []}, \
{"compute": null, "transfers": []}, {"compute": "0B0", "transfers": []}]},
  {"rank": 1, "peak": 1, "evictions": 0, "slots": [{"compute": null, "transfers": []}, {"compute": "1F0", "transfers": []}, \
{"compute": "1B0", "transfers": []}, {"compute": null, "transfers": []}]}]}
"""


@pytest.mark.parametrize("config", CONFIGS)
def test_every_format_is_exact_both_ways(config: ScheduleConfig) -> None:
    schedule = build(config)
    assert read_csv(write_csv(schedule), schedule.name) == schedule
    assert read_json(write_json(schedule)) == schedule
    for width in (None, 20, 80):
        assert max(map(len, write_grid(schedule, width).split("\n")[1:])) <= (width or 10**6)
    assert read(write_json(schedule)) == schedule


def test_json() -> None:
    assert write_json(build(ScheduleConfig("1f1b", 2, 1))) == JSON


def test_json_may_leave_out_what_is_usual() -> None:
    document = json.loads(write_json(BALANCED))
    del document["partners"], document["stage_to_rank"]
    assert read_json(json.dumps(document)) == BALANCED


def test_costs_are_exact() -> None:
    assert read_costs("1,1.5,1/2", 2, 3) == (1, Fraction(3, 2), Fraction(1, 2))
    for text in ("1", "1,2,3,4", "1,-2", "a,b", "1/0,2", "1,", "1.,2"):
        with pytest.raises(TextError, match="is not 2 or 3 numbers such as"):
            read_costs(text, 2, 3)


@pytest.mark.parametrize(
    "cell", ["", "F0", "0F", "0F0junk", "0Q0", "-1F0", "00F0", "0F01", "0f0", " 0F0", "٣F0", "0F0\n", "0F9999999999"]
)
def test_a_cell_is_read_to_its_last_character_or_not_at_all(cell: str) -> None:
    with pytest.raises(TextError, match="is not an action"):
        read_action(cell)


@pytest.mark.parametrize(
    ("reader", "text", "reason"),
    [
        (read_csv, "", "it has no computations"),
        (read_csv, "0F0,0B0\n,1F0,2Q0\n", "line 2, cell 3: '2Q0' is not an action"),
        (read_csv, "0F0,0SEND_F0\n", "line 1, cell 2: '0SEND_F0' belongs to torch's runtime form, which is not read"),
        (read_csv, "0UNSHARD,0F0\n", "line 1, cell 1: '0UNSHARD' belongs to torch's runtime form"),
        (read_csv, "0F0,0B0\n1F0,1B0,1WAIT_SEND_B0\n", "line 2, cell 3: '1WAIT_SEND_B0' belongs to torch's"),
        (read_csv, "0F0,0B0,0WAIT_REDUCE_GRAD\n", "'0WAIT_REDUCE_GRAD' belongs to torch's"),
        (read_csv, "0F0 0F1\n", "line 1, cell 1: 0F1 is a second computation"),
        (read_csv, "0F0,0B0\n0F1\n", "0F1 is on rank 1, but rank 0 computes the stage too"),
        (read_csv, "0F0\n3F0\n", "no rank computes stage 1"),
        (read_csv, '"0F0","0B0"\n', "line 1, cell 1"),
        (read_csv, "# bpipe schedule=a microbatches=1\n0F0\n", "line 1: the header lacks stage_to_rank="),
        (
            read_csv,
            "# bpipe schedule=a microbatches=1 stage_to_rank=0 colour=red\n0F0\n",
            "'colour=red' is not a header field",
        ),
        (read_csv, "# bpipe schedule=a microbatches=1 stage_to_rank=0 bounds=1, 2\n0F0\n", "'2' is not a header field"),
        (read_csv, "# a remark\n0F0\n", "a header starts with '# bpipe'"),
        (read_json, "{", "line 1, column 2"),
        (read_json, "[]", r"the document is \[\], but must be an object"),
        (read_json, "[" * 100_000, "nested too deeply"),
        (read_json, '{"schedule": NaN}', "NaN is not a finite number"),
        (read_json, '{"a": 1, "a": 2}', "'a' appears twice"),
        (read_json, JSON.replace('"chunks"', '"chonks"'), "lacks 'chunks'"),
        (read_json, JSON.replace('"stages": 2', '"stages": true'), "stages is True, but must be a whole number"),
        (read_json, JSON.replace('"stages": 2', '"stages": 3'), "ranks has 2 entries, but stages is 3"),
        (read_json, JSON.replace('"chunks": 1', '"chunks": 2'), "stages times chunks is 4"),
        (read_json, JSON.replace('"peak": 1', '"peak": 2', 1), r"ranks\[0\].peak is 2, but its slots give 1"),
        (
            read_json,
            JSON.replace('"evictions": 0', '"evictions": 1', 1),
            r"ranks\[0\].evictions is 1, but its slots give 0",
        ),
        (read_json, JSON.replace('"rank": 1', '"rank": 0'), r"ranks\[1\].rank is 0: ranks must be in order"),
        (read_json, JSON.replace('"none"', '"bpipe"'), "balance is 'bpipe', but partners is None"),
        (read_json, JSON.replace('"none"', '"maybe"'), "neither"),
        (read_json, JSON.replace('"0F0"', "7"), r"ranks\[0\].slots\[0\]"),
        (read_json, JSON.replace('"0F0"', '"0EVICT0"'), "write transfers under transfers"),
        (read_json, JSON.replace('"1F0"', '"9F0"'), "an action names stage 9, but there are 2 stages"),
        (read_json, JSON.replace('"schedule": "1f1b"', '"schedule": 3'), "schedule is 3, but must be text"),
        (read_json, JSON.replace('"schedule": "1f1b"', '"schedule": ""'), "schedule='' is not a valid name"),
        (read_json, JSON.replace('"rank": 1', '"extra": 1, "rank": 1'), "unknown 'extra'"),
        (
            read,
            "# bpipe schedule=a microbatches=1 stage_to_rank=0\nslot 0\nrank 0 C F0\n",
            "line 2: 'slot' begins a grid",
        ),
    ],
)
def test_a_broken_file_is_refused_with_its_place(reader: Callable[[str], Schedule], text: str, reason: str) -> None:
    with pytest.raises(TextError, match=reason):
        reader(text)


TEXTS = [writer(build(config)) for config in CONFIGS[:6] for writer in (write_csv, write_json)]


def survives(reader: Callable[[str], Schedule], writer: Callable[[Schedule], str], text: str) -> None:
    """A text is either refused with a TextError, or read, judged, written and read again as the same schedule."""
    try:
        schedule = reader(text)
    except TextError:
        return
    assert reader(writer(schedule)) == replace(schedule, name=reader(writer(schedule)).name)
    with contextlib.suppress(ScheduleError):
        check(schedule)


@pytest.mark.parametrize(("reader", "writer"), [(read_csv, write_csv), (read_json, write_json)])
@settings(max_examples=60)
@given(text=st.one_of(st.text(max_size=80), st.text("0123456789FBIW,. \n#rankslotC", max_size=120)))
@example("\x00")
@example("0F0,\r\n,1F0\r\n")
def test_any_text_is_read_or_refused(
    reader: Callable[[str], Schedule], writer: Callable[[Schedule], str], text: str
) -> None:
    survives(reader, writer, text)


@pytest.mark.parametrize(("reader", "writer"), [(read_csv, write_csv), (read_json, write_json)])
@settings(max_examples=60)
@given(data=st.data())
def test_damaged_files_are_read_or_refused(
    reader: Callable[[str], Schedule], writer: Callable[[Schedule], str], data: st.DataObject
) -> None:
    """Files of every format, cut, spliced, with characters swapped, given to every reader."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    text = rng.choice(TEXTS)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(text) + 1)
        end = min(len(text), place + rng.randint(0, 12))
        text = (
            text[:place]
            + rng.choice(["", "0F0", ",", " ", "\n", "9", '"', "null", "-1", "{}", "[", rng.choice(TEXTS)[:30]])
            + text[end:]
        )
    survives(reader, writer, text)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(["0F0", "0B0", "1EVICT0", "bpipe"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["rank", "slots", "compute", "transfers", "peak"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(value=VALUES, number=st.integers(0, 10**6))
def test_any_value_anywhere_in_a_document_is_read_or_refused(value: object, number: int) -> None:
    document = json.loads(JSON)
    places: list[tuple[object, object]] = []
    waiting: list[object] = [document]
    while waiting:
        node = waiting.pop()
        inner = (
            list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
        )
        places += [(node, key) for key, _ in inner]
        waiting += [child for _, child in inner]
    holder, key = places[number % len(places)]
    holder[key] = value  # type: ignore[index]
    survives(read_json, write_json, json.dumps(document))


counts = pytest.mark.skipif(not COUNTS, reason="torch before 2.15 does not count what a schedule holds")

CASES = [
    *(
        (name, p, m, 1)
        for name in SINGLE
        for p in (1, 2, 3, 4, 8)
        for m in (1, 2, 5, 8, 16)
        if name != "Schedule1F1B" or m >= p
    ),
    *((name, p, m, v) for name in LOOPED for p in (2, 4) for m in (p, 2 * p, 4 * p) for v in (1, 2, 3)),
    *(
        (name, p, m, 2)
        for name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        for p in (2, 3, 4, 8)
        for m in (2 * p, 2 * p + 1, 4 * p)
    ),
]


def of(schedule: Any) -> Schedule:
    """Read a file as a user would, on the unit grid."""
    return align(read(as_csv(schedule)))


@counts
@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_peaks_are_those_that_torch_counts(name: str, p: int, m: int, v: int) -> None:
    theirs = torch_schedule(name, p, m, v)
    ours = of(theirs)
    check(ours)
    assert is_sound(ours)
    own_stages = [
        [stage for stage, rank in enumerate(ours.layout.placements[0]) if rank == place] for place in range(p)
    ]
    assert list(peak_counts(ours)) == [peak(theirs, rank, own_stages[rank]) for rank in range(p)]


@counts
@pytest.mark.parametrize(("ours", "theirs"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 4), (4, 9), (8, 16)])
def test_our_generators_hold_what_torchs_do(ours: str, theirs: str, p: int, m: int) -> None:
    assert ours in FAMILIES
    plain = torch_schedule(theirs, p, m)
    assert list(peak_counts(build(ScheduleConfig(ours, p, m)))) == [peak(plain, rank, [rank]) for rank in range(p)]


@pytest.mark.parametrize("name", MULTIPLE)
def test_compute_only_files_go_both_ways(name: str) -> None:
    theirs = torch_schedule(name, 4, 8, 2)
    text = as_csv(theirs)
    schedule = read_csv(text)
    written = write_csv(schedule)
    # Torch's rows differ in length; ours are equally long.
    assert [line.rstrip(",") for line in written.splitlines()] == [line.rstrip(",") for line in text.splitlines()]
    assert read_csv(written) == schedule
    assert {rank: [action for action in row if action is not None] for rank, row in parsed(written).items()} == {
        rank: [action for action in row if action is not None] for rank, row in rows(theirs).items()
    }
