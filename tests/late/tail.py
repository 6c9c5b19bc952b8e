"""Run draw after draw over every case of whole pipelines, for as long as there is time, and say of each what came out.

In: seconds, words of which one is to be in a case's name (by default any), and the file that keeps what came out. Out:
a table: of each case how many directed orders and seeds were run, and how many were wrong, hung or failed.
`python -m tests.late.tail SECONDS [WORD ...] [--counts FILE] [--seeds N]` runs for a night. The status is 1 where a run
was not right.

Each result is written as soon as it is there, and what a file has is not run again: give new code a new file. Runs are in
a fork, many to each, so one that hangs or ends its process costs no other. `tests.late.hosts` says which hang.
"""

import argparse
import gc
import json
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from tests.late import devices
from tests.late.cases import SCHEDULES
from tests.late.devices import DIRECTED, Draw, draws
from tests.late.hosts import SAMPLE_S, Hangs, Watch
from tests.late.pipeline import KINDS, LatePipeline, wrong_bits
from tests.late.pipelined import LISTED, TorchPipeline, kinds_of
from tests.late.sharded import SHARDED, ShardedPipeline

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 200
ITERATIONS = 3
RIGHT, WRONG, HUNG, FAILED = OUTCOMES = "right", "wrong", "hung", "failed"
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

    return {
        f"{name}, {kind}{DIFFERING * differing}": made(name, kind, differing)
        for name in (*SCHEDULES, *SHARDED)
        for differing in (False, True)
        if not (differing and name in ALIKE)
        for kind in (KINDS if name not in OWN else ("host",))
    } | {f"{name}, {kind}": under_torch(name, kind) for name in LISTED for kind in kinds_of(name)}


def outcome(pipeline: LatePipeline, draw: Draw) -> tuple[str, str]:
    """Return what came out, and what is to be said of it."""
    try:
        wrong = wrong_bits(pipeline, draw, ITERATIONS)
    except Hangs:
        raise
    except Exception as error:
        text = str(error)
        return (HUNG if "nobody can go on" in text else FAILED), text
    if wrong:
        return WRONG, f"rank and stage: {wrong}"
    return (FAILED, "no sizes differed") if pipeline.differing and not differed(pipeline) else (RIGHT, "")


def differed(pipeline: LatePipeline) -> bool:
    """Whether of some stage micro-batches of differing size moved."""
    moved = defaultdict(set)
    for rank in pipeline.ranks:
        assert rank.engine is not None
        for (stage, _), nbytes in (rank.engine.sizing.moved_each if rank.engine.sizing else {}).items():
            moved[stage].add(nbytes)
    return any(len(sizes - {0}) > 1 for sizes in moved.values())


class Tail:
    """Results on disk, a line each, and what is still to be run."""

    def __init__(self, counts: Path, seeds: int, made: dict[str, Made]) -> None:
        self._counts, self._made, self._draws = counts, made, draws(seeds)
        counts.parent.mkdir(parents=True, exist_ok=True)
        self.found: dict[Task, str] = {}
        self.read()

    def read(self) -> None:
        for line in self._counts.read_text().splitlines() if self._counts.exists() else ():
            # Whoever wrote the last line may have been ended in the middle.
            if line.endswith("}"):
                result = json.loads(line)
                self.found[result["case"], result["draw"]] = result["outcome"]

    def write(self, task: Task, came_out: str, said: str = "") -> None:
        result = {"case": task[0], "draw": task[1], "outcome": came_out, "how": str(self._draws[task[1]]), "said": said}
        with self._counts.open("a") as file:
            file.write(json.dumps(result) + "\n")

    def pending(self, names: Sequence[str]) -> Iterator[Task]:
        """Yield what has not been run: all cases come to the same number of draws."""
        for number in range(len(self._draws)):
            for name in names:
                if (name, number) not in self.found:
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
            self.read()
            if why:
                self.write(next(self.pending(names)), why.partition(":")[0], why)
                self.read()

    def _work(self, tasks: Sequence[Task], end_s: float, parent: int) -> None:
        """Run tasks one after the other, in a fork, while its parent lives."""
        for name, number in tasks:
            if time.monotonic() > end_s or os.getppid() != parent:
                return
            try:
                self.write((name, number), *outcome(self._made[name](), self._draws[number]))
            except Hangs as error:
                # Its threads are still there.
                self.write((name, number), HUNG, str(error))
                return

    def _wait(self, child: int) -> str:
        """Return why a fork came to no end of its own, or nothing. One that holds Python's lock cannot say."""
        watch = Watch(child)
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return f"{FAILED}: its process ended with {code}" if code else ""
            self.read()
            if why := watch.hangs(len(self.found)):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return f"{HUNG}: {why}"
            time.sleep(SAMPLE_S)

    def table(self, names: Sequence[str]) -> Iterator[str]:
        """Yield a line a case."""
        by_case: dict[str, Counter[str]] = defaultdict(Counter)
        for (name, number), came_out in self.found.items():
            by_case[name]["directed" if number < len(DIRECTED) else "seeds"] += 1
            by_case[name][came_out] += 1
        columns = ("directed", "seeds", *OUTCOMES)
        width = max(map(len, names))
        yield f"{'case':{width}} " + " ".join(f"{column:>8}" for column in columns)
        for name in names:
            yield f"{name:{width}} " + " ".join(f"{by_case[name][column]:>8}" for column in columns)

    def bad(self, names: Sequence[str]) -> int:
        return sum(came_out != RIGHT for (name, _), came_out in self.found.items() if name in names)


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
    tail = Tail(given.counts, given.seeds, made)
    tail.run(names, time.monotonic() + given.seconds)
    print("\n".join(tail.table(names)))
    return int(tail.bad(names) > 0)


if __name__ == "__main__":
    sys.exit(main())
