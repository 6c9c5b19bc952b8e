#!/usr/bin/env python
"""Give every reader of `bpipe` damaged files, and see that each is refused in one message or rightly taken.

In: --count, --seed, --reader. Out: a line a reader; the inputs that failed are kept, status 1. A reader fails where it ends in a traceback,
hangs, refuses without naming the file, or takes what it must not: a schedule that cannot be walked slot by slot or is not what the file
says, messages that do not arrive, a record with a value that no run can have. The judges are slow, and share no code with the readers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import random
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bpipe.cli import main as bpipe
from bpipe.cli import read
from bpipe.ir.document import write_json
from bpipe.ir.grid import write_grid
from bpipe.ir.messages import write_runtime
from bpipe.ir.schedule import Schedule
from bpipe.ir.text import write_csv
from bpipe.passes.align import align
from bpipe.program import BalanceConfig, ScheduleConfig, build
from bpipe.report.record import Row
from tests.unit.oracle import is_sound
from tests.unit.report.recorded import write_run
from tests.unit.test_messages import TORCH as RUNTIME
from tests.unit.test_overlap import OVERLAPPED

# A case takes milliseconds.
LIMIT_S = 30

JUNK: tuple[Any, ...] = (None, [], {}, "", "x", "1", True, False, -1, 0, 1, 3, 1.5, -0.5, 1e300, -1e300, 1e-300, math.inf, math.nan)
JUNK = (*JUNK, 10**6, 10**9, 10**18, 10**30, 10**400, -(10**400), [1], {"a": 1}, "0F0", "9" * 60)
TOKENS = ("0F0", "1B1", "0EVICT1", "2HOST0", "(0F1;0B0)OVERLAP_F_B", "0SEND_F0", "1RECV_F0", "0WAIT_SEND_F0", "0UNSHARD", "3REDUCE_GRAD")
TOKENS += (
    "",
    ",",
    " ",
    "\n",
    "\r\n",
    "9",
    "999999999",
    "-1",
    "\t",
    '"',
    "null",
    "{}",
    "[",
    "٣",
    "\x00",
    "\ufeff",
    "# bpipe ",
    "=",
    "&",
    "+",
    ".",
)


class Wrong(Exception):
    """A reader took what it must not, or refused without saying what."""


@dataclass(frozen=True)
class Reader:
    """`texts` are sound inputs; `damage` makes one that may not be; `judge` raises Wrong, and says whether it was accepted."""

    texts: Callable[[Path], list[str]]
    damage: Callable[[str, random.Random], str]
    judge: Callable[[Path, str, random.Random], bool]


class Hung(BaseException):
    """No reader may catch it."""


def _hang(*_: object) -> None:
    raise Hung


def run_command(arguments: list[str]) -> tuple[int, str, str]:
    """The command in this process, with all that it prints."""
    out, err = io.StringIO(), io.StringIO()
    # What is written as bytes goes to a buffer of its own.
    out.buffer = io.BytesIO()  # type: ignore[misc, attr-defined]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = bpipe(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
    return status, out.getvalue() + out.buffer.getvalue().decode("latin-1"), err.getvalue()


def outcome(arguments: list[str], path: Path | None) -> str | None:
    """What the command printed, None where it refused. Raises Wrong for a refusal that says nothing."""
    status, printed, error = run_command(arguments)
    if status == 0:
        return printed
    if status != 2 or "Traceback" in error or ": error: " not in error:
        raise Wrong(f"status {status}, and says {error!r:.300}")
    if path is not None and str(path) not in error:
        raise Wrong(f"the refusal does not name the file: {error!r:.300}")
    return None


# Schedules.


def damaged_text(text: str, rng: random.Random) -> str:
    """Cut, spliced, with cells exchanged, doubled or taken away, and numbers changed."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        change = rng.randrange(6)
        if change == 0:
            place = rng.randrange(len(text) + 1)
            text = text[:place] + rng.choice(TOKENS) + text[place + rng.randint(0, 8) :]
        elif change == 1:
            cells = re.split(r"([,\n ])", text)
            one, other = rng.randrange(len(cells)), rng.randrange(len(cells))
            cells[one], cells[other] = cells[other], cells[one]
            text = "".join(cells)
        elif change == 2:
            cells = re.split(r"([,\n ])", text)
            one = rng.randrange(len(cells))
            cells[one : one + 1] = rng.choice([[], [cells[one], ",", cells[one]], [rng.choice(TOKENS)]])
            text = "".join(cells)
        elif change == 3:
            numbers = list(re.finditer("[0-9]+", text))
            if numbers:
                found = rng.choice(numbers)
                new = rng.choice(
                    [str(int(found[0]) + 1), str(max(0, int(found[0][:9]) - 1)), "0", "1", "7", "00", "999999999", "1" * 30, "9" * 400]
                )
                text = text[: found.start()] + new + text[found.end() :]
        elif change == 4:
            lines = text.split("\n")
            one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[one], lines[other] = rng.choice([(lines[other], lines[one]), (lines[one], lines[one]), ("", lines[other])])
            text = "\n".join(lines)
        else:
            kinds = list(re.finditer("[FBIWEHRL]", text))
            if kinds:
                place = rng.choice(kinds).start()
                text = text[:place] + rng.choice("FBIWEHRL") + text[place + 1 :]
    return text


def damaged_json(text: str, rng: random.Random) -> str:
    """A value anywhere replaced by what it cannot be, or the text itself damaged."""
    if rng.random() < 0.25:
        return damaged_text(text, rng) if rng.random() < 0.95 else rng.choice(["[", '{"a":']) * 100_000
    lines = [json.loads(line) for line in text.splitlines()] if text.count("\n{") else [json.loads(text)]
    for _ in range(rng.choice([1, 1, 2])):
        places = list(_places(lines))
        holder, key = rng.choice(places)
        if rng.random() < 0.15 and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = rng.choice(JUNK)
    return "".join(json.dumps(line) + "\n" for line in lines)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in list(inner):
        yield value, key
        yield from _places(one)


def judge_schedule(path: Path, text: str, rng: random.Random) -> bool:
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.02:
        data = data[: len(data) // 2] + b"\xff" + data[len(data) // 2 :]
    path.write_bytes(data)
    aligned, balanced = rng.random() < 0.3, rng.random() < 0.2
    form = rng.choice(["grid", "csv", "json", "svg"])
    arguments = ["schedule", "--input", str(path), "--format", form, *["--align"] * aligned]
    printed = outcome([*arguments, *(["--balance", "bpipe"] if balanced else [])], path)
    if printed is None and not balanced:
        return False
    if printed is None and outcome(arguments, path) is None:
        return False
    schedule = read(data.decode("utf-8"))
    if text_means(data.decode("utf-8")) != [list(actions_of(row)) for row in schedule.ranks]:
        raise Wrong("what was read is not what the file says")
    if re.search("[0-9](SEND|RECV)_", text) and not re.match("\\s*{|#.*\nslot", text):
        judge_messages(text, schedule)
    if aligned:
        schedule = align(schedule)
    if not is_sound(schedule):
        raise Wrong("an unsound schedule was accepted")
    if printed is not None and form != "svg" and not is_sound(read(printed)):
        raise Wrong("an unsound schedule was printed")
    return True


def actions_of(row: Any) -> Iterator[str]:
    for slot in row:
        yield from (str(action) for action in (slot.compute, slot.overlapped, *slot.transfers) if action is not None)


def text_means(text: str) -> list[list[str]]:
    """Each rank's actions in order, by the simplest reading there can be."""
    if text.lstrip(" \n\r\t").startswith("{"):
        ranks = json.loads(text)["ranks"]
        cells = [[cell for slot in rank["slots"] for cell in [slot["compute"] or "", *slot["transfers"]]] for rank in ranks]
        return [_words(" ".join(row)) for row in cells]
    lines = text.removesuffix("\n").split("\n")
    if lines[0].startswith("#") and len(lines) > 1 and lines[1].startswith("slot"):
        return _grid_means(lines)
    return [_words(line) for line in lines if not line.startswith("#")]


def _words(line: str) -> list[str]:
    words = re.split(r"[,;() \r]+", line)
    return [word for word in words if word and not re.search("SEND|RECV|SHARD|GRAD|OVERLAP", word)]


def _grid_means(lines: list[str]) -> list[list[str]]:
    fields = dict(field.split("=") for field in lines[0].split()[2:])
    owner = [int(one) for one in fields["stage_to_rank"].split(",")]
    partners = [int(one) for one in fields["partners"].split(",")] if "partners" in fields else None
    kinds = {"F": "F", "B": "B", "I": "I", "W": "W", "E": "EVICT", "H": "HOST", "R": "RETURN", "L": "LOAD"}
    cells: dict[tuple[int, str], list[str]] = {}
    rank, width = 0, 0
    for line in lines[1:]:
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if words[0] == "slot":
            width += len(words) - 1
        elif words[0] == "rank":
            rank = int(words[1])
            cells.setdefault((rank, "C"), []).extend(words[3:])
        else:
            moved = cells.setdefault((rank, "T"), [])
            moved += ["."] * (width - len(words) + 1 - len(moved)) + words[1:]
    means = []
    for at in range(max(one for one, _ in cells) + 1):
        row = []
        computed = cells[at, "C"]
        moved = cells.get((at, "T"), [])
        for slot, cell in enumerate(computed):
            for word in [*cell.split("&"), *(moved[slot] if slot < len(moved) else ".").split("+")]:
                if word != ".":
                    stage, letter, microbatch = re.fullmatch("([0-9]*)([A-Z])([0-9]+)", word).groups()  # type: ignore[union-attr]
                    whose = partners[at] if letter in "HR" and partners else at
                    row.append(f"{stage or owner.index(whose)}{kinds[letter]}{microbatch}")
        means.append(row)
    return means


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


def _runs(cell: str, rank: int, owner: tuple[int, ...], lines: dict[tuple[int, int], deque[str]], done: list[set[str]]) -> bool:
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
    return all(_has_input(part, rank, owner, done[rank]) for part in _words(cell))


def _has_input(part: str, rank: int, owner: tuple[int, ...], done: set[str]) -> bool:
    stage, kind, microbatch = re.fullmatch("([0-9]+)([FBIW])([0-9]+)", part).groups()  # type: ignore[union-attr]
    other = int(stage) + (-1 if kind == "F" else 1)
    if kind == "W" or not 0 <= other < len(owner):
        return True
    if owner[other] != rank:
        return f"{stage}RECV_{'F' if kind == 'F' else 'B'}{microbatch}" in done
    return bool({f"{other}{one}{microbatch}" for one in ("F" if kind == "F" else "BI")} & _computed(done))


def _computed(done: set[str]) -> set[str]:
    return {word for cell in done for word in _words(cell)}


SMALL = (
    ScheduleConfig("1f1b", 3, 4, balance=BalanceConfig()),
    ScheduleConfig("interleaved-1f1b", 2, 4, 2, BalanceConfig()),
    ScheduleConfig("1f1b", 4, 8, 1, BalanceConfig()),
)
PLAIN = (ScheduleConfig("1f1b", 3, 4), ScheduleConfig("gpipe", 2, 3), ScheduleConfig("interleaved-1f1b", 2, 4, 2))


def balanced_texts(writer: Callable[[Schedule], str]) -> Callable[[Path], list[str]]:
    return lambda _: [writer(one) for one in (*map(build, SMALL), *map(build, PLAIN), OVERLAPPED)]


# Records.

# Numbers that a report is made of: text, lists or negative ones in their place must be refused.
NUMBERS = {"rank", "pipeline", "place", "world_size", "num_pipelines", "iteration", "begin_s", "elapsed_s", "received_bytes", "host_bytes"}
NUMBERS |= {"weights_bytes", "limit_bytes", "cores", "partner", "flops_per_iteration", "peak_flops", "num_stages", "num_microbatches"}
NUMBERS |= {"peak_bytes", "device_peak_bytes", "num_chunks"}


def record_texts(folder: Path) -> list[str]:
    """Every file of a run, each as one text that names its file first."""
    write_run(folder, num_stages=4, num_microbatches=4, iterations=(5, 6), flops=1e9, peak_flops=1e13, limit_bytes=2 * 10**9, cores=4)
    for rank in range(4):
        (folder / f"rank_{rank:05d}.json").write_text(json.dumps({"rank": rank, "peak_bytes": 33_000_000}))
    return [f"{path.name}\n{path.read_text()}" for path in sorted(folder.iterdir())]


def damaged_record(text: str, rng: random.Random) -> str:
    name, _, content = text.partition("\n")
    if rng.random() < 0.05:
        return f"{name}\n{content[: rng.randrange(len(content))]}"
    return f"{name}\n{damaged_json(content, rng)}"


def judge_record(folder: Path, text: str, rng: random.Random) -> bool:
    name, _, content = text.partition("\n")
    path = folder / name
    before = path.read_text()
    path.write_text(content, encoding="utf-8", errors="surrogatepass")
    try:
        more = rng.choice([[], ["--html", str(folder.parent / "page.html")], ["--trace", str(folder.parent / "trace.json")]])
        printed = outcome(["report", str(folder), "--format", "json", *more], folder)
        shown = outcome(["report", str(folder)], folder)
    finally:
        path.write_text(before)
    if (printed is None) != (shown is None):
        raise Wrong("table and JSON do not agree on whether it is a record")
    if printed is None:
        return False
    _judge_numbers("", json.loads(printed))
    for line in content.splitlines():
        try:
            _judge_line(json.loads(line) if name.endswith("l") else json.loads(content))
        except (ValueError, RecursionError):
            # A torn last line.
            break
    return True


def _judge_numbers(name: str, value: Any, most: float = 1e21) -> None:
    """What a report says: no seconds below 0, no share above 1, nothing endless. A prediction of absurd sizes may be absurd."""
    if isinstance(value, dict):
        for key, one in value.items():
            _judge_numbers(key, one, most)
    elif isinstance(value, list):
        for one in value:
            _judge_numbers(name, one, most)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value) or abs(value) > most:
            raise Wrong(f"the report says that {name} is {value}")
        if value < -1 and name in ("elapsed_s", "iteration_s", "step_s", "pipeline_s", "exposed_s", "seconds"):
            raise Wrong(f"the report says that {name} is {value}")
        if name == "mfu" and not 0 <= value <= 1:
            raise Wrong(f"the report says that the MFU is {value}")


def _judge_line(line: Any) -> None:
    if not isinstance(line, dict):
        raise Wrong(f"{line!r:.60} was taken for a line of a record")
    for key, value in {**line, **(line["program"] if isinstance(line.get("program"), dict) else {})}.items():
        wanted = key in NUMBERS and value is not None
        if wanted and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e41):
            raise Wrong(f"{key} {value!r:.60} was accepted")
    for row in line.get("actions", ()):
        # What later versions add in columns of their own is passed over.
        for value in (value for name, value in zip(line["columns"], row, strict=True) if name in Row._fields and name != "action"):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not -2 < value < 2**60 + 1):
                raise Wrong(f"{row!r:.100} was accepted")


# What simulate reads.

SIMULATE = ["simulate", "--cluster", "a100-80g:4", "--pipeline", "4", "--global-batch", "8", "--format", "json"]
STAGE = {
    "forward_s": 0.1,
    "backward_s": 0.2,
    "transfer_s": 0.01,
    "output_s": 0.0,
    "embedding_s": 0.0,
    "reduction_s": 0.1,
    "optimizer_s": 0.1,
}
STAGE |= {"saved_bytes": 10**8, "micro_batch": 1, "layers": 10}
MEASURED = {"hidden_size": 5120, "ffn_hidden_size": 20480, "num_attention_heads": 40, "tensor": 1, "recompute": "none", "precision": "bf16"}
CONFIG = {"model_type": "llama", "num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
CONFIG |= {"intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False, "head_dim": 128}


def profile_texts(_: Path) -> list[str]:
    return [json.dumps({"stages": [STAGE], "measured": MEASURED}), json.dumps({"stages": [{**STAGE, "layers": 10}] * 4})]


def config_texts(_: Path) -> list[str]:
    gpt2 = {"model_type": "gpt2", "n_layer": 8, "n_embd": 512, "n_head": 8, "n_positions": 1024, "vocab_size": 50257}
    return [json.dumps(CONFIG), json.dumps(gpt2)]


def judge_profile(path: Path, text: str, _: random.Random) -> bool:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    printed = outcome([*SIMULATE, "--model", "gpt3-13b", "--profile", str(path)], None)
    if printed is None:
        return False
    _judge_numbers("", json.loads(printed))
    for stage in json.loads(text)["stages"]:
        for key, value in stage.items():
            if key not in STAGE or isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise Wrong(f"{key} {value!r:.60} was accepted")
    return True


def judge_config(path: Path, text: str, _: random.Random) -> bool:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    printed = outcome([*SIMULATE, "--model", str(path)], None)
    if printed is None:
        return False
    _judge_numbers("", json.loads(printed))
    found = json.loads(text)
    for key, value in found.items():
        known = key in CONFIG if found["model_type"] != "gpt2" else key in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
        if known and key not in ("model_type", "tie_word_embeddings") and value is not None and (type(value) is not int or value < 1):
            raise Wrong(f"{key} {value!r:.60} was accepted")
    return True


CLUSTER = {"nodes": 1, "gpus_per_node": 4, "device": {"like": "h100-80g", "name": "ours", "between_gb_per_s": 25, "memory_gib": 79.1}}
TOML = """\
nodes = 1
gpus_per_node = 4

[device]
like = "h100-80g"
name = "ours"
peak_tflops = 989
"""
SCRIPT = """\
#!/bin/bash
GPUS=4
NODES=${NODES:-1}
ARGS=(
    --num-layers 8 --hidden-size 1024 # deep
    --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
)
ARGS+=(--vocab-size "51200")
BATCH="--micro-batch-size 1 --global-batch-size $((GPUS * 4)) --bf16"
torchrun --nproc_per_node $GPUS --nnodes $NODES pretrain_gpt.py ${ARGS[@]} \\
    $BATCH --pipeline-model-parallel-size 4 --bpipe 2>&1 | tee train.log
"""


def damaged_cluster(text: str, rng: random.Random) -> str:
    return damaged_json(text, rng) if text.startswith("{") else damaged_text(text, rng)


def judge_cluster(path: Path, text: str, _: random.Random) -> bool:
    file = path.with_suffix(".toml" if "[device]" in text and not text.startswith("{") else ".json")
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    printed = outcome(
        ["simulate", "--cluster", str(file), "--pipeline", "4", "--global-batch", "8", "--format", "json", "--model", "gpt3-13b"], None
    )
    if printed is not None:
        _judge_numbers("", json.loads(printed), math.inf)
    return printed is not None


def judge_script(path: Path, text: str, _: random.Random) -> bool:
    """Only that it ends, and how: what bash would make of a damaged script nobody can say without running it."""
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    printed = outcome(["simulate", "--cluster", "a100-80g", "--from-script", str(path), "--format", "json"], None)
    if printed is not None:
        _judge_numbers("", json.loads(printed), math.inf)
    return printed is not None


READERS = {
    "csv": Reader(balanced_texts(write_csv), damaged_text, judge_schedule),
    "runtime": Reader(lambda _: [RUNTIME, *(write_runtime(build(one)) for one in PLAIN)], damaged_text, judge_schedule),
    "grid": Reader(balanced_texts(write_grid), damaged_text, judge_schedule),
    "json": Reader(balanced_texts(write_json), damaged_json, judge_schedule),
    "record": Reader(record_texts, damaged_record, judge_record),
    "profile": Reader(profile_texts, damaged_json, judge_profile),
    "config": Reader(config_texts, damaged_json, judge_config),
    "cluster": Reader(lambda _: [json.dumps(CLUSTER), TOML], damaged_cluster, judge_cluster),
    "script": Reader(lambda _: [SCRIPT], damaged_text, judge_script),
}


def fuzz(name: str, count: int, seed: int, kept: Path, limit_s: int | None = None) -> Counter[str]:
    """How many damaged inputs were accepted, refused, failed; those that failed are kept. `limit_s` is for one, by SIGALRM."""
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
        "--seed", type=int, default=random.SystemRandom().randrange(10**6), help="what is damaged how (default: another each time)"
    )
    parser.add_argument("--reader", nargs="+", choices=tuple(READERS), default=tuple(READERS), help="only these")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "bpipe_fuzz", help="where inputs that failed are kept")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, _hang)
    print(f"seed {options.seed}", flush=True)
    failed = 0
    for name in options.reader:
        found = fuzz(name, options.count, options.seed, options.keep, LIMIT_S)
        failed += found["failed"]
        print(
            f"{name:8} {options.count} inputs: {found['accepted']} accepted, {found['refused']} refused, {found['failed']} failed",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
