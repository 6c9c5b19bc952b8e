"""Run draw after draw over every case of whole pipelines, for as long as there is time, and say of each what came out.

In: seconds, words of which one is to be in a case's name (by default any), and the file that keeps what came out. Out:
a table: of each case how many directed orders and seeds were run, and how many were wrong, hung or failed.
`python -m tests.late.tail SECONDS [WORD ...] [--counts FILE] [--seeds N]`. The status is 1 where a run was not right.

Each result is written as soon as it is there. Whoever is interrupted goes on where the file ends: it counts what the
same code has run before. Runs are in a fork, many to each, so one that hangs or ends its process costs no other. Which
hang, `tests.late.watching` says, by what they do.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import torch

from tests.late import devices
from tests.late.cases import SCHEDULES
from tests.late.devices import DIRECTED, Draw, draws
from tests.late.hosts import Hangs
from tests.late.pipeline import KINDS, LatePipeline
from tests.late.pipelined import LISTED, TorchPipeline, kinds_of
from tests.late.sharded import SHARDED, ShardedPipeline
from tests.late.watching import SAMPLE_S, Watch

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 200
ITERATIONS = 3
RIGHT, WRONG, HUNG, FAILED = OUTCOMES = "right", "wrong", "hung", "failed"
# What a transfer engine is for. The rest comes behind it.
FIRST = (
    "1f1b",
    "interleaved",
    "grouped",
    "split",
    "v-half",
    "bidirectional",
    "pool",
    "own memory",
    "behind devices",
    "vocabulary 1",
    "vocabulary 2",
)
DIFFERING = ", sizes that differ"
# Whose activations all stay in the rank's own node, whatever carries them between ranks: one kind runs all that differs.
OWN = ("own memory", "slices in own memory")
# Whose sizes cannot differ: only first slices leave there, and these attend to equally many keys.
ALIKE = ("slices",)
Made = Callable[[], LatePipeline]
# A case's name and a draw's number.
Task = tuple[str, int]


def cases() -> dict[str, Made]:
    """Return what makes each case."""

    def made(name: str, kind: str, differing: bool) -> Made:
        if name in SHARDED:
            return lambda: ShardedPipeline(SHARDED[name](), kind, differing=differing)
        return lambda: LatePipeline(SCHEDULES[name](), kind, differing=differing)

    def under_torch(name: str, kind: str) -> Made:
        return lambda: TorchPipeline(LISTED[name](), kind)

    found = {
        f"{name}, {kind}{DIFFERING * differing}": made(name, kind, differing)
        for name in (*SCHEDULES, *SHARDED)
        for differing in (False, True)
        if not (differing and name in ALIKE)
        for kind in (KINDS if name not in OWN else ("host",))
    } | {f"{name}, {kind}": under_torch(name, kind) for name in LISTED for kind in kinds_of(name)}
    return dict(sorted(found.items(), key=lambda each: turn_of(each[0])))


def turn_of(name: str) -> int:
    """Return when a case has its turn: all draws of those before it come first."""
    path = name.removesuffix(DIFFERING).rpartition(", ")[0]
    return 2 if path not in FIRST else int(name.endswith(DIFFERING))


def outcome(pipeline: LatePipeline, draw: Draw) -> tuple[str, str]:
    """Return what came out, and what is to be said of it."""
    try:
        found = pipeline.run(draw, ITERATIONS)
    except Hangs:
        raise
    except Exception as error:
        text = str(error)
        return (HUNG if "nobody can go on" in text else FAILED), text
    expected = pipeline.model.expected(pipeline.schedule, ITERATIONS)
    wrong = [place for place in expected if place not in found or not torch.equal(found[place], expected[place])]
    if wrong:
        return WRONG, f"rank and stage: {wrong}"
    return (FAILED, "no sizes differed") if pipeline.differing and not differed(pipeline) else (RIGHT, "")


def differed(pipeline: LatePipeline) -> bool:
    """Return whether of some stage micro-batches of differing size moved."""
    moved = defaultdict(set)
    for rank in pipeline.ranks:
        assert rank.engine is not None
        for (stage, _), nbytes in (rank.engine.sizing.moved_each if rank.engine.sizing else {}).items():
            moved[stage].add(nbytes)
    return any(len(sizes - {0}) > 1 for sizes in moved.values())


def code_of_this_process() -> str:
    """Return a name for all of this project's code that is loaded here."""
    files = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
    own = sorted(Path(file) for file in files if file and Path(file).is_relative_to(ROOT) and ".venv" not in file)
    own += sorted((ROOT / "tests/late/csrc").iterdir())
    digest = hashlib.sha256()
    for path in own:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class Counts:
    """Results on disk, a line each."""

    def __init__(self, path: Path, code: str) -> None:
        self._path, self._code = path, code
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            # Whoever wrote this was ended in the middle of a line.
            with path.open("a") as file:
                file.write("\n")
        self.found: dict[Task, str] = {}
        self._read = 0
        self.read()

    def read(self) -> None:
        """Take in what has been written since."""
        if not self._path.exists():
            return
        with self._path.open() as lines:
            lines.seek(self._read)
            for line in lines:
                if not line.endswith("\n"):
                    break
                self._read += len(line.encode())
                try:
                    one = json.loads(line)
                except ValueError:
                    continue
                if one["code"] == self._code:
                    self.found[one["case"], one["draw"]] = one["outcome"]

    def writer(self) -> TextIO:
        return self._path.open("a")

    def line(self, task: Task, came_out: str, said: str, draw: Draw, seconds: float) -> str:
        told = {"how": str(draw), "seconds": round(seconds, 3)} | ({"said": said} if said else {})
        return json.dumps({"case": task[0], "draw": task[1], "outcome": came_out, "code": self._code, **told}) + "\n"


class Tail:
    def __init__(self, counts: Counts, seeds: int, made: dict[str, Made]) -> None:
        self._counts, self._made, self._draws = counts, made, draws(seeds)

    def pending(self, names: Sequence[str]) -> Iterator[Task]:
        """Yield what has not been run: all cases come to the same number of draws."""
        for number in range(len(self._draws)):
            for name in names:
                if (name, number) not in self._counts.found:
                    yield name, number

    def run(self, names: Sequence[str], end_s: float) -> None:
        """Run until all is done, or until then."""
        while (tasks := [*self.pending(names)]) and time.monotonic() < end_s:
            parent, child = os.getpid(), os.fork()
            if child == 0:
                # What runs print is of no use to anybody.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                self._work(tasks, end_s, parent)
                os._exit(0)
            why = self._wait(child)
            self._counts.read()
            if why:
                task = next(self.pending(names))
                with self._counts.writer() as file:
                    file.write(self._counts.line(task, why.partition(":")[0], why, self._draws[task[1]], 0.0))
                self._counts.read()

    def _work(self, tasks: Sequence[Task], end_s: float, parent: int) -> None:
        """Run tasks one after the other, in a fork, while its parent lives."""
        with self._counts.writer() as file:
            for name, number in tasks:
                if (begun := time.monotonic()) > end_s or os.getppid() != parent:
                    return
                draw, goes_on = self._draws[number], True
                try:
                    came_out, said = outcome(self._made[name](), draw)
                except Hangs as error:
                    came_out, said, goes_on = HUNG, str(error), False
                file.write(self._counts.line((name, number), came_out, said, draw, time.monotonic() - begun))
                file.flush()
                if not goes_on:
                    # Its threads are still there.
                    return

    def _wait(self, child: int) -> str:
        """Return why a fork came to no end of its own, or nothing. One that holds Python's lock cannot say."""
        watch = Watch(child)
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return f"{FAILED}: its process ended with {code}" if code else ""
            self._counts.read()
            if why := watch.hangs(len(self._counts.found)):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return f"{HUNG}: {why}"
            time.sleep(SAMPLE_S)

    def table(self, names: Sequence[str]) -> Iterator[str]:
        """Yield a line a case."""
        by_case: dict[str, Counter[str]] = defaultdict(Counter)
        for (name, number), came_out in self._counts.found.items():
            by_case[name]["directed" if number < len(DIRECTED) else "seeds"] += 1
            by_case[name][came_out] += 1
        columns = ("directed", "seeds", *OUTCOMES)
        width = max(map(len, names))
        yield f"{'case':{width}} " + " ".join(f"{column:>8}" for column in columns)
        for name in names:
            yield f"{name:{width}} " + " ".join(f"{by_case[name][column]:>8}" for column in columns)

    def bad(self, names: Sequence[str]) -> int:
        return sum(came_out != RIGHT for (name, _), came_out in self._counts.found.items() if name in names)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--counts", type=Path, default=ROOT / "runs/late/tail.jsonl")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    devices.extension()
    # What is here now is no garbage: forks need not look through it.
    gc.freeze()
    made = cases()
    names = [name for name in made if not given.words or any(word in name for word in given.words)]
    if not names:
        parser.error(f"no case has one of {', '.join(given.words)} in its name")
    tail = Tail(Counts(given.counts, code_of_this_process()), given.seeds, made)
    end_s = time.monotonic() + given.seconds
    for turn in sorted({turn_of(name) for name in names}):
        tail.run([name for name in names if turn_of(name) == turn], end_s)
    print("\n".join(tail.table(names)))
    return int(tail.bad(names) > 0)


if __name__ == "__main__":
    sys.exit(main())
