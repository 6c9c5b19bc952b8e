"""Schedules of slices of sequences: orders, rules, memory, text. The picture and the table are those of the design."""

import json
from dataclasses import replace

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import balance
from bpipe.build import ScheduleConfig, build, config_of_schedule
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.rules import ScheduleError, check, check_microbatch_order
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.family import UnitCosts
from bpipe.schedule.families.one_f_one_b import in_turn
from bpipe.schedule.families.timing import iteration_time
from bpipe.schedule.families.unit_grid import place
from bpipe.schedule.files.document import read_json, write_json
from bpipe.schedule.files.grid import write_grid
from bpipe.schedule.files.text import TextError, read_csv, write_csv
from bpipe.schedule.layout import Vocabulary, one_pipe
from bpipe.schedule.memory import KeptMemory, Memory, StageMemory, live_bytes, peak_counts
from bpipe.schedule.schedule import Schedule

SLICED = tuple(name for name, family in FAMILIES.items() if family.takes_slices)

ONE_F_ONE_B = """\
# bpipe schedule=1f1b microbatches=3 slices=2 stage_to_rank=0,1,2,3
slot      0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17
rank 0 C F0 F1 F2 F3 F4  .  .  . B1 F5 B0  . B3  . B2  . B5 B4
rank 1 C  . F0 F1 F2 F3  .  . B1 F4 B0 F5 B3  . B2  . B5 B4  .
rank 2 C  .  . F0 F1 F2  . B1 F3 B0 F4 B3 F5 B2  . B5 B4  .  .
rank 3 C  .  .  . F0 F1 B1 F2 B0 F3 B3 F4 B2 F5 B5 B4  .  .  .
"""


def sliced(name: str, p: int, m: int, k: int, v: int = 1, **asked: object) -> Schedule:
    config = ScheduleConfig(name, p, m, num_chunks=max(v, FAMILIES[name].min_chunks), slices=k, **asked)  # type: ignore[arg-type]
    return build(config)


def test_slices_of_1f1b_stand_as_drawn() -> None:
    """A rank runs one slice further ahead than in 1F1B, and a micro-batch's backwards are reversed."""
    drawn = sliced("1f1b", 4, 3, 2)
    assert write_grid(drawn) == ONE_F_ONE_B
    assert (drawn.num_microbatches, drawn.num_whole_microbatches, drawn.layout.slices) == (6, 3, 2)


# The table of the design (F = I = W, p = 8): most micro-batches that a rank holds, balanced, bubble at m = 32 and m =
# 8.
TABLE = [
    ("1f1b", 1, 1, 8, 5, 17.9, 46.7),
    ("1f1b", 2, 1, 4.5, 3, 9.9, 30.4),
    ("1f1b", 4, 1, 2.75, 2, 5.2, 17.9),
    ("1f1b", 8, 1, 1.875, 1.5, 2.7, 9.9),
    ("1f1b", 16, 1, 1.4375, 1.25, 1.3, 5.2),
    ("interleaved-1f1b", 8, 2, 1.875, 1.5, 1.3, 5.2),
    ("grouped-interleaved", 4, 2, 1.875, 1.5, 2.3, 8.6),
    ("grouped-interleaved", 8, 4, 1.21875, 1.125, 0.5, 1.8),
]


@pytest.mark.parametrize(("name", "k", "v", "peak", "balanced", "bubble", "short"), TABLE)
def test_peaks_and_bubbles_are_those_of_the_design(
    name: str, k: int, v: int, peak: float, balanced: float, bubble: float, short: float
) -> None:
    for m, percent in ((32, bubble), (8, short)):
        schedule = sliced(name, 8, m, k, v)
        assert max(peak_counts(schedule)) == peak * k * v
        assert round(float(iteration_time(schedule, UnitCosts(1, 1, 1)).bubble_percent), 1) == percent
        evened = balance(schedule)
        check(evened)
        assert max(evened.bounds or ()) == balanced * k * v


@pytest.mark.parametrize("name", SLICED)
@pytest.mark.parametrize("k", [2, 3, 5])
def test_every_family_that_takes_slices_keeps_all_rules(name: str, k: int) -> None:
    for p in (1, 2, 3, 4, 7):
        for m in (1, 2, 3, 5):
            schedule = sliced(name, p, m, k)
            check_microbatch_order(schedule)
            assert schedule.num_microbatches == m * k
            assert read_csv(write_csv(schedule)) == read_json(write_json(schedule)) == schedule
            if name != "gpipe":
                check(balance(schedule))


@pytest.mark.parametrize("name", SLICED)
def test_one_slice_is_the_whole_micro_batch(name: str) -> None:
    assert sliced(name, 4, 6, 1) == build(ScheduleConfig(name, 4, 6, num_chunks=FAMILIES[name].min_chunks))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in SLICED])
def test_other_families_refuse_slices(name: str) -> None:
    with pytest.raises(ValueError, match=f"schedule {name} does not cut .* into slices: .* choose from gpipe, 1f1b"):
        sliced(name, 4, 4, 2)


SHARDED_TOO = tuple(name for name in SLICED if FAMILIES[name].sharded is not None)


@pytest.mark.parametrize("vocabulary", [Vocabulary.ONE, Vocabulary.TWO])
@pytest.mark.parametrize("name", SHARDED_TOO)
@pytest.mark.parametrize(("p", "m", "k"), [(2, 1, 2), (3, 5, 3), (4, 3, 2), (4, 8, 4)])
def test_shards_of_the_vocabulary_are_of_each_slice(name: str, p: int, m: int, k: int, vocabulary: Vocabulary) -> None:
    """Every rank computes S and T slice by slice, in one order; balanced schedules do, too."""
    v = 2 if FAMILIES[name].max_chunks != 1 else 1
    schedule = sliced(name, p, m, k, v, vocabulary=vocabulary)
    check_microbatch_order(schedule)
    for row in schedule.ranks:
        computed = [action for slot in row for action in slot.computations]
        for kind in (Kind.SHARD_FORWARD, Kind.SHARD_BACKWARD):
            assert [action.microbatch for action in computed if action.kind is kind] == list(range(m * k))
    check(sliced(name, p, m, k, v, vocabulary=vocabulary, balance=BalanceConfig()))


def test_a_shard_holds_the_logits_of_few_slices() -> None:
    """Without shards the last stage runs 4 forwards, each with its logits, before its first backward."""
    for vocabulary in (Vocabulary.ONE, Vocabulary.TWO):
        (row, *_) = reversed(sliced("1f1b", 4, 8, 4, vocabulary=vocabulary).ranks)
        count = peak = 0
        for action in (action for slot in row for action in slot.computations):
            count += (action.kind is Kind.SHARD_FORWARD) - (action.kind is Kind.SHARD_BACKWARD)
            peak = max(peak, count)
        assert peak <= 2


@pytest.mark.parametrize(
    ("k", "asked", "reason"),
    [
        (0, {}, "slices is 0, but must be at least 1"),
        (2, {"vocabulary": Vocabulary.INTERLACED}, "slices 2 and vocabulary interlaced"),
        (2, {"vocabulary": Vocabulary.ONE, "input_shards": True}, "slices 2 and shards of the embedding"),
    ],
)
def test_slices_that_cannot_be_are_refused(k: int, asked: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        sliced("1f1b", 4, 4, k, **asked)  # type: ignore[arg-type]


def test_groups_of_interleaved_slices_are_whole_micro_batches() -> None:
    """With 3 ranks and 2 slices a group has 2 micro-batches; a last group of one is padded, then trimmed."""
    assert check_microbatch_order(sliced("interleaved-1f1b", 3, 5, 2, 2)) is None
    with pytest.raises(ValueError, match=r"a group of 1 .* 2 to 5: .* as there are pipeline ranks, 3, with 2 slices"):
        sliced("interleaved-1f1b", 3, 5, 2, 2, group_size=1)


def test_backwards_in_the_order_of_forwards_are_refused() -> None:
    """The order is 1F1B's, with its micro-batches taken as slices."""
    orders = in_turn(4, 4, 2)
    with pytest.raises(ScheduleError, match=r"order of slices: rank 0, slot .*, 0B0: needs gradients") as error:
        check(place("wrong", 8, replace(one_pipe(range(4)), slices=2), orders))
    assert error.value.action == Action(0, Kind.BACKWARD, 0)


def _swapped(schedule: Schedule, kind: Kind, number: int, stage: int) -> Schedule:
    """Return the order with two neighbouring slices of a stage exchanged."""
    both = {
        Action(stage, kind, number): Action(stage, kind, number + 1),
        Action(stage, kind, number + 1): Action(stage, kind, number),
    }
    rows = tuple(
        tuple(
            slot if slot.compute is None else replace(slot, compute=both.get(slot.compute, slot.compute))
            for slot in row
        )
        for row in schedule.ranks
    )
    return replace(schedule, ranks=rows)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "grouped-interleaved", "v-half"])
def test_every_pair_of_slices_that_changes_places_is_refused(name: str) -> None:
    schedule = sliced(name, 2, 2, 3)
    backward = Kind.BACKWARD_INPUT if FAMILIES[name].splits else Kind.BACKWARD
    for stage in range(schedule.num_stages):
        for kind in (Kind.FORWARD, backward):
            for number in (0, 1, 3, 4):
                with pytest.raises(ScheduleError):
                    check(_swapped(schedule, kind, number, stage))


def test_a_file_says_how_many_slices_there_are() -> None:
    schedule = sliced("1f1b", 4, 3, 2, balance=BalanceConfig())
    assert write_csv(schedule).startswith(
        "# bpipe schedule=1f1b microbatches=3 slices=2 stage_to_rank=0,1,2,3 partners=3,2,1,0 bounds=4,4,4,4\n"
    )
    document = json.loads(write_json(schedule))
    assert (document["microbatches"], document["slices"], document["ranks"][0]["peak"]) == (3, 2, 4)
    assert "slices" not in json.loads(write_json(sliced("1f1b", 4, 3, 1)))
    assert config_of_schedule(schedule).slices == 2
    assert build(config_of_schedule(schedule)) == schedule


def test_files_without_a_number_of_slices_are_refused() -> None:
    schedule = sliced("1f1b", 4, 3, 2)
    for value in ("0", "x", "2,3", ""):
        with pytest.raises(TextError, match="slices"):
            read_csv(write_csv(schedule).replace("slices=2", f"slices={value}"))
    text = write_json(schedule)
    for value in ("0", "1.5", '"2"'):
        with pytest.raises(TextError, match="slices"):
            read_json(text.replace('"slices": 2', f'"slices": {value}'))
    with pytest.raises(ValueError, match=r"0F3: there are stages|0F\d: there are"):
        check(read_json(text.replace('"slices": 2', '"slices": 1')))


def test_memory_of_split_backwards_frees_keys_with_the_first_slices_input_half() -> None:
    memory = Memory((StageMemory(10, 10, 6), StageMemory(4, 4, 3)), slices=2, kept=(KeptMemory(100, 50),))
    schedule = sliced("1f1b-split", 1, 1, 2)
    assert [str(slot.compute) for slot in schedule.ranks[0]] == ["0F0", "0F1", "0I1", "0W1", "0I0", "0W0"]
    assert live_bytes(schedule, 0, memory) == (110, 114, 164, 163, 160, 6)


def test_sizes_of_slices_and_of_what_is_kept_must_cover_the_stages() -> None:
    size = StageMemory(10, 10, 10)
    with pytest.raises(ValueError, match="sizes of 1 stages, but the schedule has 2"):
        Memory((size, size), slices=2).check(2)
    with pytest.raises(ValueError, match=r"1 stages keep keys and values, but the schedule has 2: give one for each"):
        Memory((size,) * 4, slices=2, kept=(KeptMemory(1, 1),)).check(2)
