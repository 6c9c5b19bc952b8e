"""A record has one definition for writing and reading, also of runs recorded before there was one."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from bpipe.balance.budget import ActivationBudget
from bpipe.balance.config import BalanceConfig
from bpipe.balance.deadlines import Windows
from bpipe.build import ScheduleConfig, build, config_of_schedule
from bpipe.record import format as form
from bpipe.record.format import keys_of, read_program, write_program
from bpipe.record.read import read_held, read_run, read_steps
from bpipe.record.write import append, write_whole
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families.family import UnitCosts
from bpipe.schedule.memory import KeptMemory, Memory, memory_of
from bpipe.schedule.program import Exchange
from tests.unit.record.report.recorded import documented

ROOT = Path(__file__).resolve().parents[3]
# Four stages, eight micro-batches, balanced over shared memory; iterations 2 and 3 of 3. Written before `bpipe.record`
# was.
BEFORE = ROOT / "tests" / "data" / "recorded_run"


def test_a_run_of_before_is_read_whole() -> None:
    run = read_run(BEFORE)
    assert run.notes == ()
    assert [record.rank for record in run.ranks] == [0, 1, 2, 3]
    assert [record.partner for record in run.ranks] == [3, None, None, 0]
    assert all(set(record.iterations) == {2, 3} for record in run.ranks)
    assert run.info.links[0].bytes_per_s["peer"] == 5837152263.352107
    first = run.ranks[0].iterations[2]
    assert first.program.balance_name == "bpipe"
    assert (first.kept_counted_by, first.kept_bytes, first.moved_bytes) == ("storages", {0: 1019904}, {0: 1015808})
    assert sum(row.action.kind is Kind.FORWARD for row in first.rows) == 8
    assert first.rows[0].action == Action(0, Kind.FORWARD, 0)
    assert all(row.live_bytes for row in first.rows if row.slot is None)
    assert run.run_peak_bytes[0] == 3055616
    held = read_held(BEFORE)
    assert held is not None
    assert [len(rank.marks) for rank in held.ranks] == [4, 4, 3, 2]
    assert held.ranks[0].besides_bytes == 249088 + 249088 + 498176
    assert held.ranks[0].marks[1].microbatches == ((0, 0, 1017856), (0, 1, 1017856))


def test_what_is_held_between_halves_and_of_shards_is_written_and_read(tmp_path: Path) -> None:
    (rank, *_) = read_run(BEFORE).ranks
    (one, *_) = rank.iterations.values()
    split = replace(one, after_input_bytes={0: 1_100_000}, shard_bytes=50_688)
    header = form.RankHeader(**{key.name: getattr(rank, key.name) for key in keys_of(form.RankHeader)})
    write_whole(tmp_path / form.RUN, read_run(BEFORE).info)
    append(form.RECORD.path(tmp_path, 0), header, split)
    assert read_run(tmp_path).ranks[0].iterations[one.iteration] == split


def test_the_first_failure_is_written_and_read(tmp_path: Path) -> None:
    first = form.FirstFailure(rank=2, cause="OutOfMemoryError: no memory left")
    write_whole(tmp_path / form.FAILURE, first)
    (tmp_path / "memory_00000.jsonl").write_text((BEFORE / "memory_00000.jsonl").read_text())
    found = read_held(tmp_path)
    assert found is not None
    assert found.failure == first
    (tmp_path / form.FAILURE).write_text('{"rank": "two", "cause": "?"}')
    with pytest.raises(ValueError, match=r"failure\.json: not the failure of a run \(rank is 'two'"):
        read_held(tmp_path)


@pytest.mark.parametrize("number", [0.1, -0.0, 5e-324, None])
def test_a_loss_keeps_every_bit(tmp_path: Path, number: float | None) -> None:
    step = form.TrainingStep(iteration=1, numbers={"lm loss": number, "grad_norm": 1.5}, skipped=0, elapsed_s=0.5)
    append(tmp_path / form.STEPS, step)
    (found,) = read_steps(tmp_path / form.STEPS, [])
    assert repr(found) == repr(step)


@pytest.mark.parametrize(
    ("heading", "kinds"),
    [
        ("The run", (form.RunInfo,)),
        ("The record of a rank", (form.RankHeader, form.Iteration, form.Row)),
        ("The memory of a rank", (form.MemoryHeader, form.MemoryMark)),
    ],
)
def test_every_key_is_documented(heading: str, kinds: tuple[type, ...]) -> None:
    named = documented(heading)
    defined = {key.name for kind in kinds for key in keys_of(kind)}
    assert defined <= named
    assert {name for name in named if "." not in name} - defined <= {"format", "version", "columns", "actions"}


def test_a_column_without_a_value_is_read_as_its_default() -> None:
    """What a later version adds has one, so that a record without the column is read."""
    assert [column.name for column in form.COLUMNS] == list(form.Row._fields)
    assert [column.name for column in form.COLUMNS if column.needed] == ["action", "start_s", "end_s"]


def within(memory: Memory, *room_bytes: int, slices: int = 1, **more: Any) -> ScheduleConfig:
    """1F1B within these budgets."""
    budget = ActivationBudget(room_bytes, memory)
    return ScheduleConfig("1f1b", 4, 8, slices=slices, balance=BalanceConfig(activation_budget=budget, **more))


def windows(forward_s: tuple[float, ...], backward_s: tuple[float, ...], slices: int = 1) -> Windows:
    seconds = (Kind.FORWARD, forward_s * 4), (Kind.BACKWARD, backward_s * 4)
    return Windows(seconds, 1e-5, (0.3,) * 4 * slices, (0.9,) * 4 * slices, (0, 0, 1, 1), slices=slices)


WHOLE, SLICED = memory_of([100] * 4), memory_of([60, 40] * 4, [50, 30] * 4)
CHOSEN = ScheduleConfig("grouped-interleaved", 4, 8, num_chunks=2, balance=BalanceConfig((6,)))
PROGRAMS = (
    ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig((3,), (3, 2, 1, 0))),
    ScheduleConfig("interleaved-1f1b", 4, 10, num_chunks=2, group_size=6, exchange=Exchange.POSTED),
    ScheduleConfig("1f1b-split", 4, 8, delay=2),
    config_of_schedule(build(ScheduleConfig("zb-h1", 4, 8))),
    config_of_schedule(build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig())), BalanceConfig()),
    replace(CHOSEN, after_input=Fraction(1, 2)),
    replace(
        CHOSEN,
        balance=BalanceConfig((6,), buffers_stay=True),
        costs=UnitCosts(1, Fraction(6, 5), Fraction(4, 5), Fraction(1, 20)),
    ),
    within(memory_of([100] * 4, [90] * 4), 300, 400, 400, 400),
    within(WHOLE, 300, 400, 400, 400, windows=windows((0.1,), (0.25,))),
    within(replace(memory_of([100] * 4, [50] * 4), reserved=True), 350, 400, 400, 400, parts=(0,)),
    within(
        replace(SLICED, reserved=True, slices=2, kept=(KeptMemory(20, 40),) * 4),
        *(500, 600, 600, 600),
        slices=2,
        windows=windows((0.1, 0.2), (0.25, 0.5), slices=2),
    ),
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.schedule)
def test_what_was_run_can_be_built_again(program: ScheduleConfig) -> None:
    """From the record alone: of a schedule that is no family's it holds the schedule."""
    text = json.dumps(write_program(program))
    found = read_program(json.loads(text))
    assert found == program
    assert build(found) == build(program)


def test_an_exchange_that_there_is_not_is_refused() -> None:
    keys = write_program(PROGRAMS[0]) | {"exchange": "pigeon"}
    with pytest.raises(ValueError, match=r"exchange: 'pigeon' is none of megatron-1f1b, megatron-interleaved"):
        read_program(keys)


def test_a_schedule_of_other_sizes_than_its_program_is_refused() -> None:
    keys = write_program(PROGRAMS[3]) | {"num_microbatches": 9}
    with pytest.raises(ValueError, match="schedule zb-h1 has num_microbatches 8, not 9"):
        build(read_program(keys))
