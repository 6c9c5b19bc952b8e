"""Read what every rank wrote down of its memory, from its first forward on. In: the folder of `--bpipe-report`. Out: a `Held`.

Whatever a killed run may leave is accepted: a torn last line, a rank without a file. Knows no schedule and judges no number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bpipe.program import ScheduleConfig, from_document

VERSION = 1
_FILE = re.compile(r"memory_(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class Mark:
    """What a rank held at one time: when an `action` had run, or, with an `error`, while it ran. `microbatches`: stage, number, bytes."""

    iteration: int
    action: str | None
    error: str | None
    out_of_memory: bool
    program: ScheduleConfig | None
    microbatches: tuple[tuple[int, int, int], ...]
    saved_bytes: Mapping[int, int]
    moved_bytes: Mapping[int, int]
    received_bytes: int
    host_bytes: int
    logits_bytes: int
    allocated_bytes: int | None
    reserved_bytes: int | None

    @property
    def activations_bytes(self) -> int:
        return sum(size for _, _, size in self.microbatches) + self.host_bytes


@dataclass(frozen=True, slots=True)
class RankHeld:
    """One rank. Besides activations; `optimizer_to_come_bytes` is what its optimizer had not allocated before the first iteration."""

    rank: int
    pipeline: int
    place: int
    host: str
    limit_bytes: int | None
    micro_batch: int | None
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    optimizer_to_come_bytes: int | None
    marks: tuple[Mark, ...]

    @property
    def besides_bytes(self) -> int:
        """All but activations, the optimizer's state included that comes with the first step."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + (self.optimizer_to_come_bytes or 0)

    @property
    def end(self) -> Mark | None:
        """The error that ended this rank's training, where it was written down."""
        return next((mark for mark in reversed(self.marks) if mark.error is not None), None)


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """Which rank failed first, by the ranks' own account."""

    rank: int
    cause: str


@dataclass(frozen=True, slots=True)
class Held:
    folder: Path
    ranks: tuple[RankHeld, ...]
    failure: FirstFailure | None


def read_held(folder: str | Path) -> Held | None:
    """None where no rank wrote anything of it down. Raises ValueError, naming file and line, for what no run writes."""
    path = Path(folder)
    files = sorted(file for file in path.iterdir() if _FILE.fullmatch(file.name)) if path.is_dir() else []
    ranks = tuple(found for found in map(_rank, files) if found is not None)
    return Held(path, ranks, _failure(path / "failure.json")) if ranks else None


def _failure(path: Path) -> FirstFailure | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        return FirstFailure(_number(found["rank"], "rank"), str(found["cause"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not the failure of a run ({error})") from None


def _rank(path: Path) -> RankHeld | None:
    lines = path.read_bytes().splitlines(keepends=True)
    found: list[Any] = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError:
            if number < len(lines) or line.endswith(b"\n"):
                raise ValueError(f"{path}, line {number}: no JSON, though lines follow or it is whole. Is the file damaged?") from None
    number = 1
    try:
        if not found:
            return None
        header, *marks = found
        if header.get("format") != "bpipe-memory" or header.get("version") != VERSION:
            raise ValueError(f"it does not say that it is bpipe-memory version {VERSION}")
        read = []
        for mark in marks:
            number += 1
            read.append(_mark(mark))
        number = 1
        return RankHeld(
            rank=_number(header["rank"], "rank"),
            pipeline=_number(header["pipeline"], "pipeline"),
            place=_number(header["place"], "place"),
            host=str(header.get("host", "")),
            limit_bytes=_maybe(header.get("limit_bytes"), "limit_bytes"),
            micro_batch=_maybe(header.get("micro_batch"), "micro_batch"),
            weights_bytes=_number(header["weights_bytes"], "weights_bytes"),
            gradients_bytes=_number(header["gradients_bytes"], "gradients_bytes"),
            optimizer_bytes=_number(header["optimizer_bytes"], "optimizer_bytes"),
            optimizer_to_come_bytes=_maybe(header.get("optimizer_to_come_bytes"), "optimizer_to_come_bytes"),
            marks=tuple(read),
        )
    except KeyError as error:
        raise ValueError(f"{path}, line {number}: {error} is missing") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}, line {number}: {error}") from None


def _mark(line: Mapping[str, Any]) -> Mark:
    program = line.get("program")
    return Mark(
        iteration=_number(line["iteration"], "iteration"),
        action=None if line.get("action") is None else str(line["action"]),
        error=None if line.get("error") is None else str(line["error"]),
        out_of_memory=line.get("out_of_memory") is True,
        program=None if program is None else _program(program),
        microbatches=tuple((_number(a, "stage"), _number(b, "micro-batch"), _number(c, "bytes")) for a, b, c in line["microbatches"]),
        saved_bytes=_by_stage(line["saved_bytes"]),
        moved_bytes=_by_stage(line.get("moved_bytes") or {}),
        received_bytes=_number(line.get("received_bytes") or 0, "received_bytes"),
        host_bytes=_number(line.get("host_bytes") or 0, "host_bytes"),
        logits_bytes=_number(line.get("logits_bytes") or 0, "logits_bytes"),
        allocated_bytes=_maybe(line.get("allocated_bytes"), "allocated_bytes"),
        reserved_bytes=_maybe(line.get("reserved_bytes"), "reserved_bytes"),
    )


def _program(found: Mapping[str, Any]) -> ScheduleConfig:
    for name in ("num_stages", "num_microbatches", "num_chunks"):
        _number(found.get(name, 1), name)
    return from_document(found)


def _by_stage(found: Mapping[str, Any]) -> dict[int, int]:
    return {int(stage): _number(size, f"bytes of stage {stage}") for stage, size in found.items()}


def _maybe(value: object, what: str) -> int | None:
    return None if value is None else _number(value, what)


def _number(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise ValueError(f"{what} is {str(value)[:40]!r}, which is no number of at least 0")
    return value
