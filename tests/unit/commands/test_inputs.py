"""Files that commands read: invalid values are refused, and damage is reported or harmless."""

import json
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from bpipe.cli import main
from bpipe.schedule.files.document import write_json
from bpipe.schedule.files.text import write_csv
from tests.support.readers import judges
from tests.support.readers.damage import damaged_json, damaged_text
from tests.support.readers.outcome import Reader, Wrong
from tests.unit.record.report.recorded import write_run


def test_a_node_of_many_devices_can_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--cluster", "h100-80g:1x32", "--model", "gpt3-13b", *["--pp", "8", "--gbs", "32"]]) == 0


LAUNCH = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 128".split()
LAUNCH += ["--micro-batch-size", "1", "--global-batch-size", "8", "--pipeline-model-parallel-size", "4"]
LAYOUT = "--pipeline-model-parallel-layout"
CONFIG = judges.ROUTED
WINDOWED = {**CONFIG, "sliding_window": 1024}
SIMULATE = ["simulate", "--cluster", "a100-80g:4", "--pp", "4", "--gbs", "8"]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    begin = time.process_time()
    assert main(arguments) == 2
    assert time.process_time() - begin < 10
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            [LAYOUT, "Et*99999999999999999999L"],
            f"{LAYOUT} Et*99999999999999999999L repeats more than 10000 layers, the most of a model",
        ),
        ([LAYOUT, "Et*1000000000L"], "repeats more than 10000 layers, the most of a model"),
        ([LAYOUT, "E" + "t*9999" * 99 + "L"], "repeats more than 10000 layers, the most of a model"),
        ([LAYOUT, "(" * 100_000], "has 100000 characters, but a layout has at most 10000"),
        (["--num-layers", "1000000000"], "num_layers is 1000000000, but must be at most 10000"),
        (["--num-experts", "4", "--moe-layer-freq", "(" * 50_000 + "[1]" + ")" * 50_000], "is not a pattern of layers"),
        (["--window-size", "9" * 400 + ",0"], f"--window-size {'9' * 40} is not a window of tokens before a token"),
        ([f"--bpipe-own-{number}" for number in range(5000)], "unknown flag --bpipe-own-0, did you mean"),
    ],
)
def test_a_launch_beyond_any_model_is_a_limit_in_words(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(["simulate", "--cluster", "a100-80g:4", "--", *LAUNCH, *flags], capsys)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**CONFIG, "decoder_sparse_step": 10**9}, "is 1000000000, but must be a whole number from 1 to 10000"),
        ({**CONFIG, "decoder_sparse_step": 1e9}, "is 1000000000.0, but must be a whole number from 1 to 10000"),
        ({**CONFIG, "num_hidden_layers": 10**8}, "is 100000000, but must be a whole number from 1 to 10000"),
        ({**WINDOWED, "tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', but must be true or false"),
        (
            {**WINDOWED, "layer_types": ["full_attention", "linear_attention"] * 4},
            "layer_types[1] is 'linear_attention': only full_attention and sliding_attention are modelled",
        ),
        ({**WINDOWED, "use_sliding_window": "no"}, "use_sliding_window is 'no', but must be true or false"),
        ({**WINDOWED, "attention_bias": 1}, "attention_bias is 1, but must be true or false"),
    ],
)
def test_a_config_that_says_what_no_model_has_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The string "false" tied the embedding, and an unknown kind of layer was taken for full attention."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert message in refused([*SIMULATE, "--model", str(tmp_path)], capsys)


def test_json_of_many_keys_takes_linear_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ",".join(f'"k{number}":1' for number in range(60_000))
    (tmp_path / "config.json").write_text(f'{{{keys},"k59999":1}}')
    assert "'k59999' appears twice" in refused([*SIMULATE, "--model", str(tmp_path)], capsys)


@pytest.mark.parametrize("number", [3, 500_000])
def test_more_pipes_than_rules_know_are_refused(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slots = [{"compute": "0F0", "transfers": []}, {"compute": "0B0", "transfers": []}]
    document = {"schedule": "x", "stages": 1, "microbatches": 1, "chunks": 1, "balance": "none", "bounds": None}
    document |= {"stage_to_rank": [[0]] * number, "ranks": [{"rank": 0, "peak": 1, "evictions": 0, "slots": slots}]}
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps(document))
    message = f"places {number} pipes: at most two are supported, in opposite directions"
    assert f"{path}: stage_to_rank {message}" in refused(["schedule", "--input", str(path)], capsys)
    head = f"# bpipe schedule=x microbatches=1 stage_to_rank={'/'.join(['0'] * number)}"
    path.write_text(f"{head}\n0F0,0B0\n")
    assert message in refused(["schedule", "--input", str(path)], capsys)


@pytest.mark.parametrize(
    "row", ["-" * 300_000, "iteration" + " " * 300_000, "padded vocab (size: " * 30_000, " a " + "." * 300_000]
)
def test_long_lines_of_a_log_take_linear_time(row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.log"
    path.write_text(f"{'-' * 24} arguments {'-' * 24}\n{row}\n" * 2)
    assert "no iteration in it" in refused(["compare", str(path), str(path)], capsys)


def test_a_log_of_many_lines_takes_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    line = " iteration {}/ 100000 | elapsed time per iteration (ms): 10.5 | lm loss: 1.0 |\n"
    path.write_text("".join(map(line.format, range(10**5))))
    begin = time.process_time()
    assert main(["compare", str(path), str(path)]) == 0
    assert time.process_time() - begin < 30


def test_what_steers_a_terminal_is_shown_and_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A host name with escape sequences was printed raw, and a lone surrogate left an empty page."""
    folder = write_run(tmp_path / "run", num_stages=2, num_microbatches=4, iterations=(5, 6), cores=1)
    for path in folder.glob("record_*.jsonl"):
        first, _, rest = path.read_text().partition("\n")
        path.write_text(
            json.dumps({**json.loads(first), "host": "\x1b[2J\ud800\u202ehost", "device": "\x9b31m"}) + "\n" + rest
        )
    (folder / "failure.json").write_text(json.dumps({"rank": 0, "cause": "\x1b]0;title\x07\r"}))
    page = tmp_path / "page.html"
    assert main(["report", str(folder), "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "\\x1b[2J\\ud800\\u202ehost" in printed
    assert not re.search("[\x1b\x9b\u202e\ud800]", printed)
    assert "\\ud800" in page.read_text(encoding="utf-8")
    assert "\x1b" not in page.read_text(encoding="utf-8")


def test_an_error_shows_what_steers_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "none\x1b[31m", "none"]) == 2
    assert "none\\x1b[31m: " in capsys.readouterr().err


READERS = {
    "csv": Reader(judges.balanced_texts(write_csv), damaged_text, judges.judge_schedule),
    "json": Reader(judges.balanced_texts(write_json), damaged_json, judges.judge_schedule),
    "record": Reader(judges.record_texts, judges.damaged_record, judges.judge_record),
    "iterations": Reader(judges.report_texts, damaged_json, judges.judge_report),
    "log": Reader(judges.log_texts, damaged_text, judges.judge_log),
    "profile": Reader(judges.profile_texts, damaged_json, judges.judge_profile),
    "config": Reader(judges.config_texts, damaged_json, judges.judge_config),
    "cluster": Reader(judges.cluster_texts, judges.damaged_cluster, judges.judge_cluster),
    "captured": Reader(lambda _: [judges.CAPTURED], damaged_json, judges.judge_captured),
    "launch": Reader(lambda _: [judges.SOUND_LAUNCH], damaged_text, judges.judge_launch),
}


def _input(name: str, folder: Path) -> Path:
    """Return the path of the reader's input; a record is a folder."""
    path = folder / "input"
    if name == "record":
        path.mkdir()
    return path


def _judge_damaged(name: str, folder: Path, num_examples: int, derandomize: bool = False) -> Counter[str]:
    """Count accepted and refused inputs, by default different ones each time. The first failure raises."""
    reader, path, outcomes = READERS[name], _input(name, folder), Counter[str]()
    texts = reader.texts(path)

    @settings(
        max_examples=num_examples,
        phases=(Phase.reuse, Phase.generate),
        report_multiple_bugs=False,
        derandomize=derandomize or settings().derandomize,
        suppress_health_check=list(HealthCheck),
    )
    # A random generator: Hypothesis's own draws prefer the start of every list and hardly ever damage a file's rest.
    @given(st.randoms(use_true_random=True))
    def every(rng: random.Random) -> None:
        text = reader.damage(rng.choice(texts), rng)
        note(text[:2000])
        outcomes["accepted" if reader.judge(path, text, rng) else "refused"] += 1

    every()
    return outcomes


@pytest.mark.parametrize("name", READERS)
def test_a_few_damaged_inputs_are_refused_or_rightly_taken(name: str, tmp_path: Path) -> None:
    outcomes = _judge_damaged(name, tmp_path, 40)
    assert outcomes["refused"] > 0, "not everything is taken"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", READERS)
def test_two_thousand_damaged_inputs_are_refused_or_rightly_taken(name: str, tmp_path: Path) -> None:
    outcomes = _judge_damaged(name, tmp_path, 2000)
    assert outcomes["refused"] > 100
    assert outcomes["accepted"] > 0


@pytest.mark.parametrize("name", READERS)
def test_sound_inputs_are_taken(name: str, tmp_path: Path) -> None:
    reader, path = READERS[name], _input(name, tmp_path)
    for text in reader.texts(path):
        # Some draws align or balance the input, which fails for a schedule that has transfers already.
        assert any(reader.judge(path, text, random.Random(draw)) for draw in range(8)), text


@pytest.mark.parametrize("name", ["csv", "json"])
def test_a_judge_that_is_deceived_says_so(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the checker accepts everything, the judges object, or code that relies on it crashes."""
    from bpipe.schedule.check import rules

    monkeypatch.setattr(rules, "RULES", ())
    with pytest.raises((Wrong, ZeroDivisionError)):
        _judge_damaged(name, tmp_path, 2000, derandomize=True)
