"""Valid inputs of commands, and checks of what is read from damaged ones: accepted, refused, or Wrong.

For schedules, the check reads a file in the simplest possible way, and checks the result slot by slot. For records and
compared runs, it reads the file again by hand; accepted values must be numbers, as many as the command reports. For
profiles, models, clusters, launches and logs, whose damaged content may have a meaning, it checks only that and how the
command ends. No check shares code with the readers.
"""

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.record.format import Row
from bpipe.schedule.families.unit_grid import align
from bpipe.schedule.files.document import read
from bpipe.schedule.schedule import Schedule
from tests.support.oracle import is_sound
from tests.support.readers.damage import damaged_json, damaged_text
from tests.support.readers.outcome import Wrong, is_number, judge_answer, judge_numbers, outcome
from tests.unit.record.report.recorded import write_run
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
    return lambda _: [writer(schedule) for schedule in (*map(build, SMALL), *map(build, PLAIN), OVERLAPPED)]


def judge_schedule(path: Path, text: str, rng: random.Random) -> bool:
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.02:
        data = data[: len(data) // 2] + b"\xff" + data[len(data) // 2 :]
    path.write_bytes(data)
    aligned, form = rng.random() < 0.3, rng.choice(["csv", "json", "svg"])
    arguments = ["schedule", "--input", str(path), "--format", form, *["--align"] * aligned]
    printed = outcome([*arguments, *["--balance", "bpipe"] * (rng.random() < 0.2)], path)
    # A schedule that cannot be balanced may still be sound.
    if printed is None and outcome(arguments, path) is None:
        return False
    _judge_read(data.decode("utf-8"), aligned)
    if printed is not None and form != "svg" and not is_sound(read(printed)):
        raise Wrong("an unsound schedule was printed")
    return True


def _judge_read(text: str, aligned: bool) -> None:
    schedule = read(text)
    if text_means(text) != [list(actions_of(row)) for row in schedule.ranks]:
        raise Wrong("the result is not the file's content")
    if not is_sound(align(schedule) if aligned else schedule):
        raise Wrong("an unsound schedule was accepted")


def actions_of(row: Any) -> Iterator[str]:
    for slot in row:
        yield from (str(action) for action in (slot.compute, slot.overlapped, *slot.transfers) if action is not None)


def text_means(text: str) -> list[list[str]]:
    """Return each rank's actions in order, read in the simplest possible way."""
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


SOUND_LAUNCH = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 51200 "
    "--micro-batch-size 1 --global-batch-size 16 --pipeline-model-parallel-size 4 "
    "--pipeline-model-parallel-layout E(tt|)*3ttL --num-experts 4 --moe-layer-freq [0]*2+[1]*6 "
    "--moe-ffn-hidden-size 512 --window-size 127,0 --window-attn-skip-freq 4 --bf16 "
    "--recompute-granularity selective --recompute-modules core_attn --bpipe --bpipe-bound 3"
)
CAPTURED = json.dumps(
    {"launches": [{"words": ["torchrun", "pretrain_gpt.py", *SOUND_LAUNCH.split()], "environment": {"NCCL_X": "1"}}]}
)


def judge_captured(path: Path, text: str, _: random.Random) -> bool:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return judge_answer(["simulate", "--cluster", "a100-80g:4", "--launch", str(path), "--format", "json"])


def judge_launch(_: Path, text: str, __: random.Random) -> bool:
    """Whether a system can pass these arguments: no zero byte, and no word beyond 128 KiB."""
    words = text.replace("\0", "").split()
    if any(len(word) >= 2**17 for word in words):
        return False
    return judge_answer(["simulate", "--cluster", "a100-80g:4", "--format", "json", "--", *words])


SIMULATE = ["simulate", "--pp", "4", "--gbs", "8", "--format", "json"]
SECONDS = ("forward_s", "backward_s", "transfer_s", "output_s", "embedding_s", "reduction_s", "optimizer_s")
STAGE = {**dict.fromkeys(SECONDS, 0.1), "saved_bytes": 10**8, "micro_batch": 1, "layers": 10}
MEASURED = {"hidden_size": 5120, "ffn_hidden_size": 20480, "num_attention_heads": 40, "tensor": 1}
MEASURED |= {"recompute": "none", "precision": "bf16"}
CONFIG: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 8}
CONFIG |= {"num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 2048}
CONFIG |= {"tie_word_embeddings": False, "head_dim": 128}
GPT2 = {"model_type": "gpt2", "n_layer": 8, "n_embd": 512, "n_head": 8, "n_positions": 1024, "vocab_size": 50257}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 512}
ROUTED = {**CONFIG, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 8, "decoder_sparse_step": 1}
# Kinds of layers, and keys that are true or false.
KINDS = ("full_attention", "sliding_attention")
FLAGS = ("tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias")
WINDOWED = {**CONFIG, "sliding_window": 1024, "layer_types": [*KINDS] * 4}
DEEPSEEK = {**CONFIG, **EXPERTS, "model_type": "deepseek_v3", "n_routed_experts": 8, "n_shared_experts": 1}
DEEPSEEK |= {"first_k_dense_replace": 2, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64}
DEEPSEEK |= {"v_head_dim": 64, "num_key_value_heads": 8}
MOST = sys.float_info.max
NO_SIZES = ("model_type", "layer_types", *FLAGS)

DEVICE = {"like": "h100-80g", "name": "ours", "between_gb_per_s": 25, "memory_gib": 79.1}
CLUSTER = {"nodes": 1, "gpus_per_node": 4, "device": DEVICE}
TOML = """\
nodes = 1
gpus_per_node = 4

[device]
like = "h100-80g"
name = "ours"
peak_tflops = 989
"""


def profile_texts(_: Path) -> list[str]:
    return [json.dumps({"stages": [STAGE], "measured": MEASURED}), json.dumps({"stages": [STAGE] * 4})]


def config_texts(_: Path) -> list[str]:
    return [json.dumps(config) for config in (CONFIG, GPT2, ROUTED, WINDOWED, DEEPSEEK)]


def cluster_texts(_: Path) -> list[str]:
    return [json.dumps(CLUSTER), TOML]


def damaged_cluster(text: str, rng: random.Random) -> str:
    return damaged_json(text, rng) if text.startswith("{") else damaged_text(text, rng)


def _simulated(path: Path, text: str, flag: str, named: Path | None) -> dict[str, Any] | None:
    """Return the file's content if a simulation accepts it, else None; errors must name the path if one is `named`."""
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    arguments = [*SIMULATE, "--cluster", "a100-80g:4", "--model", "gpt3-13b", flag, str(path)]
    return json.loads(text) if judge_answer(arguments, named, limit=1e21) else None


def judge_profile(path: Path, text: str, _: random.Random) -> bool:
    document = _simulated(path, text, "--profile", None)
    if document is None:
        return False
    for key, value in (item for stage in document["stages"] for item in stage.items()):
        if key not in STAGE or not is_number(value, 0, MOST):
            raise Wrong(f"{key} {value!r:.60} was accepted")
    return True


def judge_config(path: Path, text: str, _: random.Random) -> bool:
    config = _simulated(path, text, "--model", None)
    if config is None:
        return False
    sizes = set(GPT2 if config["model_type"] == "gpt2" else CONFIG) - set(NO_SIZES)
    accepted_keys = {
        key
        for key in sizes & set(config)
        if config[key] is not None and (type(config[key]) is not int or config[key] < 1)
    }
    accepted_keys |= {key for key in FLAGS if not isinstance(config.get(key), bool | None)}
    if config.get("sliding_window"):
        accepted_keys |= set(config.get("layer_types") or ()) - set(KINDS)
    if accepted_keys:
        raise Wrong(f"{accepted_keys!r:.60} of {text:.600} was accepted")
    return True


def judge_cluster(path: Path, text: str, _: random.Random) -> bool:
    file = path.with_suffix(".toml" if "[device]" in text and not text.startswith("{") else ".json")
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    return judge_answer([*SIMULATE, "--cluster", str(file), "--model", "gpt3-13b"])


# Numbers in a report: text, lists or negative numbers in their place must be refused.
NAMES_OF_NUMBERS = """
rank pipeline place world_size num_pipelines iteration begin_s elapsed_s received_bytes host_bytes weights_bytes
limit_bytes cores partner flops_per_iteration peak_flops num_stages num_microbatches peak_bytes device_peak_bytes
num_chunks
"""
NUMBERS = frozenset(NAMES_OF_NUMBERS.split())
# The name in all files of a run.
RUN_NAME = "cafe"


def record_texts(folder: Path) -> list[str]:
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
        more = rng.choice(
            [[], ["--html", str(folder.parent / "page.html")], ["--trace", str(folder.parent / "trace.json")]]
        )
        printed = outcome(["report", str(folder), "--format", "json", *more], folder)
        shown = outcome(["report", str(folder)], folder)
    finally:
        path.write_text(before)
    if (printed is None) != (shown is None):
        raise Wrong("table and JSON disagree on whether it is a record")
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
        raise Wrong(f"{line!r:.60} was accepted as a line of a record")
    if line.get("format") == "bpipe-record" and line.get("run") != RUN_NAME:
        raise Wrong("records of two runs were accepted as one")
    program = line.get("program")
    named = {**line, **(program if isinstance(program, dict) else {})}
    wrong = {key for key in NUMBERS & set(named) if not (named[key] is None or is_number(named[key], 0, 1e41))}
    if wrong:
        raise Wrong(f"{wrong} of {line!r:.600} was accepted")
    if "actions" in line:
        _judge_actions(line["columns"], line["actions"])


def _judge_actions(columns: list[str], rows: list[Any]) -> None:
    # Columns that later versions add are ignored.
    number_columns = [place for place, name in enumerate(columns) if name in Row._fields and name != "action"]
    for cell in (row[place] for row in rows for place in number_columns):
        if cell is not None and not is_number(cell, -2, 2**60 + 1):
            raise Wrong(f"an action's {cell!r:.60} was accepted")


LOSSES = (5.5, 4.25, 0.1, float("nan"))
LINE = (
    " [2026-01-01 00:00:00.0] iteration {:8d}/       4 | consumed samples: 32 | elapsed time per iteration (ms): 10.5 |"
    " learning rate: 6.000000E-04 | lm loss: {:.6E} | loss scale: 1.0 | grad norm: 8.632 | number of nan iterations:  "
    " 0 |\n"
)


# Types of the values in a line of a run's report by key; other keys have hexadecimal training values.
REPORT_TYPES: dict[str, tuple[type, ...]] = {
    "iteration": (int,),
    "skipped": (int, type(None)),
    "elapsed_s": (int, float, type(None)),
}


def report_texts(_: Path) -> list[str]:
    lines = [
        {"iteration": number, "lm loss": loss.hex(), "grad_norm": (0.3).hex(), "skipped": 0, "elapsed_s": 0.5}
        for number, loss in enumerate(LOSSES, start=1)
    ]
    return [
        "".join(json.dumps(line) + "\n" for line in lines),
        "".join(json.dumps({**line, "grad_norm": None}) + "\n" for line in lines),
    ]


def log_texts(_: Path) -> list[str]:
    return [
        "> building the model\n" + "".join(LINE.format(number, loss) for number, loss in enumerate(LOSSES, start=1))
    ]


def judge_report(path: Path, text: str, _: random.Random) -> bool:
    file = path.with_suffix(".jsonl")
    numbers = _compared(file, text)
    if numbers is None:
        return False
    for line in text.splitlines():
        record = json.loads(line)
        for name, value in record.items():
            allowed_types = REPORT_TYPES.get(name, (str, type(None)))
            if (
                isinstance(value, bool)
                or not isinstance(value, allowed_types)
                or (isinstance(value, str) and not re.search("0x|nan|inf", value))
            ):
                raise Wrong(f"{name} {value!r:.60} was accepted")
    if numbers != len({json.loads(line)["iteration"] for line in text.splitlines()}):
        raise Wrong(f"{numbers} iterations are said to be in it")
    return True


def judge_log(path: Path, text: str, _: random.Random) -> bool:
    numbers = _compared(path.with_suffix(".log"), text)
    if numbers is not None and numbers > text.count("iteration "):
        raise Wrong(f"{numbers} iterations are said to be in it")
    return numbers is not None


def _compared(file: Path, text: str) -> int | None:
    """Return the number of iterations of a run compared with itself: nothing can differ."""
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    printed = outcome(["compare", str(file), str(file)], file)
    if printed is None:
        return None
    verdict = printed.splitlines()[-1]
    if not verdict.startswith(("identical", "no difference")):
        raise Wrong("a run differs from itself")
    return int(re.findall(r"(\d+) iterations", verdict)[0])
