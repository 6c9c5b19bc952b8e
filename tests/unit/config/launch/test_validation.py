"""Launches judged by the installed Megatron: what it refuses is refused in its words, with the flags concerned, and
what it accepts is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main
from bpipe.config.launch import validation
from bpipe.config.launch.capture import write_launches
from bpipe.config.launch.megatron_command import devices_of, split_command

ROOT = Path(__file__).resolve().parents[4]
ON_48 = "torchrun --nnodes 6 --nproc-per-node 8 pretrain_gpt.py"
BASE = (
    f"{ON_48} --num-layers 48 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --vocab-size 32000 --bf16 --micro-batch-size 1"
)
EXPERTS = "--num-experts 8 --expert-model-parallel-size 2 --moe-grouped-gemm"
# Flags after BASE, and what the refusal says: a part of Megatron's message, and a flag.
_REFUSED = f"""
--pipeline-model-parallel-size 6 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 24: \
    should range in [PP=6 , M=3]; --global-batch-size 24
--pipeline-model-parallel-size 6 --num-layers-per-virtual-pipeline-stage 4 --global-batch-size 64: \
    The remainder of M; --global-batch-size 64
--pipeline-model-parallel-size 6 --global-batch-size 30: must be divisible by; --global-batch-size 30
--tensor-model-parallel-size 5 --pipeline-model-parallel-size 4: \
    world size (48) is not divisible; --tensor-model-parallel-size 5
--tp-comm-overlap --tensor-model-parallel-size 2: sequence parallelism is enabled; --tp-comm-overlap
--recompute-granularity selective --recompute-method uniform: \
    recompute method is not yet supported; --recompute-method uniform
--save here: save_interval is not None; --save here, --save-interval
--pipeline-model-parallel-size 6 --pipeline-model-parallel-layout Et*9|t*9|t*9|t*9|t*9|t*9L: \
    Number of decoder layers 54; --num-layers 48
{EXPERTS} --moe-shared-expert-intermediate-size 512 --moe-shared-expert-overlap: \
    only works with alltoall; --moe-shared-expert-overlap
"""
REFUSED = dict(re.split(r":\s+", row) for row in _REFUSED.strip().splitlines())
# Flags after BASE that only our trainer refuses, and a part of its message.
REFUSED_BY_THE_TRAINER = {
    "--pipeline-model-parallel-size 6 --bpipe-bound 3": "--bpipe-bound 3 says how to balance: give --bpipe too",
    "--pipeline-model-parallel-size 6 --bpipe-schedule v-half --num-layers 40": "cannot be divided into 12 equal",
    "--pipeline-model-parallel-size 6 --bpipe --bpipe-schedule 1f1b --bpipe-delay 2": "1f1b does not delay weight gradients",
}
# Flags after BASE with which a launch starts.
ACCEPTED = (
    *("", "--pipeline-model-parallel-size 6 --bpipe", "--pipeline-model-parallel-size 6 --fp8-format hybrid"),
    "--pipeline-model-parallel-size 6 --num-layers-per-virtual-pipeline-stage 4 --global-batch-size 48 --bpipe",
    "--pipeline-model-parallel-size 6 --bpipe-schedule bitpipe --global-batch-size 48",
    "--pipeline-model-parallel-size 6 --bpipe --bpipe-memory 70 --global-batch-size 48",
    f"--pipeline-model-parallel-size 4 {EXPERTS} --moe-token-dispatcher-type alltoall --global-batch-size 48",
    "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --context-parallel-size 2",
    "--tensor-model-parallel-size 2 --use-megatron-fsdp --ckpt-format fsdp_dtensor --use-distributed-optimizer",
    "--hybrid-layer-pattern M-M*|M-M-|M*M-|M-M- --pipeline-model-parallel-size 2 --global-batch-size 96",
    "--load there --save there --save-interval 10 --data-path a_document --tokenizer-model m --my-own-flag 3",
)


def _judged(launches: Sequence[str]) -> list[dict[str, Any]]:
    split = [split_command(launch.split()) for launch in launches]
    return judgements_of([(flags, devices_of(launcher)) for launcher, flags in split])


def judgements_of(asked: Sequence[tuple[Sequence[str], tuple[int, int] | None]]) -> list[dict[str, Any]]:
    """Return what the installed Megatron says of each launch (flags and devices), from one process."""
    ended = subprocess.run(
        [sys.executable, "-m", validation.PROGRAM],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    judgements: list[dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])["judgements"]
    return judgements


@pytest.fixture(scope="module")
def judgements() -> dict[str, dict[str, Any]]:
    cases = (*REFUSED, *REFUSED_BY_THE_TRAINER, *ACCEPTED)
    return dict(zip(cases, _judged([f"{BASE} {case}" for case in cases]), strict=True))


@pytest.mark.asks_megatron
@pytest.mark.skipif(not validation.is_installed(), reason="Megatron is not installed")
@pytest.mark.timeout(300)
class TestMegatron:
    @pytest.mark.parametrize("flags", REFUSED)
    def test_what_megatron_refuses_is_refused_in_its_words(
        self, flags: str, judgements: dict[str, dict[str, Any]]
    ) -> None:
        judgement = judgements[flags]
        assert judgement["unasked"] is None
        for part in REFUSED[flags].split("; "):
            assert part in judgement["megatron"]

    @pytest.mark.parametrize("flags", REFUSED_BY_THE_TRAINER)
    def test_what_the_trainer_refuses_is_refused(self, flags: str, judgements: dict[str, dict[str, Any]]) -> None:
        judgement = judgements[flags]
        assert (judgement["megatron"], judgement["unasked"]) == (None, None)
        assert REFUSED_BY_THE_TRAINER[flags] in " ".join(judgement["trainer"])

    @pytest.mark.parametrize("flags", ACCEPTED)
    def test_what_starts_is_not_refused(self, flags: str, judgements: dict[str, dict[str, Any]]) -> None:
        unknown = ["--my-own-flag"] if "--my-own-flag" in flags else []
        expected = {"unknown": unknown, "megatron": None, "trainer": [], "unasked": None}
        assert judgements[flags] == expected

    @pytest.mark.slow
    def test_the_examples_start(self) -> None:
        launches = []
        for script in ("train_gpt3_13b.sh", *(path.name for path in (ROOT / "examples").glob("*.sbatch"))):
            ended = subprocess.run(
                ["bash", str(ROOT / "examples" / script)],
                env={**os.environ, "DRY_RUN": "1"},
                capture_output=True,
                text=True,
                timeout=30,
                check=True,
            )
            launches.append(ended.stdout.strip())
        assert len(launches) == 4
        for launch, judgement in zip(launches, _judged(launches), strict=True):
            assert not any(judgement.values()), launch

    def test_every_command_refuses_what_megatron_refuses(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """`check-launch` called it supported, `simulate` predicted it and `plan` gave advice and exit status 0: 20
        layers, of which Megatron would train one."""
        words = f"{BASE} --num-layers 20 --pipeline-model-parallel-size 1 --decoder-last-pipeline-num-layers 1".split()
        file = tmp_path / "launch.json"
        file.write_text(write_launches([{"words": words, "environment": {}}]))
        assert main(["check-launch", "--launch", str(file)]) == 2
        printed = capsys.readouterr()
        assert "refused  Megatron  Mismatch: 19 middle layers remaining" in printed.out
        assert "\njudged by the parser and validation of megatron-core" in printed.out
        assert printed.out.endswith("this launch is refused: it would end at its start\n")
        assert printed.err == "asking Megatron's own parser and validation, about five seconds\n"
        for command in ("simulate", "fit", "plan"):
            assert main([command, "--cluster", "h100-80g", "--launch", str(file)]) == 2
            assert "bpipe: error: Megatron refuses this launch: Mismatch: 19 middle" in capsys.readouterr().err

    def test_a_plan_for_another_cut_only_tells_what_megatron_refuses(self, capsys: pytest.CaptureFixture[str]) -> None:
        few = "--pp 2 --mbs 1 --schedule 1f1b --balance none --recompute none --cp 1 --slices 1".split()
        launch = f"{BASE} --tensor-model-parallel-size 3 --global-batch-size 48".split()
        assert main(["plan", "--cluster", "h100-80g", *few, "--tp", "1", "--", *launch]) == 0
        assert "without the other options, Megatron refuses this launch: num_attention" in capsys.readouterr().out
        assert main(["plan", "--cluster", "h100-80g", "--", *launch]) == 2

    def test_flags_alone_need_not_be_a_whole_launch(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check-launch", "--", "--tp-comm-overlap", "--num-layers", "8"]) == 0
        lacks = "judged without Megatron: flags without --hidden-size, --num-attention-heads, --seq-length are no whole"
        assert lacks in capsys.readouterr().out


@pytest.mark.asks_megatron
def test_without_megatron_our_table_judges_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validation, "is_installed", lambda: False)
    validation.judge.cache_clear()
    assert main(["check-launch", "--format", "json", "--", *BASE.split(), "--num-layers", "7", "--fp16"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["judged_by"].startswith("judged without Megatron: it is not installed here; pip install")
    validation.judge.cache_clear()
