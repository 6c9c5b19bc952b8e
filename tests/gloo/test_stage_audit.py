"""`--terra-audit N`: Megatron's own stages, looked at in a training of its own trainer, which computes what it would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gloo.conftest import ITERATIONS, ROOT, TINY, _free_ports, finish, start

LAUNCH = (str(ROOT / "pretrain_gpt.py"),)
STAGES = (*TINY, "--num-layers", "3", "--pipeline-model-parallel-size", "3", "--global-batch-size", "10", *ITERATIONS)


def losses(log: str) -> list[str]:
    """What the last rank says of each iteration, times left out."""
    return [line.partition("learning rate")[2] for line in log.splitlines() if "lm loss" in line]


@pytest.mark.timeout(330)
def test_stages_are_looked_at_and_train_as_they_would(tmp_path: Path) -> None:
    logs = []
    for case, flags in (("plain", ()), ("audited", ("--terra-audit", "3"))):
        folder = tmp_path / case
        folder.mkdir()
        outcome = finish(start(3, [*LAUNCH, *STAGES, *flags], folder, _free_ports(1)[0]), folder, 150)
        assert outcome.codes == [0] * 3, outcome.logs[0][-3000:]
        logs.append(outcome.logs)
    plain, audited = logs
    assert len(losses(plain[2])) == 3
    assert losses(audited[2]) == losses(plain[2])
    for rank, log in enumerate(audited):
        said = [line.partition(f"terra: rank {rank}, chunk 0: ")[2] for line in log.splitlines() if f"terra: rank {rank}, chunk 0" in line]
        assert said[0].startswith("3 micro-batches of "), log[-3000:]
        # Samples are made of numbers that Python holds, and the stage in the middle has none.
        assert any("gpt_dataset.py" in line for line in said) == (rank != 1)
        # Around dropout in attention Megatron's tracker compares states of random numbers on the host.
        assert any("tensor_parallel/random.py" in line for line in said)
    assert "terra: rank 0, chunk 0" not in plain[0]


@pytest.mark.timeout(90)
def test_what_we_move_is_not_taken_for_the_stages(tmp_path: Path) -> None:
    command = [*LAUNCH, *STAGES, "--terra-audit", "3", "--bpipe"]
    (process,) = start(1, command, tmp_path, _free_ports(1)[0], {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"})
    outcome = finish([process], tmp_path, 80)
    assert outcome.codes == [2]
    assert "--terra-audit with --bpipe: what we issue around a stage" in outcome.logs[0]
