#!/usr/bin/env python
"""Give every reader of `bpipe` damaged files, and see that each is refused in one message or rightly taken.

In: --count, --seed, --reader. Out: a line a reader; the inputs that failed are kept, status 1. A reader fails where it
ends in a traceback, hangs, refuses without naming the file, or takes what it must not: a schedule that cannot be walked
slot by slot or is not what the file says, messages that do not arrive, a record with a value that no run can have, a
launch that bash does not run: scripts for that are drawn, not damaged, since they are run. The judges are slow, and
share no code with the readers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bpipe.build import build
from bpipe.formats.document import write_json
from bpipe.formats.grid import write_grid
from bpipe.formats.messages import write_runtime
from bpipe.formats.text import write_csv
from tests.unit.plan.bash_scripts import Script
from tests.unit.formats.test_messages import TORCH
from validation.fuzz import given, records, runs
from validation.fuzz.damage import damaged_json, damaged_text
from validation.fuzz.reader import Reader, Wrong
from validation.fuzz.schedules import PLAIN, balanced_texts, judge_schedule

# A case takes milliseconds.
LIMIT_S = 30


class Hung(BaseException):
    """No reader may catch it."""


def _hang(*_: object) -> None:
    raise Hung


READERS = {
    "csv": Reader(balanced_texts(write_csv), damaged_text, judge_schedule),
    "runtime": Reader(lambda _: [TORCH, *(write_runtime(build(one)) for one in PLAIN)], damaged_text, judge_schedule),
    "grid": Reader(balanced_texts(write_grid), damaged_text, judge_schedule),
    "json": Reader(balanced_texts(write_json), damaged_json, judge_schedule),
    "record": Reader(records.texts, records.damaged, records.judge),
    "iterations": Reader(runs.report_texts, damaged_json, runs.judge_report),
    "log": Reader(runs.log_texts, damaged_text, runs.judge_log),
    "profile": Reader(given.profile_texts, damaged_json, given.judge_profile),
    "config": Reader(given.config_texts, damaged_json, given.judge_config),
    "cluster": Reader(lambda _: [json.dumps(given.CLUSTER), given.TOML], given.damaged_cluster, given.judge_cluster),
    "calibration": Reader(lambda _: [json.dumps(given.CALIBRATION)], damaged_json, given.judge_calibration),
    "kernel-times": Reader(lambda _: [json.dumps(given.KERNEL_TIMES)], damaged_json, given.judge_kernel_times),
    "trained": Reader(lambda _: [given.TRAINED], damaged_text, given.judge_trained),
    "script": Reader(lambda _: [given.SCRIPT], damaged_text, given.judge_script),
    "drawn": Reader(
        lambda _: [given.DRAWN], lambda _, rng: Script(rng, rng.choice((0.02, 0.2))).draw(), given.judge_drawn
    ),
    "launch": Reader(lambda _: [given.LAUNCH], damaged_text, given.judge_launch),
}


def fuzz(name: str, count: int, seed: int, kept: Path, limit_s: int | None = None) -> Counter[str]:
    """Return how many damaged inputs were accepted, refused, failed; those that failed are kept.

    `limit_s` is for one, by SIGALRM.
    """
    rng = random.Random(f"{name} {seed}")
    reader, found = READERS[name], Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "input"
        if name == "record":
            path.mkdir()
        texts = reader.texts(path)
        for number in range(count):
            text = reader.damage(rng.choice(texts), rng)
            try:
                with _limited(limit_s):
                    found["accepted" if reader.judge(path, text, rng) else "refused"] += 1
            except (Exception, Hung) as error:
                found["failed"] += 1
                file = kept / f"{name}_{seed}_{number}"
                kept.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8", errors="surrogatepass")
                reason = "".join(traceback.format_exception(error)[-3:]) if not isinstance(error, Wrong | Hung) else ""
                print(f"{file}: {type(error).__name__}: {error}\n{reason}", file=sys.stderr)
    return found


@contextlib.contextmanager
def _limited(limit_s: int | None) -> Iterator[None]:
    if limit_s is None:
        yield
        return
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=2000, help="damaged inputs for each reader (default 2000)")
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(10**6),
        help="what is damaged how (default: another each time)",
    )
    parser.add_argument("--reader", nargs="+", choices=tuple(READERS), default=tuple(READERS), help="only these")
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path(tempfile.gettempdir()) / "bpipe_fuzz",
        help="where inputs that failed are kept",
    )
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, _hang)
    print(f"seed {options.seed}", flush=True)
    failed = 0
    for name in options.reader:
        found = fuzz(name, options.count, options.seed, options.keep, LIMIT_S)
        failed += found["failed"]
        print(
            f"{name:11} {options.count} inputs: {found['accepted']} accepted, {found['refused']} refused, "
            f"{found['failed']} failed",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
