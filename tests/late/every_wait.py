"""Take every wait of the runtime out, one at a time, where late devices run it.

In: the table of `tests.unit.runtime.mutations`, whose lines are all waits of the code. Out: by wait, the first case
that noticed, or none. As a program: `python -m tests.late.every_wait FILE [WORD]` writes that, of the waits whose name
contains the word. Each is taken out in a process of its own, from a copy of its module in memory.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.unit.runtime.mutations import TABLE, Mutated, Mutation

# What runs on late devices: no thread copies there (`lanes`), and no collective has been brought there yet.
MODULES = ("evictor", "acceptor", "engine", "streams", "executor", "one_sided", "distributed", "headed", "edges")
# Waits that nothing of a pipeline on late devices comes to, with the reason.
ELSEWHERE = {
    'self._control.send(Subject.MEMORY, {"error": f"{type(error).__name__}: {error}"}).wait()': "a lender that fails",
    "message.wait()": "a message of the control group, which needs no receiver here",
    "sent.wait()": "the same",
    'self._wait(announcement, forward, "telling its sizes")': "the same",
    "self.finish_evictions()": "synchronous transfers",
    "self._finish(activations, ActivationsState.HERE)": "synchronous transfers",
    "self._evictor.finish_all()": "synchronous transfers",
}
# Waits that a device orders anyway, with what they are for and who notices elsewhere.
ORDERED_ANYWAY = {
    (
        "engine",
        "self._evictor.finish_evictions()",
        1,
    ): "memory, not bits: a load in a bubble takes what an eviction frees; test_engine.py",
    (
        "one_sided",
        "pending.wait()",
        0,
    ): "threads that copy on a CPU: a device is idle when its memory is closed; test_one_sided.py",
}


@dataclass(frozen=True)
class Case:
    """A schedule of `tests.late.cases`, and how it runs."""

    schedule: str
    kind: str
    differing: bool = False

    def __str__(self) -> str:
        return f"{self.schedule}, {self.kind}{', sizes that differ' * self.differing}"


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
)


def late_waits() -> Iterator[Mutation]:
    """Each once, though several tests of the table notice some."""
    seen = set()
    for mutation in TABLE:
        wait = mutation.file, mutation.line, mutation.nth
        module = Path(mutation.file).stem
        known = mutation.line in ELSEWHERE or (module, mutation.line, mutation.nth) in ORDERED_ANYWAY
        if module in MODULES and wait not in seen and not known:
            seen.add(wait)
            yield mutation


def noticed_by() -> str:
    """In this process, with whatever was taken out: the first path and draw that notices it, by wrong bits or an
    error."""
    import torch

    from tests.late.cases import SCHEDULES
    from tests.late.devices import DIRECTED, DRAWN, Draw
    from tests.late.pipeline import LatePipeline
    from tests.late.test_streams import lane_is_wrong

    for draw in DIRECTED:
        if lane_is_wrong(draw):
            return f"a lane beside the computation: {draw}"
    for case in CASES:
        for draw in (*reversed(DIRECTED[:5]), *(Draw(seed, DRAWN) for seed in range(2))):
            pipeline = LatePipeline(SCHEDULES[case.schedule](), case.kind, differing=case.differing)
            try:
                found = pipeline.run(draw, 3)
            except Exception as error:
                return f"{case}: {draw}: {str(error).splitlines()[0]}"
            expected = pipeline.model.expected(pipeline.schedule, 3)
            if any(not torch.equal(found[place], expected[place]) for place in expected):
                return f"{case}: {draw}: wrong bits"
    return ""


def without(mutation: Mutation | None) -> str:
    """What noticed, in a fork of this process."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        if mutation is not None:
            sys.meta_path.insert(0, Mutated(mutation))
        os.write(writes, noticed_by().encode())
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
    loaded = {mutation.file.removesuffix(".py").replace("/", ".") for mutation in TABLE} & sys.modules.keys()
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
