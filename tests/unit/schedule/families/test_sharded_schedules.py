"""Schedules with shards of the vocabulary: where S and T are placed, what ranks then hold, and the duration."""

from dataclasses import replace

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import allocated_counts
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.deadlock import WaitLevel, blocked_ranks
from bpipe.schedule.check.rules import ScheduleError, check, check_microbatch_order
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.family import ALIKE, FamilyOptions, UnitCosts
from bpipe.schedule.families.shards import fit_shards, further_forwards, later_microbatch
from bpipe.schedule.families.unit_grid import backwards, forwards
from bpipe.schedule.files.grid import write_grid
from bpipe.schedule.files.text import read_csv, write_csv
from bpipe.schedule.layout import Layout, Vocabulary
from bpipe.schedule.memory import peak_counts
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule
from tests.support.hand_made import PLANNED_WAITS

ONE, TWO, INTERLACED = Vocabulary.ONE, Vocabulary.TWO, Vocabulary.INTERLACED
SPLIT = (ONE, TWO, INTERLACED)


def sharded(
    p: int,
    m: int,
    vocabulary: Vocabulary,
    input_shards: bool = False,
    balance: BalanceConfig | None = None,
    costs: UnitCosts = ALIKE,
) -> Schedule:
    return build(
        ScheduleConfig("1f1b", p, m, balance=balance, costs=costs, vocabulary=vocabulary, input_shards=input_shards)
    )


def order(schedule: Schedule, rank: int, *kinds: Kind) -> list[Action]:
    return [action for cell in schedule.ranks[rank] for action in cell.computations if action.kind in kinds]


PICTURE = """\
# bpipe schedule=1f1b-vocabulary-2 microbatches=4 stage_to_rank=0,1,2 vocabulary=2
slot      0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19
rank 0 C F0 F1 F2 F3 S0 T0 S1 T1  .  . S2 B0 T2 S3 B1 T3  . B2  . B3
rank 1 C  . F0 F1 F2 S0 T0 S1 T1 B0  . S2 F3 B1 T2 S3 T3 B2  . B3  .
rank 2 C  .  . F0 F1 S0 T0 S1 B0 T1 F2 B1 S2 F3 T2 S3 B2 T3 B3  .  .
"""


def test_it_looks_like_this() -> None:
    """S0 follows once 2F0 has reached all ranks, and 2B0 once all have computed S0."""
    assert write_grid(sharded(3, 4, TWO)) == PICTURE


@pytest.mark.parametrize("input_shards", [False, True])
@pytest.mark.parametrize("vocabulary", SPLIT)
@pytest.mark.parametrize(("p", "m"), [(p, m) for p in (2, 3, 4, 8) for m in (1, 2, p - 1, p + 1, 4 * p)])
def test_any_number_of_micro_batches_runs_whatever_waits(
    p: int, m: int, vocabulary: Vocabulary, input_shards: bool
) -> None:
    schedule = sharded(p, m, vocabulary, input_shards)
    assert schedule.layout == Layout((tuple(range(p)),), vocabulary, input_shards)
    # If all streams share one queue, collectives of S and T and those of embedding shards would need a common order.
    for waits in (level for level in PLANNED_WAITS if level < WaitLevel.ONE_QUEUE or not input_shards):
        assert not blocked_ranks(schedule, waits, Exchange.POSTED)


def test_in_one_queue_shards_of_the_embedding_are_seen_to_block() -> None:
    """One rank issues a reduction of embeddings before a gradient's, another after it."""
    blocked = blocked_ranks(sharded(4, 16, ONE, input_shards=True), WaitLevel.ONE_QUEUE, Exchange.POSTED)
    assert {"the embeddings", "the last gradient"} <= {block.message.partition(" of ")[0] for block in blocked}


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 16])
def test_a_barrier_costs_a_micro_batch_and_interlacing_half_of_all(p: int) -> None:
    assert peak_counts(sharded(p, 4 * p, ONE)) == tuple(p + 2 - rank for rank in range(p))
    assert peak_counts(sharded(p, 4 * p, TWO)) == tuple(p + 1 - rank for rank in range(p))
    peaks = peak_counts(sharded(p, 4 * p, INTERLACED))
    assert peaks[0] == (3 * p + 1) // 2
    assert list(peaks) == sorted(peaks, reverse=True)
    assert peaks[-1] == 2


@pytest.mark.parametrize("input_shards", [False, True])
@pytest.mark.parametrize("p", [4, 6, 8, 16])
def test_balancing_finds_the_smallest_bound(p: int, input_shards: bool) -> None:
    """Half of what a pair holds together, and what a load needs before an eviction has finished."""
    for vocabulary, more in ((ONE, 2), (TWO, 1)):
        schedule = sharded(p, 4 * p, vocabulary, input_shards, BalanceConfig())
        assert schedule.bounds == ((p + 3) // 2 + more,) * p
        assert max(peak_counts(schedule)) == (p + 3) // 2 + more


# Every other family with shards, and numbers of chunks.
OTHERS = [
    *(("1f1b-split", 1), ("zb-h1", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 4), ("grouped-interleaved", 2)),
    *(("grouped-interleaved", 4), ("v-half", 2), ("v-min", 2), ("zb-v", 2)),
]


@pytest.mark.parametrize("input_shards", [False, True])
@pytest.mark.parametrize(("name", "v"), OTHERS)
def test_other_families_run_with_any_number_of_micro_batches(name: str, v: int, input_shards: bool) -> None:
    for p, m in ((2, 1), (2, 5), (3, 3), (4, 2), (4, 7), (5, 11), (6, 9)):
        for vocabulary in (ONE, TWO):
            schedule = build(ScheduleConfig(name, p, m, num_chunks=v, vocabulary=vocabulary, input_shards=input_shards))
            check_microbatch_order(schedule)
            assert not blocked_ranks(schedule, WaitLevel.IN_EVERY_OPERATION, Exchange.POSTED)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
def test_groups_of_any_size_run_ahead(group: int) -> None:
    """If one more forward would make ranks wait for each other, one more micro-batch does not."""
    for m in (5, 12, 17):
        whole, shards = (
            build(ScheduleConfig("grouped-interleaved", 6, m, num_chunks=3, group_size=min(group, m), vocabulary=kind))
            for kind in (Vocabulary.WHOLE, ONE)
        )
        assert max(peak_counts(shards)) <= max(peak_counts(whole)) + 3


def test_one_forward_more_could_make_ranks_wait_for_each_other() -> None:
    """Then every backward is that of the previous micro-batch, in any order."""
    name, p, m = "zb-v", 8, 24
    orders = FAMILIES[name].orders
    layout = replace(FAMILIES[name].layout(p, 2), vocabulary=ONE)
    alone = further_forwards(orders, {ONE: 3, TWO: 3})(p, m, 2, FamilyOptions(), layout)
    assert alone == later_microbatch(orders)(p, m, 2, FamilyOptions(), layout)


@pytest.mark.parametrize("vocabulary", [ONE, TWO])
@pytest.mark.parametrize("input_shards", [False, True])
@pytest.mark.parametrize(
    ("p", "v", "m", "bound"), [(4, 2, 12, 5), (4, 3, 5, 9), pytest.param(8, 2, 16, 12, marks=pytest.mark.slow)]
)
def test_an_order_made_for_a_bound_keeps_it_around_shards(
    p: int, v: int, m: int, bound: int, input_shards: bool, vocabulary: Vocabulary
) -> None:
    """Host buffers stay allocated, so they always count."""
    balance = BalanceConfig((bound,), buffers_stay=True)
    config = ScheduleConfig(
        "grouped-interleaved", p, m, num_chunks=v, balance=balance, vocabulary=vocabulary, input_shards=input_shards
    )
    schedule = build(config)
    assert max(allocated_counts(schedule)) <= bound
    assert schedule.bounds == (bound,) * p
    assert schedule.layout.vocabulary is vocabulary
    check(schedule, Exchange.POSTED)
    assert build(config) == schedule


def test_a_bound_below_what_shards_need_is_refused_with_what_is_kept() -> None:
    with pytest.raises(ValueError, match=r"no order .* within 2 micro-batches of a chunk.* its groups of 2 keep 6"):
        build(
            ScheduleConfig(
                "grouped-interleaved",
                4,
                12,
                num_chunks=2,
                balance=BalanceConfig((2,), buffers_stay=True),
                vocabulary=ONE,
            )
        )


def test_what_cannot_be_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"gpipe has no place for shards of the vocabulary: .* choose from 1f1b"):
        ScheduleConfig("gpipe", 4, 8, vocabulary=ONE)
    with pytest.raises(ValueError, match=r"v-half has no place where all ranks compute shards at the same time"):
        ScheduleConfig("v-half", 4, 8, num_chunks=2, vocabulary=INTERLACED)
    with pytest.raises(ValueError, match="choose vocabulary 1, 2 or interlaced, too"):
        ScheduleConfig("1f1b", 4, 8, input_shards=True)
    with pytest.raises(ValueError, match="1 rank cannot share the vocabulary"):
        ScheduleConfig("1f1b", 1, 8, vocabulary=ONE)
    with pytest.raises(ScheduleError, match="S belongs to a split vocabulary, but here it is whole"):
        check(read_csv("# bpipe schedule=a microbatches=1 stage_to_rank=0\n0F0,0S0,0B0\n"))
    with pytest.raises(ValueError, match="computations are more than"):
        ScheduleConfig("1f1b", 1024, 2000, vocabulary=ONE, input_shards=True)


def test_own_orders_that_wait_for_each_other_are_named() -> None:
    layout = Layout(((0, 1),), TWO)
    own = [forwards(0, range(2)) + backwards(0, range(2)), backwards(1, range(2)) + forwards(1, range(2))]
    with pytest.raises(ValueError, match="wait for each other: rank 0 at 0S0"):
        fit_shards(layout, 2, own, ALIKE)


def with_both_layers(name: str) -> str:
    """A schedule with both layers in shards, as text."""
    return write_csv(
        build(ScheduleConfig(name, 4, 8, num_chunks=1 if name == "1f1b" else 2, vocabulary=ONE, input_shards=True))
    )


@pytest.mark.parametrize("name", ["1f1b", "v-half", "interleaved-1f1b"])
@pytest.mark.parametrize(
    ("original", "instead"), [("1S2", "1T1"), ("2IF3", "2IF2"), ("0IB1", "0IB0"), ("3IB5", "3IB6")]
)
def test_one_rank_with_another_order_is_refused(name: str, original: str, instead: str) -> None:
    """Two computations of one rank are exchanged, so that their collectives would never meet."""
    text = with_both_layers(name)
    exchanged = text.replace(original, "X").replace(instead, original).replace("X", instead)
    assert exchanged != text
    with pytest.raises(ScheduleError):
        check(read_csv(exchanged))


@pytest.mark.parametrize("name", ["1f1b", "v-half", "interleaved-1f1b"])
@pytest.mark.parametrize("missing", ["1IF2", "3IB7"])
def test_a_shard_left_out_is_refused(name: str, missing: str) -> None:
    text, (rank, *kind, microbatch) = with_both_layers(name), missing
    assert missing in text
    with pytest.raises(
        ScheduleError, match=f"rank {rank} has no {''.join(kind)} of micro-batch {microbatch} in any slot"
    ):
        check(read_csv(text.replace(missing, "")))


LEFT_OUT = {
    "behind T": (
        write_csv(sharded(4, 8, ONE)).replace("3T0", "X").replace("3B0", "3T0").replace("X", "3B0"),
        "stage order: rank 3, slot [0-9]+, 3B0: needs .T0, which rank . computes",
    ),
    "behind S": (
        "# bpipe schedule=mine microbatches=1 stage_to_rank=0,1 vocabulary=1\n0F0,,0S0,0T0,,,0B0\n,1F0,,1S0,1T0,1B0,\n",
        "stage order: rank 0, slot 3, 0T0: needs 1S0, which rank 1 computes in slot 3",
    ),
}


@pytest.mark.parametrize("barrier", LEFT_OUT)
def test_a_barrier_left_out_is_refused(barrier: str) -> None:
    text, message = LEFT_OUT[barrier]
    with pytest.raises(ScheduleError, match=f"(?s){message}"):
        check(read_csv(text))
