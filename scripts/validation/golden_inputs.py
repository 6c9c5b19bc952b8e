"""Write the files that the compared commands read. In: what is written here. Out: in/ below the folder this runs in.

Runs once, with the code of the first side, so that both sides read the same. A schedule file is what the command wrote;
runs are those that the tests' own writer makes; every damage is seeded.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Not the folder of bpipe: which one is asked is said by PYTHONPATH.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from validation.golden_cases import CHUNKED, MEGATRON, balances, flags
from validation.golden_side import call

NUM_DAMAGED = 16

# -- models, clusters, launches

PROFILES = {
    "one.json": '{"stages": [{"forward_s": 0.143, "backward_s": 0.288, "transfer_s": 0.0156, "micro_batch": 2, '
    '"layers": 10}]}',
    "sizes.json": '{"stages": [{"forward_s": 0.1, "backward_s": 0.2, "micro_batch": 1, "layers": 10, "saved_bytes": '
    "1000000000}, "
    '{"forward_s": 0.18, "backward_s": 0.35, "micro_batch": 2, "layers": 10, "optimizer_s": 0.1}]}',
    "measured.json": '{"stages": [{"forward_s": 0.1, "backward_s": 0.2, "layers": 1}], "measured": {"tensor": 1, '
    '"recompute": "none"}}',
    "each.json": '{"stages": ['
    + ", ".join(f'{{"forward_s": 0.1{n}, "backward_s": 0.2, "reduction_s": 0.{n}}}' for n in range(8))
    + "]}",
    "wrong.json": '{"stages": [{"forward_s": -1}]}',
}
CLUSTERS = {
    "cluster.toml": 'nodes = 4\ngpus_per_node = 8\n\n[device]\nlike = "h100-80g"\nname = "ours"\nbetween_gb_per_s = '
    "25\n",
    "cluster.json": '{"nodes": 1, "gpus_per_node": 8, "device": "a100-80g"}',
    "wrong.toml": 'nodes = 4\ngpus_per_node = 8\n\n[device]\nlike = "h100-80g"\nbetween_gb = 25\n',
}
CONFIG = (
    '{"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 2048, "num_attention_heads": 16, '
    '"num_key_value_heads": 4, '
    '"intermediate_size": 8192, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": false}'
)
SCRIPT = f"""\
#!/bin/bash
NODES=${{NODES:-4}}
ARGS=({MEGATRON})
ARGS+=(--bpipe)
torchrun --nnodes $NODES --nproc-per-node 8 pretrain_gpt.py "${{ARGS[@]}}" --lr 1e-4 --data-path $DATA
"""

# -- schedules


def _source_flags() -> Iterator[tuple[str, list[str]]]:
    """Return the schedules that are written to files, and by which name."""
    for ranks, microbatches in ((1, 2), (2, 4), (4, 8), (5, 4), (8, 16)):
        for balance in balances():
            yield f"1f1b-{ranks}-{microbatches}-{balance[1]}", flags("1f1b", ranks, microbatches, *balance)
            yield f"gpipe-{ranks}-{microbatches}-{balance[1]}", flags("gpipe", ranks, microbatches, *balance)
            chunked = flags(CHUNKED, ranks, 2 * ranks, "--vp", "2", *balance)
            yield f"interleaved-{ranks}-{2 * ranks}-{balance[1]}", chunked


SPLIT = "0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1F1,1I1,1W0,1W1\n"
V_SHAPE = """\
0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,0W3
1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,2W3,1W3
"""
# Written by hand: orders, not always a grid.
WRITTEN = {
    "empty.csv": "",
    "blank.csv": "\n\n",
    "split.csv": SPLIT,
    "split_backwards.csv": SPLIT.replace("0I0,0W0", "0W0,0I0"),
    "v_shape.csv": V_SHAPE,
    "v_shape_short.csv": V_SHAPE.replace(",3F1", "", 1),
    "stuck.csv": "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
    "no_backward.csv": "0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n",
    "twice.csv": "0F0,0F0,0B0\n",
    "apart.csv": "0F0,,,0B0\n,1F0,1B0\n,,,2F0\n",
    "no_text.csv": "0F0\x00,0B0\n",
    "header_only.csv": "# bpipe schedule=x microbatches=1\n",
    "list.json": "[]",
    "object.json": "{}",
    "torn.json": '{"format": "bpipe-schedule", ',
    "torch.runtime": "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n",
}
DAMAGED = ("1f1b-4-8-bpipe", "1f1b-2-4-none", "interleaved-2-4-bpipe", "interleaved-4-8-none")


def _damaged(text: str, rng: random.Random) -> str:
    """One small change: most break a rule of schedules, some break the text."""
    ends = [0, *(place for place, letter in enumerate(text) if letter in ',\n "'), len(text)]
    first, second, third, fourth = sorted(rng.choices(ends, k=4))
    way = rng.randrange(5)
    if way == 0:
        return text[:first] + text[third:fourth] + text[second:third] + text[first:second] + text[fourth:]
    if way == 1:
        start = rng.randrange(len(ends) - 1)
        return text[: ends[start]] + text[ends[start + 1] :]
    if way == 2:
        start = rng.randrange(len(ends) - 1)
        return text[: ends[start + 1]] + text[ends[start] : ends[start + 1]] + text[ends[start + 1] :]
    digits = [place for place, letter in enumerate(text) if letter.isdigit()] or [0]
    place = rng.choice(digits)
    if way == 3:
        return text[:place] + str(rng.randrange(10)) + text[place + 1 :]
    old, new = rng.choice(
        (("F", "B"), ("B", "I"), ("B", "W"), ("EVICT", "HOST"), ("LOAD", "RETURN"), ("LOAD", "EVICT"), (" ", "  "))
    )
    return (
        old.join(text.split(old)[:2]) + new + old.join(text.split(old)[2:])
        if text.count(old) > 1
        else text.replace(old, new)
    )


def _schedules(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, text in WRITTEN.items():
        (folder / name).write_text(text)
    for name, asked in _source_flags():
        for form in ("csv", "json", "grid", "runtime"):
            path = folder / f"{name}.{form}"
            # Torch's form has no transfers: what is balanced cannot be written in it.
            if call([*asked, "--format", form, "--output", str(path)])["status"] != b"0":
                continue
            rng = random.Random(f"{name} {form}")
            for number in range(NUM_DAMAGED if name in DAMAGED else 0):
                (folder / f"damaged-{name}-{number:02}.{form}").write_text(_damaged(path.read_text(), rng))


# -- runs

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm_up": {"warm_up": 5},
    "unbalanced": {"balance": "none"},
    "small": {
        "num_stages": 4,
        "num_microbatches": 4,
        "iterations": (5, 6),
        "flops": 1e9,
        "peak_flops": 1e13,
        "limit_bytes": 2 * 10**9,
    },
    "odd": {"num_stages": 5, "num_microbatches": 9, "cores": 4},
    "single": {"num_stages": 1, "num_microbatches": 4, "balance": "none"},
    "few": {"num_microbatches": 3},
    "chunks": {"schedule": "interleaved-1f1b", "num_stages": 4, "num_microbatches": 8, "num_chunks": 2},
    "chunks_unbalanced": {
        "schedule": "interleaved-1f1b",
        "num_stages": 4,
        "num_microbatches": 8,
        "num_chunks": 2,
        "balance": "none",
    },
    "gpipe": {"schedule": "gpipe", "num_stages": 4, "num_microbatches": 8, "balance": "none"},
    "gloo": {"transport": "gloo"},
    "nccl": {"transport": "nccl", "num_stages": 4, "num_microbatches": 8},
    "synchronous": {"transport": "gloo", "synchronous": True, "num_stages": 4, "num_microbatches": 8},
    "two": {"num_pipelines": 2, "num_stages": 4},
    "two_chunked": {
        "num_pipelines": 2,
        "schedule": "interleaved-1f1b",
        "num_stages": 2,
        "num_microbatches": 4,
        "num_chunks": 3,
    },
    "messages": {"message_s": 0.0005, "num_stages": 4},
    "slow_link": {"probe": 4e9, "speed": 0.4e9},
    "no_probe": {"probe": None, "speed": 0.9e9},
    "slow_action": {"slow": {(6, "2F3"): 0.1}},
    "slow_stage": {"seconds": {"3F": 0.5}},
    "noise": {"noise": 0.1, "seed": 3},
    "more_bytes": {"extra_bytes": {5: 30_000_000}},
    "everything": {
        "warm_up": 5,
        "probe": 4e9,
        "speed": 0.4e9,
        "slow": {(6, "2F3"): 0.1},
        "extra_bytes": {5: 30_000_000},
        "noise": 0.1,
    },
    "skewed": {"clock_error_s": {0: 0.5}},
    "many": {"iterations": tuple(range(100, 130)), "num_stages": 4, "num_microbatches": 4},
    "kept": {"kept_bytes": 11_500_000, "weights_bytes": None, "received_bytes": 65_536},
}
GIB = 2**30


def _recorder(checkout: Path) -> Any:
    """Return the module of the tests that writes runs, wherever it lies."""
    found = sorted(checkout.glob("tests/**/recorded.py"))
    if not found:
        sys.exit(
            f"{checkout} has no tests/**/recorded.py, which writes the runs to report: leave report out with --only"
        )
    sys.path.insert(0, str(checkout))
    return importlib.import_module(".".join(found[0].relative_to(checkout).with_suffix("").parts))


def _runs(folder: Path, checkout: Path) -> None:
    folder.mkdir(parents=True)
    recorded = _recorder(checkout)
    for name, changes in RUNS.items():
        recorded.write_run(folder / name, **changes)
    for name in ("small", "two", "chunks"):
        for number in range(12):
            _damage(
                Path(shutil.copytree(folder / name, folder / f"damaged-{name}-{number:02}")),
                random.Random(f"{name} {number}"),
            )
    _held(folder / "held", 80)
    _held(folder / "held_unlimited", None)
    _held(Path(shutil.copytree(folder / "plain", folder / "failed_later")), 70)
    (folder / "failed_later" / "failure.json").write_text(
        json.dumps({"rank": 0, "cause": "OutOfMemoryError: CUDA out of memory"})
    )
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
        path.write_text(_damaged(text, rng))


def _held(folder: Path, limit_gib: int | None) -> None:
    """Stage 0 of 8 ran out of memory in its eighth forward; stages 6 and 7 had not begun."""
    folder.mkdir(exist_ok=True)
    program = {"schedule": "1f1b", "num_stages": 8, "num_microbatches": 16, "num_chunks": 1, "balance": "none"}
    sizes = {
        "weights_bytes": 8 * GIB,
        "gradients_bytes": 8 * GIB,
        "optimizer_bytes": 4 * GIB,
        "optimizer_to_come_bytes": 8 * GIB,
    }
    for place in range(6):
        header = {
            "format": "bpipe-memory",
            "version": 1,
            "rank": place,
            "pipeline": 0,
            "place": place,
            "host": "node1",
            "micro_batch": 2,
        }
        lines: list[dict[str, Any]] = [
            {**header, "limit_bytes": None if limit_gib is None else limit_gib * GIB, **sizes}
        ]
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
