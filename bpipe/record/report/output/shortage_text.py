"""Write down what the stages of a run that ended early held.

In: a `Held`. Out: text of at most 120 columns, or plain JSON values.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bpipe.record.format import Held
from bpipe.record.report.output.table import aligned, wrapped
from bpipe.record.report.shortage import Shortage, StageNeed, shortage_of
from bpipe.record.report.units import bytes_text, counted
from bpipe.schedule.layout import Vocabulary

VERSION = 1


def text(held: Held) -> str:
    found = shortage_of(held)
    program = found.program
    split = (
        ""
        if program.vocabulary is Vocabulary.WHOLE
        else f"; vocabulary {program.vocabulary.value}{', and the embedding' * program.input_shards}"
    )
    lines = wrapped(
        f"{program.schedule}, {counted(program.num_ranks, 'stage')}, "
        f"{counted(program.num_microbatches, 'micro-batch', 'es')}; balance "
        f"{program.balance_name}{split}; memory held up to iteration {found.iteration}",
        "",
    )
    lines += ["", *_table(found.stages), "", "needed at the fullest point, with micro-batches of these sizes:"]
    lines += [f"  {line}" for line in _ways(found)]
    lines.append("")
    for answer in found.answers:
        lines += wrapped(answer, "")
    for note in found.notes:
        lines += wrapped(f"note: {note}", "  ")
    return "\n".join(lines) + "\n"


def _table(stages: tuple[StageNeed, ...]) -> list[str]:
    # Where the output layer is in shards no stage has logits.
    above, below = ("shard,", "S to T") if any(row.shard_bytes for row in stages) else ("of which", "logits")
    titles = [
        ["", "", "held", "activa-", "one micro-", above, "", "", "", "", "device's", ""],
        [
            "stage",
            "rank",
            "micro-b.",
            "tions",
            "batch",
            below,
            "weights",
            "gradients",
            "optimizer",
            "other",
            "limit",
            "needs",
        ],
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


def _ways(found: Shortage) -> list[str]:
    says = {True: "fits", False: "does not fit", None: "limit not known"}
    return [f"{way.name}: {bytes_text(way.need_bytes)} on stage {way.stage}, {says[way.fits]}" for way in found.ways]


def document(held: Held) -> dict[str, Any]:
    found = shortage_of(held)
    return {
        "format": "bpipe-memory-report",
        "version": VERSION,
        "program": {
            "schedule": found.program.schedule,
            "num_stages": found.program.num_ranks,
            "num_microbatches": found.program.num_microbatches,
            "num_chunks": found.program.num_chunks,
            "balance": found.program.balance_name,
            "vocabulary": found.program.vocabulary.value,
        },
        "iteration": found.iteration,
        "failure": None if held.failure is None else asdict(held.failure),
        "stages": [{**asdict(row), "fits": row.fits} for row in found.stages],
        "ways": [asdict(way) for way in found.ways],
        "answers": list(found.answers),
        "notes": list(found.notes),
    }
