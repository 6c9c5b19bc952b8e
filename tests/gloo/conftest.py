"""Start real processes, give them cases and collect what they wrote, within a time-out and without leftovers.

The processes are not started by torchrun, whose agent kills the other ranks as soon as one fails: tests check whether
they end by themselves.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path
from typing import Any

import pytest

from tests.gloo.flags import ITERATIONS, TINY
from tests.gloo.ports import free_ports
from tests.gloo.warm import Parents, Rank

ROOT = Path(__file__).resolve().parents[2]

# The distributed optimizer keeps its model alive, and with it all process groups, each with gloo threads that poll
# every 10 ms. After two dozen such cases, eight ranks had ten thousand threads and did little else.
MOST_IN_A_ROW = 8


@dataclass(frozen=True)
class Case:
    """One training run. `flags` come after those of the tiny model and override them."""

    name: str
    flags: str = ""


@dataclass
class Outcome:
    """The results of one launch: exit codes, logs, and each case's record per rank."""

    folder: Path
    codes: list[int | None]
    seconds: float
    logs: list[str] = field(default_factory=list)

    def record(self, case: str, rank: int) -> dict[str, Any]:
        path = self.folder / f"{case}.rank{rank}.json"
        if not path.exists():
            pytest.fail(f"{case} did not finish on rank {rank} (exit codes {self.codes}):\n" + self.logs[rank][-3000:])
        return json.loads(path.read_text())

    def reports(self, case: str) -> list[dict[str, Any]]:
        """Return the per-stage reports of a case run with `--bpipe-report`, by rank."""
        return [json.loads(path.read_text()) for path in sorted((self.folder / case).glob("rank_*.json"))]

    def report_folder(self, case: str) -> str:
        return str(self.folder / case)

    def said(self, case: str, rank: int | None = 0) -> str:
        """Return what a rank, or all ranks, printed during a case."""
        logs = self.logs if rank is None else [self.logs[rank]]
        return "".join(log.split(f"=== {case}\n")[1].split("=== ")[0] for log in logs)


@dataclass(frozen=True)
class Row:
    """One of our trainings and stock Megatron's that it must equal, in one launch of `world` ranks.

    Attributes:
        others: Further runs that tests of the row use.
        moves: Whether anything must have moved; None if the report is not compared with the prediction.
        slack_bytes: By how much a rank's peak may differ from the prediction.
    """

    name: str
    stock: Case
    ours: Case
    world: int = 4
    slow: bool = True
    others: tuple[Case, ...] = ()
    moves: bool | None = None
    slack_bytes: int = 0

    def parameter(self, *more: object) -> Any:
        return pytest.param(self, *more, id=self.name, marks=pytest.mark.slow if self.slow else ())


# Files whose tests take longest. If one started last, it would keep a single worker busy while the others are idle.
# scripts/test.sh, which runs files whole, starts them first.
LONGEST_FIRST = (
    "schedules slices differing slices_in_bytes transfers vocabulary training budgets placed pipelined faults "
    "pipelined_features checkpoints combined launch pools examples"
).split()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


PARENTS = Parents()
Process = subprocess.Popen[bytes] | Rank


@pytest.fixture(scope="session", autouse=True)
def parents() -> Iterator[None]:
    yield
    PARENTS.close()


def start(
    world: int,
    script: Sequence[str],
    folder: Path,
    port: int,
    environment: dict[str, str] | None = None,
    cold: int = 0,
    parents: Parents = PARENTS,
) -> Sequence[Process]:
    """Start one process per rank, each in its own session, logging to `<folder>/rank<r>.log`.

    The first `cold` ranks import everything themselves, as a user's process does; with COLD_RANKS set, all do. The others
    are forked from `parents`.
    """
    processes: list[Process] = []
    for rank in range(world):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            # Keep what the caller put before the installed packages, for example another Megatron.
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONUNBUFFERED": "1",
            **(environment or {}),
        }
        path = folder / f"rank{rank}.log"
        if rank >= cold and not os.environ.get("COLD_RANKS"):
            processes.append(parents.start(rank, script, env, folder, path))
            continue
        with path.open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *script],
                    cwd=folder,
                    env=env,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return processes


def finish(processes: Sequence[Process], folder: Path, timeout_s: float, only: int | None = None) -> Outcome:
    """Wait for all ranks, or for rank `only`; then, or after the time-out, kill the rest (their exit code is None)."""
    begin = time.monotonic()
    codes: list[int | None] = []
    try:
        for rank, process in enumerate(processes):
            if only not in (None, rank):
                codes.append(None)
                continue
            try:
                codes.append(process.wait(max(0.1, begin + timeout_s - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    logs = [(folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(len(processes))]
    return Outcome(folder, codes, time.monotonic() - begin, logs)


def train(world: int, cases: Sequence[Case], folder: Path, timeout_s: float, **places: object) -> Outcome:
    """Run all cases on `world` ranks: one pipeline of as many stages, unless a case says otherwise."""
    stages = f"--num-layers {world} --pipeline-model-parallel-size {world}"
    described = []
    for case in cases:
        flags = case.flags.format(folder=folder, case=case.name, **places)
        length = "" if "--train-samples" in flags else ITERATIONS
        described.append({"name": case.name, "arguments": shlex.split(f"{TINY} {length} {stages} {flags}")})
    begin = time.monotonic()
    done = Outcome(folder, [0] * world, 0.0, [""] * world)
    for group in batched(described, MOST_IN_A_ROW):
        (folder / "cases.json").write_text(json.dumps(group))
        script = [str(ROOT / "tests/gloo/worker.py"), str(folder / "cases.json"), str(folder)]
        # Each case chooses a port of its own.
        processes = start(world, script, folder, free_ports(1)[0])
        # A failure ends only the cases of its own processes.
        done = followed(done, finish(processes, folder, begin + timeout_s - time.monotonic()))
    return done


def followed(first: Outcome, then: Outcome) -> Outcome:
    """Join the outcomes of two launches in one folder; a rank's exit code is its first one that is not 0."""
    codes = [code if code != 0 else after for code, after in zip(first.codes, then.codes, strict=True)]
    logs = [before + after for before, after in zip(first.logs, then.logs, strict=True)]
    return Outcome(first.folder, codes, first.seconds + then.seconds, logs)


def forked(module: str, folder: Path, *words: str, timeout_s: float = 170.0) -> list[dict[str, Any]]:
    """Run a module of this folder that forks ranks without Megatron, and return what each rank wrote."""
    command = [sys.executable, "-W", "ignore", "-m", f"tests.gloo.{module}", str(folder), *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank?.json"))]


@pytest.fixture(scope="session")
def run_cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """`run_cases(world, cases, timeout_s, **places)`; `places` fill in further names in braces in the flags."""

    def run(world: int, cases: Sequence[Case], timeout_s: float = 240.0, **places: object) -> Outcome:
        return train(world, cases, tmp_path_factory.mktemp(f"gloo{world}"), timeout_s, **places)

    return run


@pytest.fixture(scope="module")
def places() -> dict[str, object]:
    """Values for names in braces in this file's flags, besides `folder` and `case`."""
    return {}


@pytest.fixture(scope="module")
def trained(
    run_cases: Callable[..., Outcome], request: pytest.FixtureRequest, places: dict[str, object]
) -> Callable[[Row], Outcome]:
    """Return a row's launch. The first row with a given number of ranks trains all selected rows with that number."""
    selected: list[Row] = [row for (row,) in asked_for(request, "row")]
    done: dict[int, Outcome] = {}

    def outcome_of(row: Row) -> Outcome:
        if row.world not in done:
            rows = sorted(
                (candidate for candidate in selected if candidate.world == row.world),
                key=lambda candidate: candidate.stock.name,
            )
            cases = {
                case.name: case for candidate in rows for case in (candidate.stock, *candidate.others, candidate.ours)
            }
            done[row.world] = run_cases(row.world, list(cases.values()), 2400, **places)
        return done[row.world]

    return outcome_of


def slow_but(always: Collection[str], names: Iterable[str]) -> list[Any]:
    """Return names as parameters; all but those in `always` run only with --slow."""
    assert set(always) <= (cases := set(names)), f"no case is called {', '.join(set(always) - cases)}"
    return [name if name in always else pytest.param(name, marks=pytest.mark.slow) for name in names]


def asked_for(request: pytest.FixtureRequest, *parameters: str) -> set[tuple[Any, ...]]:
    """Return these parameters' values in the tests that will run with this fixture, so that only they are trained."""
    tests: list[Any] = [
        item for item in request.session.items if request.fixturename in getattr(item, "fixturenames", ())
    ]
    parameters_of_tests = [
        test.callspec.params for test in tests if test.module is request.module and hasattr(test, "callspec")
    ]
    return {
        tuple(values[name] for name in parameters) for values in parameters_of_tests if values.keys() >= set(parameters)
    }


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Check that no shared memory outlives a test."""
    before = set(os.listdir("/dev/shm"))
    yield
    left = set(os.listdir("/dev/shm")) - before
    assert not left, f"left in /dev/shm: {sorted(left)}"
