"""What the stages of a run that ended early held, as text of at most 120 columns or as values for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bpipe.record.format import Held
from bpipe.record.report.output.table import aligned, wrapped
from bpipe.record.report.shortage import StageNeed, shortage_of
from bpipe.record.report.units import bytes_text, counted
from bpipe.schedule.layout import Vocabulary

VERSION = 1


def text(held: Held) -> str:
    shortage = shortage_of(held)
    program = shortage.program
    vocabulary = ""
    if program.vocabulary is not Vocabulary.WHOLE:
        vocabulary = f"; vocabulary {program.vocabulary.value}{', and the embedding' * program.input_shards}"
    sizes = f"{counted(program.num_ranks, 'stage')}, {counted(program.num_microbatches, 'micro-batch', 'es')}"
    head = (
        f"{program.schedule}, {sizes}; balance {program.balance_name}{vocabulary}; memory held up to iteration "
        f"{shortage.iteration}"
    )
    fits = {True: "fits", False: "does not fit", None: "limit not known"}
    lines = [*wrapped(head, ""), "", *_table(shortage.stages)]
    lines += ["", "needed at the fullest point, with micro-batches of these sizes:"]
    lines += [
        f"  {way.name}: {bytes_text(way.need_bytes)} on stage {way.stage}, {fits[way.fits]}" for way in shortage.ways
    ]
    lines.append("")
    for answer in shortage.answers:
        lines += wrapped(answer, "")
    for note in shortage.notes:
        lines += wrapped(f"note: {note}", "  ")
    return "\n".join(lines) + "\n"


def _table(stages: tuple[StageNeed, ...]) -> list[str]:
    # If the output layer is in shards no stage has logits.
    above, below = ("shard,", "S to T") if any(row.shard_bytes for row in stages) else ("of which", "logits")
    titles = [
        ["", "", "held", "activa-", "one micro-", above, "", "", "", "", "device's", ""],
        [*"stage rank micro-b. tions batch".split(), below, *"weights gradients optimizer other limit needs".split()],
    ]
    rows = [
        [
            str(row.stage),
            str(row.rank),
            f"{row.microbatches_held} of {row.peak_microbatches}",
            bytes_text(row.held_bytes),
            bytes_text(row.microbatch_bytes),
            bytes_text(row.shard_bytes or row.logits_bytes) if row.shard_bytes or row.logits_bytes else "-",
            bytes_text(row.weights_bytes),
            bytes_text(row.gradients_bytes),
            bytes_text(row.optimizer_bytes),
            "-" if row.other_bytes is None else bytes_text(row.other_bytes),
            "-" if row.limit_bytes is None else bytes_text(row.limit_bytes),
            bytes_text(row.need_bytes),
        ]
        for row in stages
    ]
    return aligned([*titles, *rows])


def document(held: Held) -> dict[str, Any]:
    shortage = shortage_of(held)
    return {
        "format": "bpipe-memory-report",
        "version": VERSION,
        "program": {
            "schedule": shortage.program.schedule,
            "num_stages": shortage.program.num_ranks,
            "num_microbatches": shortage.program.num_microbatches,
            "num_chunks": shortage.program.num_chunks,
            "balance": shortage.program.balance_name,
            "vocabulary": shortage.program.vocabulary.value,
        },
        "iteration": shortage.iteration,
        "failure": None if held.failure is None else asdict(held.failure),
        "stages": [{**asdict(row), "fits": row.fits} for row in shortage.stages],
        "ways": [asdict(way) for way in shortage.ways],
        "answers": list(shortage.answers),
        "notes": list(shortage.notes),
    }
