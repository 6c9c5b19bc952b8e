"""Judge messages that were taken.

In: the text with its operations, the schedule read from it. Out: Wrong where one does not arrive.
"""

from __future__ import annotations

import re
from collections import deque

from bpipe.ir.schedule import Schedule
from tests.support.readers.outcome import Wrong


def judge_messages(text: str, schedule: Schedule) -> None:
    """Run the operations: what is sent waits in its pair's line, and what is received must be what is needed."""
    owner = schedule.layout.only_placement
    queues = [deque(line.split(",")) for line in text.removesuffix("\n").split("\n") if not line.startswith("#")]
    lines: dict[tuple[int, int], deque[str]] = {}
    done: list[set[str]] = [set() for _ in queues]
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while queue and _runs(queue[0].strip(" \r"), rank, owner, lines, done):
                done[rank].add(queue.popleft().strip(" \r"))
                moved = True
    if any(queues) or any(lines.values()):
        raise Wrong("messages were accepted that do not arrive")


def _runs(
    cell: str, rank: int, owner: tuple[int, ...], lines: dict[tuple[int, int], deque[str]], done: list[set[str]]
) -> bool:
    """Do the operation if it can be done now."""
    sent = re.fullmatch("([0-9]+)(SEND|RECV)_([FB])([0-9]+)", cell)
    if sent is not None:
        stage, step = int(sent[1]), 1 if sent[3] == "F" else -1
        if sent[2] == "SEND":
            made = {f"{stage}{kind}{sent[4]}" for kind in ("F" if step == 1 else "BI")}
            if not made & _computed(done[rank]):
                return False
            lines.setdefault((rank, owner[stage + step]), deque()).append(f"{stage + step}RECV_{sent[3]}{sent[4]}")
            return True
        waiting = lines.get((owner[stage - step], rank))
        if not waiting or waiting[0] != cell:
            return False
        waiting.popleft()
        return True
    if re.search("WAIT|SHARD|GRAD", cell):
        return True
    return all(_has_input(part, rank, owner, done[rank]) for part in words_of(cell))


def _has_input(part: str, rank: int, owner: tuple[int, ...], done: set[str]) -> bool:
    stage, kind, microbatch = re.fullmatch("([0-9]+)([FBIW])([0-9]+)", part).groups()  # type: ignore[union-attr]
    other = int(stage) + (-1 if kind == "F" else 1)
    if kind == "W" or not 0 <= other < len(owner):
        return True
    if owner[other] != rank:
        return f"{stage}RECV_{'F' if kind == 'F' else 'B'}{microbatch}" in done
    return bool({f"{other}{one}{microbatch}" for one in ("F" if kind == "F" else "BI")} & _computed(done))


def _computed(done: set[str]) -> set[str]:
    return {word for cell in done for word in words_of(cell)}


def words_of(line: str) -> list[str]:
    words = re.split(r"[,;() \r]+", line)
    return [word for word in words if word and not re.search("SEND|RECV|SHARD|GRAD|OVERLAP", word)]
