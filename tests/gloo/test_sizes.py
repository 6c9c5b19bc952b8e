"""Micro-batches of any size, between real processes: no bit differs and nothing hangs, whatever the sizes are."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.gloo.conftest import ROOT
from tests.gloo.sizes_worker import MICROBATCHES, RANKS

# Storages around the smallest that moves (512 bytes), the alignment, and a growing room; of none, one or several.
STORAGES = st.lists(st.sampled_from([1, 511, 512, 513, 1024, 4000, 30_000]), max_size=3)
ITERATIONS = st.lists(st.lists(STORAGES, min_size=MICROBATCHES, max_size=MICROBATCHES), min_size=1, max_size=2)
PATTERNS = st.fixed_dictionaries({"release": st.booleans(), "iterations": ITERATIONS})
# What comes second finds too little room and stays; by the third there is enough. Of 25 drawn patterns none may do so.
GROWS = {"release": True, "iterations": [[[size]] * MICROBATCHES for size in (1024, 30_000, 30_000)]}
# Longer than the ranks' own time-out, so that they say what they waited for.
ANSWER_S = 60.0


class Ranks:
    """All ranks of one start."""

    def __init__(self, pipes: list[tuple[TextIO, TextIO]]) -> None:
        self._pipes = pipes
        self.patterns = self.stayed = self.grown = 0

    def train(self, pattern: dict[str, Any]) -> list[dict[str, Any]]:
        for asked, _ in self._pipes:
            print(json.dumps(pattern), file=asked, flush=True)
        answers = []
        for rank, (_, answered) in enumerate(self._pipes):
            ready = select.select([answered], [], [], ANSWER_S)[0]
            line = answered.readline() if ready else ""
            assert line, f"rank {rank} {'ended' if ready else 'hangs'} at {pattern}"
            answers.append(json.loads(line))
        self.patterns += 1
        self.stayed += sum(each.get("microbatches", 0) for answer in answers for each in answer["stayed"])
        self.grown = max(self.grown, *(answer["grown"] for answer in answers))
        return answers


@contextmanager
def serving(transport: str, folder: Path) -> Iterator[Ranks]:
    """Ranks that serve patterns."""
    ends = [(os.pipe(), os.pipe()) for _ in range(RANKS)]
    theirs = [(asked[0], answers[1]) for asked, answers in ends]
    command = [
        sys.executable,
        "-m",
        "tests.gloo.sizes_worker",
        transport,
        str(folder),
        *(f"{a}:{b}" for a, b in theirs),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    passed = [each for both in theirs for each in both]
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, pass_fds=passed) as process:
        for each in passed:
            os.close(each)
        pipes = [(os.fdopen(asked[1], "w"), os.fdopen(answers[0])) for asked, answers in ends]
        try:
            yield Ranks(pipes)
            for asked, _ in pipes:
                asked.close()
            assert process.wait(60) == 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            for both in pipes:
                for pipe in both:
                    pipe.close()


def fuzz(transport: str, folder: Path, examples: int) -> Ranks:
    """Train so many random patterns; raises with the smallest that fails."""
    with serving(transport, folder) as ranks:

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(PATTERNS)
        @example(GROWS)
        def every(pattern: dict[str, Any]) -> None:
            for rank, answer in enumerate(ranks.train(pattern)):
                assert answer["wrong"] == [], f"rank {rank}: gradients differ"

        every()
    return ranks


@pytest.mark.timeout(180)
@pytest.mark.parametrize("transport", ["gloo", "peer"])
def test_a_few_patterns_of_sizes(transport: str, tmp_path: Path) -> None:
    ranks = fuzz(transport, tmp_path, 25)
    assert ranks.patterns >= 25
    assert ranks.stayed > 0, "no micro-batch was ever too large"
    assert ranks.grown > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transport", ["gloo", "peer"])
def test_a_thousand_patterns_of_sizes(transport: str, tmp_path: Path) -> None:
    ranks = fuzz(transport, tmp_path, 1000)
    print(
        f"{transport}: {ranks.patterns} patterns, {ranks.stayed} micro-batches stayed at home, grown {ranks.grown} "
        f"times"
    )
    assert ranks.patterns >= 1000
