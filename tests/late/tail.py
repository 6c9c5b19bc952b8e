"""Run draw after draw over every case of whole pipelines, for as long as there is time, and say of each what came out.

In: seconds, and words of which one is to be in a case's name, by default any. Out: a line a case: draws, wrong, hung.
`python -m tests.late.tail SECONDS [WORD ...]`; all cases come to the same number of draws, directed orders first. The
status is 1 where a run was not right.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

import torch

from tests.late import devices
from tests.late.cases import SCHEDULES
from tests.late.devices import Draw, draws
from tests.late.pipeline import KINDS, LatePipeline
from tests.late.sharded import SHARDED, ShardedPipeline

SEEDS = 200


def pipelines(draw: Draw) -> dict[str, LatePipeline]:
    """Return every case by name. By its seed a draw has micro-batches of differing sizes."""
    differing = draw.seed % 2 == 1
    return {
        f"{name}, {kind}": LatePipeline(schedule(), kind, differing=differing)
        for name, schedule in SCHEDULES.items()
        for kind in KINDS
    } | {f"{name}, {kind}": ShardedPipeline(schedule(), kind) for name, schedule in SHARDED.items() for kind in KINDS}


def outcome(pipeline: LatePipeline, draw: Draw) -> str:
    try:
        found = pipeline.run(draw)
    except RuntimeError as error:
        return "hung" if "nobody can go on" in str(error) else "failed"
    expected = pipeline.model.expected(pipeline.schedule, 2)
    return "right" if all(torch.equal(found[place], expected[place]) for place in expected) else "wrong"


def main(seconds: float, *words: str) -> int:
    torch.set_num_threads(1)
    devices.extension()
    end, counts, bad = time.monotonic() + seconds, Counter[tuple[str, str]](), 0
    names = [name for name in pipelines(Draw(0)) if not words or any(word in name for word in words)]
    for draw in draws(SEEDS):
        made = pipelines(draw)
        for name in names:
            if time.monotonic() > end:
                break
            found = outcome(made[name], draw)
            counts[name, found] += 1
            if found != "right":
                bad += 1
                print(f"{found}: {name}: {draw}", flush=True)
        print(f"{sum(counts.values())} runs, {bad} not right, the last of {draw}", flush=True)
        if time.monotonic() > end:
            break
    for name in names:
        of_case = {found: counts[name, found] for found in ("right", "wrong", "hung", "failed")}
        print(f"{name}: {sum(of_case.values())} draws, {', '.join(f'{n} {found}' for found, n in of_case.items())}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), *sys.argv[2:]))
