"""Schedules: sound ones, and a judge of what was read of damaged ones. In: text. Out: whether it was taken, or Wrong.

The judge reads a file by the simplest reading there can be, walks what was read slot by slot, and shares no code with
the readers.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.families.unit_grid import align
from bpipe.schedule.files.document import read
from bpipe.schedule.schedule import Schedule
from tests.support.oracle import is_sound
from tests.support.readers.outcome import Wrong, outcome
from tests.unit.schedule.check.test_overlap import OVERLAPPED

SMALL = (
    ScheduleConfig("1f1b", 3, 4, balance=BalanceConfig()),
    ScheduleConfig("interleaved-1f1b", 2, 4, num_chunks=2, balance=BalanceConfig()),
    ScheduleConfig("1f1b", 4, 8, num_chunks=1, balance=BalanceConfig()),
)
PLAIN = (
    ScheduleConfig("1f1b", 3, 4),
    ScheduleConfig("gpipe", 2, 3),
    ScheduleConfig("interleaved-1f1b", 2, 4, num_chunks=2),
)


def balanced_texts(writer: Callable[[Schedule], str]) -> Callable[[Path], list[str]]:
    return lambda _: [writer(one) for one in (*map(build, SMALL), *map(build, PLAIN), OVERLAPPED)]


def judge_schedule(path: Path, text: str, rng: random.Random) -> bool:
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.02:
        data = data[: len(data) // 2] + b"\xff" + data[len(data) // 2 :]
    path.write_bytes(data)
    aligned, form = rng.random() < 0.3, rng.choice(["csv", "json", "svg"])
    arguments = ["schedule", "--input", str(path), "--format", form, *["--align"] * aligned]
    printed = outcome([*arguments, *["--balance", "bpipe"] * (rng.random() < 0.2)], path)
    # What cannot be balanced may still be sound as it stands.
    if printed is None and outcome(arguments, path) is None:
        return False
    _judge_read(data.decode("utf-8"), aligned)
    if printed is not None and form != "svg" and not is_sound(read(printed)):
        raise Wrong("an unsound schedule was printed")
    return True


def _judge_read(text: str, aligned: bool) -> None:
    schedule = read(text)
    if text_means(text) != [list(actions_of(row)) for row in schedule.ranks]:
        raise Wrong("what was read is not what the file says")
    if not is_sound(align(schedule) if aligned else schedule):
        raise Wrong("an unsound schedule was accepted")


def actions_of(row: Any) -> Iterator[str]:
    for slot in row:
        yield from (str(action) for action in (slot.compute, slot.overlapped, *slot.transfers) if action is not None)


def text_means(text: str) -> list[list[str]]:
    """Return each rank's actions in order, by the simplest reading there can be."""
    if text.lstrip(" \n\r\t").startswith("{"):
        ranks = json.loads(text)["ranks"]
        cells = [
            [cell for slot in rank["slots"] for cell in [slot["compute"] or "", *slot["transfers"]]] for rank in ranks
        ]
        return [words_of(" ".join(row)) for row in cells]
    lines = text.removesuffix("\n").split("\n")
    return [words_of(line) for line in lines if not line.startswith("#")]


def words_of(line: str) -> list[str]:
    words = re.split(r"[,;() \r]+", line)
    return [word for word in words if word and "OVERLAP" not in word]
