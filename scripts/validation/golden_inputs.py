"""Write the files that the compared commands read. In: the sizes of golden_cases. Out: in/ below the folder this runs in.

Runs once, with the code of the first side, so that both sides read the same. A schedule file is what the command wrote; runs are those
that the tests' own writer makes; every damage is seeded.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

# Not the folder of bpipe: which one is asked is said by PYTHONPATH.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from validation.golden_cases import (
    CLUSTERS,
    CONFIG,
    DAMAGED,
    NUM_DAMAGED,
    PROFILES,
    SCRIPT,
    WRITTEN,
    damaged,
    source_flags,
)
from validation.golden_side import call

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm_up": {"warm_up": 5},
    "unbalanced": {"balance": "none"},
    "small": {"num_stages": 4, "num_microbatches": 4, "iterations": (5, 6), "flops": 1e9, "peak_flops": 1e13, "limit_bytes": 2 * 10**9},
    "odd": {"num_stages": 5, "num_microbatches": 9, "cores": 4},
    "single": {"num_stages": 1, "num_microbatches": 4, "balance": "none"},
    "few": {"num_microbatches": 3},
    "chunks": {"schedule": "interleaved-1f1b", "num_stages": 4, "num_microbatches": 8, "num_chunks": 2},
    "chunks_unbalanced": {"schedule": "interleaved-1f1b", "num_stages": 4, "num_microbatches": 8, "num_chunks": 2, "balance": "none"},
    "gpipe": {"schedule": "gpipe", "num_stages": 4, "num_microbatches": 8, "balance": "none"},
    "gloo": {"transport": "gloo"},
    "nccl": {"transport": "nccl", "num_stages": 4, "num_microbatches": 8},
    "synchronous": {"transport": "gloo", "synchronous": True, "num_stages": 4, "num_microbatches": 8},
    "two": {"num_pipelines": 2, "num_stages": 4},
    "two_chunked": {"num_pipelines": 2, "schedule": "interleaved-1f1b", "num_stages": 2, "num_microbatches": 4, "num_chunks": 3},
    "messages": {"message_s": 0.0005, "num_stages": 4},
    "slow_link": {"probe": 4e9, "speed": 0.4e9},
    "no_probe": {"probe": None, "speed": 0.9e9},
    "slow_action": {"slow": {(6, "2F3"): 0.1}},
    "slow_stage": {"seconds": {"3F": 0.5}},
    "noise": {"noise": 0.1, "seed": 3},
    "more_bytes": {"extra_bytes": {5: 30_000_000}},
    "everything": {"warm_up": 5, "probe": 4e9, "speed": 0.4e9, "slow": {(6, "2F3"): 0.1}, "extra_bytes": {5: 30_000_000}, "noise": 0.1},
    "skewed": {"clock_error_s": {0: 0.5}},
    "many": {"iterations": tuple(range(100, 130)), "num_stages": 4, "num_microbatches": 4},
    "kept": {"kept_bytes": 11_500_000, "weights_bytes": None, "received_bytes": 65_536},
}
GIB = 2**30


def _schedules(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, text in WRITTEN.items():
        (folder / name).write_text(text)
    for name, flags in source_flags():
        for suffix, form in (("csv", "csv"), ("json", "json"), ("grid", "grid"), ("runtime", "runtime")):
            path = folder / f"{name}.{suffix}"
            # Torch's form has no transfers: what is balanced cannot be written in it.
            if call([*flags, "--format", form, "--output", str(path)])["status"] != b"0":
                continue
            rng = random.Random(f"{name} {suffix}")
            for number in range(NUM_DAMAGED if name in DAMAGED else 0):
                (folder / f"damaged-{name}-{number:02}.{suffix}").write_text(damaged(path.read_text(), rng))


def _recorder(checkout: Path) -> Any:
    """The module of the tests that writes runs, wherever it lies."""
    found = sorted(checkout.glob("tests/**/recorded.py"))
    if not found:
        sys.exit(f"{checkout} has no tests/**/recorded.py, which writes the runs to report: leave report out with --only")
    sys.path.insert(0, str(checkout))
    return importlib.import_module(".".join(found[0].relative_to(checkout).with_suffix("").parts))


def _runs(folder: Path, checkout: Path) -> None:
    folder.mkdir(parents=True)
    recorded = _recorder(checkout)
    for name, changes in RUNS.items():
        recorded.write_run(folder / name, **changes)
    for name in ("small", "two", "chunks"):
        for number in range(12):
            _damage(Path(shutil.copytree(folder / name, folder / f"damaged-{name}-{number:02}")), random.Random(f"{name} {number}"))
    _held(folder / "held", 80)
    _held(folder / "held_unlimited", None)
    _held(Path(shutil.copytree(folder / "plain", folder / "failed_later")), 70)
    (folder / "failed_later" / "failure.json").write_text(json.dumps({"rank": 0, "cause": "OutOfMemoryError: CUDA out of memory"}))
    for path in Path(shutil.copytree(folder / "small", folder / "with_peaks")).glob("record_*"):
        rank = int(path.stem.removeprefix("record_"))
        (path.parent / f"rank_{rank:05d}.json").write_text(json.dumps({"rank": rank, "peak_bytes": 33_000_000}))
    (folder / "nothing").mkdir()


def _damage(folder: Path, rng: random.Random) -> None:
    """A file less, a torn one, or one number or word changed."""
    path = rng.choice(sorted(folder.iterdir()))
    text = path.read_text()
    way = rng.randrange(5)
    if way == 0:
        path.unlink()
    elif way == 1:
        path.write_text(text[: rng.randrange(len(text))])
    else:
        path.write_text(damaged(text, rng))


def _held(folder: Path, limit_gib: int | None) -> None:
    """Stage 0 of 8 ran out of memory in its eighth forward; stages 6 and 7 had not begun."""
    folder.mkdir(exist_ok=True)
    program = {"schedule": "1f1b", "num_stages": 8, "num_microbatches": 16, "num_chunks": 1, "balance": "none"}
    sizes = {"weights_bytes": 8 * GIB, "gradients_bytes": 8 * GIB, "optimizer_bytes": 4 * GIB, "optimizer_to_come_bytes": 8 * GIB}
    for place in range(6):
        header = {"format": "bpipe-memory", "version": 1, "rank": place, "pipeline": 0, "place": place, "host": "node1", "micro_batch": 2}
        lines: list[dict[str, Any]] = [{**header, "limit_bytes": None if limit_gib is None else limit_gib * GIB, **sizes}]
        for forwards in range(1, 8 - place):
            lines.append(
                {
                    "iteration": 1,
                    "action": f"{place}F{forwards - 1}",
                    "program": program,
                    "microbatches": [[place, number, 6 * GIB] for number in range(forwards)],
                    "saved_bytes": {str(place): 6 * GIB},
                    "logits_bytes": 0,
                    "allocated_bytes": (22 + 6 * forwards) * GIB,
                }
            )
        if place == 0:
            error = {"action": "0F7", "error": "OutOfMemoryError: CUDA out of memory (rank 0)", "out_of_memory": True}
            lines.append({**lines[-1], **error})
        (folder / f"memory_{place:05d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="whose code writes them")
    parser.add_argument("--schedules", action="store_true", help="write schedules to read")
    parser.add_argument("--runs", action="store_true", help="write runs to report")
    options = parser.parse_args()
    folder = Path("in")
    folder.mkdir()
    for name, text in {**PROFILES, **CLUSTERS, "config.json": CONFIG, "run.sh": SCRIPT}.items():
        (folder / name).write_text(text)
    if options.schedules:
        _schedules(folder / "schedules")
    if options.runs:
        _runs(folder / "runs", options.checkout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
