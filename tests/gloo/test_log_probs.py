"""Log-probabilities of logits in shards between real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gloo.conftest import ROOT, finish, free_ports, start


@pytest.mark.timeout(120)
def test_log_probabilities_of_shards_are_those_of_the_whole(tmp_path: Path) -> None:
    processes = start(4, [str(ROOT / "tests/gloo/log_probs_worker.py")], tmp_path, free_ports(1)[0], None)
    outcome = finish(processes, tmp_path, 100)
    assert outcome.codes == [0] * 4, outcome.logs[0][-2000:]
