"""Records: every key is written and read, and what is refused, noted or left out when a folder is read."""

import json
from collections.abc import Callable
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
from bpipe.record.format import append, keys_of, read_program, write_program, write_whole
from bpipe.record.read import read_held, read_run, read_steps
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families.family import UnitCosts
from bpipe.schedule.memory import KeptMemory, Memory, memory_of
from bpipe.schedule.program import Exchange
from tests.unit.record.report.recorded import documented, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", num_stages=4, num_microbatches=4, iterations=(5, 6), flops=1e12, peak_flops=1e13)


def edit(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change the lines of a file of JSON lines, given as dictionaries."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_everything_is_read(folder: Path) -> None:
    run = read_run(folder)
    assert [record.rank for record in run.ranks] == [0, 1, 2, 3]
    assert run.notes == ()
    assert (run.info.world_size, run.info.flops_per_iteration, run.info.peak_source) == (4, 1e12, "--bpipe-peak-tflops")
    assert run.info.links[0].ranks == {0, 3}
    assert set(run.step_s) == {5, 6}
    iteration = run.ranks[0].iterations[6]
    assert iteration.program.balance_name == "bpipe"
    assert iteration.saved_bytes == {0: 11_000_000}
    assert str(iteration.rows[0].action) == "0F0"
    assert {str(row.action) for row in iteration.rows if row.slot is not None} == {"0EVICT1", "0LOAD1"}


def test_a_killed_run(folder: Path) -> None:
    """Half a line, a rank that left nothing, one that left an empty file, and no run.json."""
    torn = folder / "record_00001.jsonl"
    torn.write_bytes(torn.read_bytes()[:-100])
    (folder / "record_00002.jsonl").unlink()
    (folder / "record_00003.jsonl").write_text("")
    run = read_run(folder)
    assert set(run.ranks[1].iterations) == {5}
    assert run.notes == (
        "record_00001.jsonl ends in a torn line, which is left out: the run was killed while writing it",
        "record_00003.jsonl is empty",
        "no record of ranks 2, 3 (of 4)",
    )
    (folder / "run.json").unlink()
    assert read_run(folder).notes[0].startswith("run.json is missing")


def header(**changes: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda lines: lines[0].update(changes)


def line(**changes: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda lines: lines[1].update(changes)


def ends_early(lines: list[dict[str, Any]]) -> None:
    lines[1]["actions"][0][2] = -1.0


def cell(column: str, value: Any) -> Callable[[list[dict[str, Any]]], None]:
    def change(lines: list[dict[str, Any]]) -> None:
        lines[1]["actions"][3][lines[1]["columns"].index(column)] = value

    return change


PROGRAM = {"schedule": "1f1b", "num_stages": 4, "num_microbatches": 8, "num_chunks": 1, "balance": "bpipe"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (header(format="csv"), "record_00001.jsonl, line 1: its format is not bpipe-record"),
        (header(version=2), "version 2, but this bpipe reads version 1"),
        (header(rank=7), "the file says that it is of rank 7: was it renamed?"),
        (header(place=0), "ranks 0 and 1 both say they are at place 0 of pipeline 0"),
        (header(place=9), "rank 1 is at place 9 of a pipeline of 4"),
        (line(iteration=6), "record_00001.jsonl: iteration 6 appears twice"),
        (
            line(program=PROGRAM),
            "in iteration 5 rank 0 ran 1f1b of 4 stages, 4 micro-batches, 1 chunks, balance bpipe, rank 1 ran",
        ),
        (line(program=PROGRAM | {"schedule": "magic"}), "line 2: unknown schedule 'magic'"),
        (line(begin_s=0.0), "began iteration 5 1763721600 s after rank 1 had ended it"),
        (line(columns=["action"], actions=[["0F0"]]), "line 2: 0F0 'start_s' is missing"),
        (line(actions=[["0F0", 1.0]]), "has 2 values for 11 columns"),
        (line(actions=[["0X0", *[0.0] * 10]]), "'0X0' is not an action"),
        (ends_early, "1F0 ends at -1.0 s, before it starts"),
        (lambda lines: lines[1].pop("saved_bytes"), "line 2: 'saved_bytes' is missing"),
        (lambda lines: lines.insert(2, lines[0]), "line 3: a second header: two runs wrote into this file"),
        (header(place="1"), "line 1: place is '1', but must be a whole number"),
        (header(pipeline=[0]), "line 1: pipeline is [0], but must be a whole number"),
        (header(rank=None), "line 1: 'rank' is missing"),
        (header(weights_bytes={}), "line 1: weights_bytes is {}, but must be a whole number"),
        (header(host=3), "line 1: host is 3, but must be text"),
        (line(iteration=1e300), "line 2: iteration is 1e+300, but must be a whole number"),
        (line(elapsed_s=-1.0), "line 2: elapsed_s is -1.0, but must be a number from 0"),
        (line(begin_s=float("nan")), "line 2: not JSON (NaN is not a finite number"),
        (line(saved_bytes={"0": "many"}), "line 2: saved_bytes of stage 0 is 'many', but must be a whole number"),
        (line(saved_bytes={"0": 10**30}), "line 2: saved_bytes of stage 0 is 1000000000000000000000000000000, but"),
        (line(moved_bytes={"first": 1}), "line 2: moved_bytes has 'first': its keys must be stages"),
        (line(program=[]), "line 2: program is [], but must be an object"),
        (line(program=PROGRAM | {"partners": 3}), "line 2: program.partners is 3, but must be a list"),
        (line(program=PROGRAM | {"num_microbatches": 400}), "in iteration 5 rank 0 ran"),
        (line(actions={}), "line 2: actions is {}, but must be a list"),
        (line(columns=["action", []]), "line 2: a column is [], but must be text"),
        (cell("wait_s", [0.0]), "wait_s is [0.0], but must be a number"),
        (cell("wait_s", -5.0), "wait_s is -5.0, but must be a number"),
        (cell("start_s", None), "1B0 'start_s' is missing"),
        (cell("start_s", -60.0), "start_s is -60.0, but must be a number from -1"),
        (cell("end_s", 1e9), "ends at 1000000000.0 s, but its iteration took"),
        (cell("host_start_s", "soon"), "host_start_s is 'soon', but must be a number"),
        (cell("live_bytes", 0.5), "live_bytes is 0.5, but must be a whole number"),
        (cell("action", 7), "an action is 7, but must be text"),
    ],
)
def test_what_no_run_writes_is_refused(
    folder: Path, change: Callable[[list[dict[str, Any]]], None], message: str
) -> None:
    """Wrong types, numbers out of range, and files that are not of one run."""
    path = folder / "record_00001.jsonl"
    edit(path, change)
    with pytest.raises(ValueError) as raised:
        read_run(folder)
    assert message in str(raised.value)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("run.json", "world_size", "4", "world_size is '4', but must be a whole number from 1"),
        ("run.json", "world_size", 10**9, "world_size is 1000000000, but must be a whole number from 1 to 1000000"),
        ("run.json", "flops_per_iteration", [], "flops_per_iteration is [], but must be a number"),
        ("run.json", "peak_flops", 1e300, "peak_flops is 1e+300, but must be a number"),
        ("run.json", "synchronous", "no", "synchronous is 'no', but must be true or false"),
        (
            "run.json",
            "links",
            [{"ranks": [0, 3], "bytes_per_s": {"peer": 0}}],
            "peer of links.bytes_per_s is 0, but must be a number from 1",
        ),
        ("run.json", "links", [3], "links is 3, but must be an object"),
        ("run.json", "torch", {}, "torch is {}, but must be text"),
        ("iterations.jsonl", "elapsed_s", -1, "line 1: elapsed_s is -1, but must be a number from 0"),
        ("iterations.jsonl", "iteration", 1e300, "line 1: iteration is 1e+300, but must be a whole number"),
        ("rank_00000.json", "peak_bytes", float("1e999"), "not a finite number"),
        ("rank_00000.json", "rank", None, "'rank' is missing"),
    ],
)
def test_a_value_beside_the_records_that_no_run_has_is_refused(
    folder: Path, name: str, key: str, value: Any, message: str
) -> None:
    path = folder / name
    rows = (
        [json.loads(line) for line in path.read_text().splitlines()]
        if path.exists()
        else [{"rank": 0, "peak_bytes": 1}]
    )
    rows[0][key] = value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError) as raised:
        read_run(folder)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_record_of_another_size_is_refused_before_its_program_is_built(folder: Path) -> None:
    for path in folder.glob("record_*.jsonl"):
        edit(path, line(program=PROGRAM | {"num_microbatches": 100_000}))
    with pytest.raises(ValueError, match=r"iteration 5 of rank 0 has 10 actions, but its program has 200000"):
        read_run(folder)


def test_folders_without_a_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder: give the one that was the run's --bpipe-report"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no record_\*\.jsonl"):
        read_run(tmp_path)
    write_run(tmp_path, num_stages=4, num_microbatches=4, iterations=())
    with pytest.raises(ValueError, match="no iteration is recorded in it"):
        read_run(tmp_path)


def test_a_rank_that_the_run_does_not_have(folder: Path) -> None:
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"world_size": 3}))
    with pytest.raises(ValueError, match=r"a record of rank 3, but run.json has 3 ranks.*every run its own folder"):
        read_run(folder)


def test_run_json_of_something_else(folder: Path) -> None:
    (folder / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="its format is not bpipe-run"):
        read_run(folder)
    (folder / "run.json").write_text("{")
    with pytest.raises(ValueError, match="not the description of a run"):
        read_run(folder)


def name_runs(folder: Path, names: dict[str, str]) -> None:
    """Write the name of a run into each file."""
    for name, run in names.items():
        path = folder / name
        if name.endswith("l"):
            edit(path, lambda lines, run=run: lines[0].update(run=run))  # type: ignore[misc]
        else:
            path.write_text(json.dumps({**json.loads(path.read_text()), "run": run}))


RECORDS = {f"record_{rank:05d}.jsonl": "cafe" for rank in range(4)}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({**RECORDS, "record_00002.jsonl": "beef"}, "the record of rank 0 is of run cafe, the record of rank 2"),
        ({"record_00002.jsonl": "beef"}, "rank 0 is of an older run, the record of rank 2 is of run beef. The folder"),
        ({**RECORDS, "run.json": "beef"}, "run.json is of run beef, the record of rank 0 is of run cafe. The folder"),
    ],
)
def test_records_of_two_runs_are_not_one(folder: Path, names: dict[str, str], message: str) -> None:
    """Two runs of the same sizes at about the same time could not be told apart."""
    name_runs(folder, names)
    with pytest.raises(ValueError, match=message):
        read_run(folder)


def test_a_summary_that_an_earlier_run_left_is_left_out(folder: Path) -> None:
    """A killed run leaves none, so the peaks of the run before were taken for its own."""
    for rank in range(4):
        (folder / f"rank_{rank:05d}.json").write_text(
            json.dumps({"rank": rank, "peak_bytes": 33, "run": "cafe" if rank else "beef"})
        )
    name_runs(folder, {**RECORDS, "run.json": "cafe"})
    run = read_run(folder)
    assert run.run_peak_bytes == {1: 33, 2: 33, 3: 33}
    assert run.notes == ("left out 1 of the files rank_*.json, which are of another run: a killed rank writes none",)


ROOT = Path(__file__).resolve().parents[3]
# Four stages, eight micro-batches, balanced over shared memory; iterations 2 and 3 of 3. Older than `bpipe.record`.
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
    held_run = read_held(BEFORE)
    assert held_run is not None
    assert [len(rank.marks) for rank in held_run.ranks] == [4, 4, 3, 2]
    assert held_run.ranks[0].besides_bytes == 249088 + 249088 + 498176
    assert held_run.ranks[0].marks[1].microbatches == ((0, 0, 1017856), (0, 1, 1017856))


def test_what_is_held_between_halves_and_of_shards_is_written_and_read(tmp_path: Path) -> None:
    (rank, *_) = read_run(BEFORE).ranks
    (iteration, *_) = rank.iterations.values()
    split = replace(iteration, after_input_bytes={0: 1_100_000}, shard_bytes=50_688)
    header = form.RankHeader(**{key.name: getattr(rank, key.name) for key in keys_of(form.RankHeader)})
    write_whole(tmp_path / form.RUN, read_run(BEFORE).info)
    append(form.RECORD.path(tmp_path, 0), header, split)
    assert read_run(tmp_path).ranks[0].iterations[iteration.iteration] == split


def test_the_first_failure_is_written_and_read(tmp_path: Path) -> None:
    first = form.FirstFailure(rank=2, cause="OutOfMemoryError: no memory left")
    write_whole(tmp_path / form.FAILURE, first)
    (tmp_path / "memory_00000.jsonl").write_text((BEFORE / "memory_00000.jsonl").read_text())
    run = read_held(tmp_path)
    assert run is not None
    assert run.failure == first
    (tmp_path / form.FAILURE).write_text('{"rank": "two", "cause": "?"}')
    with pytest.raises(ValueError, match=r"failure\.json: not the failure of a run \(rank is 'two'"):
        read_held(tmp_path)


@pytest.mark.parametrize("number", [0.1, -0.0, 5e-324, None])
def test_a_loss_keeps_every_bit(tmp_path: Path, number: float | None) -> None:
    step = form.TrainingStep(iteration=1, numbers={"lm loss": number, "grad_norm": 1.5}, skipped=0, elapsed_s=0.5)
    append(tmp_path / form.STEPS, step)
    (step_read,) = read_steps(tmp_path / form.STEPS, [])
    assert repr(step_read) == repr(step)


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
    """From the record alone, which holds the schedule itself if that is no family's."""
    text = json.dumps(write_program(program))
    program_read = read_program(json.loads(text))
    assert program_read == program
    assert build(program_read) == build(program)


def test_an_exchange_that_there_is_not_is_refused() -> None:
    keys = write_program(PROGRAMS[0]) | {"exchange": "pigeon"}
    with pytest.raises(ValueError, match=r"exchange: 'pigeon' is none of megatron-1f1b, megatron-interleaved"):
        read_program(keys)
