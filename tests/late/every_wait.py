"""Take every wait of the runtime out, one at a time, where late devices run it.

In: the table of `tests.late.mutations`, whose lines are all waits of the code. Out: by wait, the first case
that noticed, or none. As a program: `python -m tests.late.every_wait FILE [WORD]` writes that, of the waits whose name
contains the word. Each is taken out in a process of its own, from a copy of its module in memory.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.late.mutations import TABLE, Mutated, Mutation

if TYPE_CHECKING:
    from tests.late.devices import Draw

# What runs on late devices: no thread copies there (`lanes`).
MODULES = (
    *("evictor", "acceptor", "engine", "streams", "executor", "one_sided", "control", "distributed", "edges"),
    *("collectives", "shards"),
)


# A hand-over of memory: the line does not read as a wait. What a layer's own streams use is noticed in
# test_stand_ins.py.
FURTHER = (Mutation("bpipe/runtime/shards.py", "used_here(gathered, *early)", "pass"),)
# Waits that a device orders anyway, with what they are for and who notices elsewhere.
ORDERED_ANYWAY = {
    (
        "engine",
        "self._partners.finish_evictions()",
        1,
    ): "memory, not bits: a load in a bubble takes what an eviction frees; test_engine.py",
    (
        "evictor",
        'self._wait(announcement, forward, "telling its sizes")',
        0,
    ): "the partner has heard of all sizes before its last HOST; gloo wants a message kept until it is sent; test_engine.py",
    (
        "one_sided",
        "pending.wait()",
        0,
    ): "threads that copy on a CPU: a device is idle when its memory is closed; test_one_sided.py",
    **dict.fromkeys(
        (
            ("evictor", "self.finish_evictions()", 0),
            ("evictor", "self._finish(activations, ActivationsState.HERE)", 0),
            ("engine", "self._partners.finish_all()", 0),
        ),
        "--bpipe-sync-transfers: what is waited for at once would be waited for where it is needed; test_engine.py",
    ),
}


@dataclass(frozen=True)
class Case:
    """A schedule of `tests.late.cases` or `tests.late.sharded`, and how it runs."""

    schedule: str
    kind: str
    differing: bool = False

    def __str__(self) -> str:
        return f"{self.schedule}, {self.kind}{', sizes that differ' * self.differing}"


# Nothing says that what was sent last has been taken but the wait for it, and here that is a sort's first.
ALONE = "1f1b of one micro-batch"
CASES = (
    Case("1f1b of 6", "two-sided"),
    Case("1f1b of 6", "peer"),
    Case("1f1b of 8", "host"),
    Case("1f1b of 6", "two-sided", differing=True),
    Case("pool", "two-sided"),
    Case("own memory", "host"),
    Case("behind devices", "peer"),
    Case("bidirectional", "two-sided"),
    Case("split", "two-sided"),
    Case("pool", "two-sided", differing=True),
    Case(ALONE, "two-sided"),
    Case("vocabulary 1", "two-sided"),
    Case("vocabulary 2", "two-sided"),
)
# By module, a word of the cases that come to it alone: these are looked at first.
NEAREST = {
    "edges": ALONE,
    "collectives": "vocabulary",
    "shards": "vocabulary",
    "streams": "vocabulary 2",
    "one_sided": "lender",
}


def late_waits() -> Iterator[Mutation]:
    """Each once, though several tests of the table notice some."""
    seen = set()
    for mutation in (*TABLE, *FURTHER):
        wait = mutation.file, mutation.line, mutation.nth
        module = Path(mutation.file).stem
        known = (module, mutation.line, mutation.nth) in ORDERED_ANYWAY
        if module in MODULES and wait not in seen and not known:
            seen.add(wait)
            yield mutation


def noticed_by(nearest: str) -> str:
    """In this process, with whatever was taken out: the first path and draw that notices it, by wrong bits or an
    error. `nearest`: a word of the paths that are tried first."""
    from tests.late.devices import DIRECTED, DRAWN, Draw
    from tests.late.lending import fails_to_lend
    from tests.late.test_streams import lane_is_wrong

    draws = (*reversed(DIRECTED[:5]), *(Draw(seed, DRAWN) for seed in range(2)))
    paths: dict[str, Callable[[Draw], str]] = {str(case): functools.partial(wrong_in, case) for case in CASES}
    paths["a lender that fails"] = fails_to_lend
    paths["a lane"] = lambda draw: "wrong" if lane_is_wrong(draw) else ""
    for name in sorted(paths, key=lambda name: nearest not in name):
        for draw in draws:
            if found := paths[name](draw):
                return f"{name}: {draw}: {found}"
    return ""


def wrong_in(case: Case, draw: Draw) -> str:
    """What is not as it has to be."""
    import torch

    from tests.late.cases import SCHEDULES, balanced
    from tests.late.pipeline import LatePipeline
    from tests.late.sharded import SHARDED, ShardedPipeline

    if case.schedule in SHARDED:
        pipeline: LatePipeline = ShardedPipeline(SHARDED[case.schedule](), case.kind)
    else:
        schedule = balanced("1f1b", 4, 1) if case.schedule == ALONE else SCHEDULES[case.schedule]()
        pipeline = LatePipeline(schedule, case.kind, differing=case.differing)
    try:
        found = pipeline.run(draw, 3)
    except Exception as error:
        return str(error).splitlines()[0]
    expected = pipeline.model.expected(pipeline.schedule, 3)
    return "wrong bits" if any(not torch.equal(found[place], expected[place]) for place in expected) else ""


def without(mutation: Mutation | None) -> str:
    """What noticed, in a fork of this process."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        if mutation is not None:
            sys.meta_path.insert(0, Mutated(mutation))
        module = "" if mutation is None else Path(mutation.file).stem
        os.write(writes, noticed_by(NEAREST.get(module, "")).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return said if code == 0 else f"ended with {code}"


def main() -> None:
    import torch

    from tests.late import devices

    torch.set_num_threads(1)
    devices.extension()
    loaded = {
        mutation.file.removesuffix(".py").replace("/", ".") for mutation in (*TABLE, *FURTHER)
    } & sys.modules.keys()
    assert not loaded, f"{loaded} could not be replaced"
    word = sys.argv[2] if len(sys.argv) > 2 else ""
    found = {"": without(None)} if not word else {}
    for mutation in late_waits():
        if word in mutation.name:
            name = f"{mutation.file}: {mutation.line} ({mutation.nth + 1})"
            found[name] = without(mutation)
            print(f"{name}\n    {found[name] or 'NOBODY'}", flush=True)
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
