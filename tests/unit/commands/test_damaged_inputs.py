"""Give every reader of `bpipe` damaged files: each is refused in one message, or rightly taken.

A reader fails where it ends in a traceback, hangs, refuses without naming the file, or takes what it must not: a
schedule that cannot be walked slot by slot or is not what the file says, a record with a value that no run can have. The
judges are slow, and share no code with the readers.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from bpipe.schedule.files.document import write_json
from bpipe.schedule.files.text import write_csv
from tests.support.readers import launches, predictions, records, runs
from tests.support.readers.damage import damaged_json, damaged_text
from tests.support.readers.outcome import Reader, Wrong
from tests.support.readers.schedules import balanced_texts, judge_schedule

READERS = {
    "csv": Reader(balanced_texts(write_csv), damaged_text, judge_schedule),
    "json": Reader(balanced_texts(write_json), damaged_json, judge_schedule),
    "record": Reader(records.texts, records.damaged, records.judge),
    "iterations": Reader(runs.report_texts, damaged_json, runs.judge_report),
    "log": Reader(runs.log_texts, damaged_text, runs.judge_log),
    "profile": Reader(predictions.profile_texts, damaged_json, predictions.judge_profile),
    "config": Reader(predictions.config_texts, damaged_json, predictions.judge_config),
    "cluster": Reader(predictions.cluster_texts, predictions.damaged_cluster, predictions.judge_cluster),
    "calibration": Reader(lambda _: [json.dumps(predictions.CALIBRATION)], damaged_json, predictions.judge_calibration),
    "trained": Reader(lambda _: [launches.TRAINED], damaged_text, launches.judge_trained),
    "captured": Reader(lambda _: [launches.CAPTURED], damaged_json, launches.judge_captured),
    "launch": Reader(lambda _: [launches.LAUNCH], damaged_text, launches.judge_launch),
}


def _input(name: str, folder: Path) -> Path:
    """Return where the reader's input lies: a record is a folder."""
    path = folder / "input"
    if name == "record":
        path.mkdir()
    return path


def _judge_damaged(name: str, folder: Path, num_examples: int, derandomize: bool = False) -> Counter[str]:
    """Return how many inputs were accepted and refused, by default others each time. Raises with the first that fails."""
    reader, path, outcomes = READERS[name], _input(name, folder), Counter[str]()
    texts = reader.texts(path)

    @settings(
        max_examples=num_examples,
        phases=(Phase.reuse, Phase.generate),
        report_multiple_bugs=False,
        derandomize=derandomize or settings().derandomize,
        suppress_health_check=list(HealthCheck),
    )
    # Seeds, not single draws: those prefer the first place of every list, and damage the rest of a file hardly ever.
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
    """The judges, too, take what nobody damaged."""
    reader, path = READERS[name], _input(name, tmp_path)
    for text in reader.texts(path):
        # Some draws ask for what a sound schedule with transfers refuses, too: to be aligned or balanced once more.
        assert any(reader.judge(path, text, random.Random(draw)) for draw in range(8)), text


@pytest.mark.parametrize("name", ["csv", "json"])
def test_a_judge_that_is_deceived_says_so(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a checker that takes everything, the judges object."""
    from bpipe.schedule.check import rules

    monkeypatch.setattr(rules, "RULES", ())
    with pytest.raises(Wrong):
        _judge_damaged(name, tmp_path, 2000, derandomize=True)
