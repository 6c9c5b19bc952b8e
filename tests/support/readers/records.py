"""Records of runs: a sound one, and a judge of what was read of a damaged one.

In: a file's name and text. Out: whether it was taken.
"""

import json
import random
from pathlib import Path
from typing import Any

from bpipe.record.format import Row
from tests.support.readers.damage import damaged_json
from tests.support.readers.outcome import Wrong, is_number, judge_numbers, outcome
from tests.unit.record.report.recorded import write_run

# Numbers that a report is made of: text, lists or negative ones in their place must be refused.
NAMES_OF_NUMBERS = """
rank pipeline place world_size num_pipelines iteration begin_s elapsed_s received_bytes host_bytes weights_bytes
limit_bytes cores partner flops_per_iteration peak_flops num_stages num_microbatches peak_bytes device_peak_bytes
num_chunks
"""
NUMBERS = frozenset(NAMES_OF_NUMBERS.split())
# The name in all files of a run.
RUN_NAME = "cafe"


def texts(folder: Path) -> list[str]:
    """Return every file of a run, each as one text that names its file first."""
    write_run(
        folder,
        num_stages=4,
        num_microbatches=4,
        iterations=(5, 6),
        flops=1e9,
        peak_flops=1e13,
        limit_bytes=2 * 10**9,
        cores=4,
    )
    for rank in range(4):
        (folder / f"rank_{rank:05d}.json").write_text(
            json.dumps({"run": RUN_NAME, "rank": rank, "peak_bytes": 33_000_000})
        )
        path = folder / f"record_{rank:05d}.jsonl"
        first, _, rest = path.read_text().partition("\n")
        path.write_text(f"{json.dumps({'run': RUN_NAME, **json.loads(first)})}\n{rest}")
    whole = folder / "run.json"
    whole.write_text(json.dumps({"run": RUN_NAME, **json.loads(whole.read_text())}))
    return [f"{path.name}\n{path.read_text()}" for path in sorted(folder.iterdir())]


def damaged(text: str, rng: random.Random) -> str:
    name, _, content = text.partition("\n")
    if rng.random() < 0.05:
        return f"{name}\n{content[: rng.randrange(len(content))]}"
    return f"{name}\n{damaged_json(content, rng)}"


def judge(folder: Path, text: str, rng: random.Random) -> bool:
    name, _, content = text.partition("\n")
    path = folder / name
    before = path.read_text()
    path.write_text(content, encoding="utf-8", errors="surrogatepass")
    try:
        more = rng.choice(
            [[], ["--html", str(folder.parent / "page.html")], ["--trace", str(folder.parent / "trace.json")]]
        )
        printed = outcome(["report", str(folder), "--format", "json", *more], folder)
        shown = outcome(["report", str(folder)], folder)
    finally:
        path.write_text(before)
    if (printed is None) != (shown is None):
        raise Wrong("table and JSON do not agree on whether it is a record")
    if printed is None:
        return False
    judge_numbers("", json.loads(printed))
    for line in content.splitlines():
        try:
            _judge_line(json.loads(line) if name.endswith("l") else json.loads(content))
        except (ValueError, RecursionError):
            # A torn last line.
            break
    return True


def _judge_line(line: Any) -> None:
    if not isinstance(line, dict):
        raise Wrong(f"{line!r:.60} was taken for a line of a record")
    if line.get("format") == "bpipe-record" and line.get("run") != RUN_NAME:
        raise Wrong("records of two runs were taken for one")
    program = line.get("program")
    named = {**line, **(program if isinstance(program, dict) else {})}
    wrong = {key for key in NUMBERS & set(named) if not (named[key] is None or is_number(named[key], 0, 1e41))}
    if wrong:
        raise Wrong(f"{wrong} of {line!r:.600} was accepted")
    if "actions" in line:
        _judge_actions(line["columns"], line["actions"])


def _judge_actions(columns: list[str], rows: list[Any]) -> None:
    # What later versions add in columns of their own is passed over.
    known = [place for place, name in enumerate(columns) if name in Row._fields and name != "action"]
    for cell in (row[place] for row in rows for place in known):
        if cell is not None and not is_number(cell, -2, 2**60 + 1):
            raise Wrong(f"an action's {cell!r:.60} was accepted")
