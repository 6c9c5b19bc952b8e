"""Start real processes, give them cases, and take back what they wrote, within a time-out and leaving nothing behind.

The processes are started directly and not by torchrun: its agent kills the other ranks as soon as one fails, and
whether they would have ended by themselves is one of the things to test.
"""

from __future__ import annotations

import json
import os
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

from tests.gloo.ports import free_ports
from tests.gloo.warm import Parents, Rank

ROOT = Path(__file__).resolve().parents[2]

# A GPT small enough that a run is over in seconds, large enough that its activations are worth moving; dropout stays
# on.
TINY = (
    *("--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64", "--max-position-embeddings", "64"),
    *("--micro-batch-size", "2", "--lr", "3e-3", "--min-lr", "3e-4", "--lr-decay-style", "cosine"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--split", "949,50,1"),
    *("--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "1"),
)
ITERATIONS = ("--train-iters", "3")
# What stands in for an extension there has to come before Megatron is imported.
COLD_WORKERS = ("fused_worker.py", "named_fused_worker.py")
# The distributed optimizer keeps its model, and with it every process group: gloo has threads for each that look for
# news every 10 ms. By two dozen such cases in one process eight ranks had ten thousand of them, and came to nothing
# else.
MOST_IN_A_ROW = 8
BPIPE = ("--bpipe", "--bpipe-min-bytes", "1024", "--bpipe-poison", "--bpipe-timeout", "60")


@dataclass(frozen=True)
class Case:
    """One training run. `arguments` come after those of the tiny model, so they win."""

    name: str
    arguments: Sequence[str] = ()


@dataclass
class Outcome:
    """What the processes of one launch left: exit codes, logs, and each case's record per rank."""

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
        """The per-stage reports of a case that was run with `--bpipe-report`, by rank."""
        return [json.loads(path.read_text()) for path in sorted((self.folder / case).glob("rank_*.json"))]

    def report_folder(self, case: str) -> str:
        return str(self.folder / case)


# Files whose tests take longest: begun last, one of them would keep a single worker busy while the others have nothing
# left. Given to whoever runs files whole (scripts/test.sh).
LONGEST_FIRST = (
    *("slices", "differing", "slices_in_bytes", "parallelism", "transfers", "budgets", "vocabulary", "training"),
    *("pipelined", "faults", "combined", "pipelined_features", "launch", "pools", "schedules", "halves", "examples"),
)


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
    """One process a rank, each in a session of its own, logging to `<folder>/rank<r>.log`.

    `cold`: so many of the first import for themselves, as every user's does, and all where COLD_RANKS is set. The others
    come from `parents`.
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
            # What the caller puts before the installed packages stays: another Megatron, or packages in a folder of
            # their own.
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
    """Wait for all, or for rank `only`; kill what is still there then or after the time-out (its exit code is None)."""
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


def train(world: int, cases: Sequence[Case], folder: Path, timeout_s: float, worker: str = "worker.py") -> Outcome:
    """Run all cases on `world` ranks, one pipeline of as many stages unless a case says otherwise."""
    stages = ("--num-layers", str(world), "--pipeline-model-parallel-size", str(world))
    described = []
    for case in cases:
        length = () if "--train-samples" in case.arguments else ITERATIONS
        described.append({"name": case.name, "arguments": [*TINY, *length, *stages, *case.arguments]})
    begin = time.monotonic()
    done = Outcome(folder, [0] * world, 0.0, [""] * world)
    for some in batched(described, MOST_IN_A_ROW):
        (folder / "cases.json").write_text(json.dumps(some))
        script = [str(ROOT / "tests/gloo" / worker), str(folder / "cases.json"), str(folder)]
        # Each case chooses a port of its own.
        processes = start(world, script, folder, free_ports(1)[0], cold=world if worker in COLD_WORKERS else 0)
        done = followed(done, finish(processes, folder, begin + timeout_s - time.monotonic()))
        if done.codes != [0] * world:
            break
    return done


def followed(first: Outcome, then: Outcome) -> Outcome:
    """What two launches in one folder came to, of which the first ended well."""
    logs = [before + after for before, after in zip(first.logs, then.logs, strict=True)]
    return Outcome(first.folder, then.codes, first.seconds + then.seconds, logs)


@pytest.fixture(scope="session")
def run_cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """`run_cases(world, cases, timeout_s, worker)`; a case's `{folder}` stands for the launch's folder."""

    def run(world: int, cases: Sequence[Case], timeout_s: float = 240.0, worker: str = "worker.py") -> Outcome:
        folder = tmp_path_factory.mktemp(f"gloo{world}")
        placed = [Case(case.name, [argument.format(folder=folder) for argument in case.arguments]) for case in cases]
        return train(world, placed, folder, timeout_s, worker)

    return run


def slow_but(always: Collection[str], names: Iterable[str]) -> list[Any]:
    """Return names as parameters, of which all but some run only with --slow."""
    assert set(always) <= (known := set(names)), f"no case is called {', '.join(set(always) - known)}"
    return [name if name in always else pytest.param(name, marks=pytest.mark.slow) for name in names]


def asked_for(request: pytest.FixtureRequest, *parameters: str) -> set[tuple[Any, ...]]:
    """The values of these parameters in the tests that pytest is about to run with this fixture: nothing else need
    be trained."""
    tests: list[Any] = [
        item for item in request.session.items if request.fixturename in getattr(item, "fixturenames", ())
    ]
    given = [test.callspec.params for test in tests if test.module is request.module and hasattr(test, "callspec")]
    return {tuple(values[name] for name in parameters) for values in given if values.keys() >= set(parameters)}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No shared memory may outlive a test."""
    before = set(os.listdir("/dev/shm"))
    yield
    left = set(os.listdir("/dev/shm")) - before
    assert not left, f"left in /dev/shm: {sorted(left)}"
