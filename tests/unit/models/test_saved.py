"""What a forward saves: kernels `cpu` beside Megatron's own layers, to the byte, and by hand; those of a GPU are in test_memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bpipe.models.cluster import parse_cluster
from bpipe.models.layout import Setup
from bpipe.models.model import gpt
from bpipe.models.saved import layer_saved, moved_bytes, saves_input, stage_bytes, stage_saved, total

# That of the quickstart: 8 layers of 128, 4 heads, 256 tokens, a vocabulary of 512, 32 bit.
SMALL = Setup(
    model=gpt("small", 8, 128, 4, 512, 256),
    cluster=parse_cluster("a100-80g:8"),
    tensor=1,
    pipeline=8,
    micro_batch=2,
    global_batch=32,
    sequence=256,
    layers=(1,) * 8,
    recompute="none",
    attention="unfused",
    precision="fp32",
    kernels="cpu",
)


def test_a_layer_by_hand() -> None:
    """In units of sequence * micro-batch * hidden size, 4 bytes each: two norms, two matrices, ctx, two masks; QKV; GELU; three scores."""
    sbh = 256 * 2 * 128
    scores = 2 * 4 * 256 * 256
    statistics = 2 * 2 * 256 * 2
    assert total(layer_saved(SMALL)) == 4 * ((7 + 3 + 2 * 4) * sbh + 3 * scores + statistics) == 11018240


def test_first_and_last_stage_by_hand() -> None:
    saved = stage_bytes(SMALL)
    assert saved[1:7] == (11018240,) * 6
    assert saved[0] - saved[1] == 4 * 256 * 2 * 128, "the embedding's dropout mask; tokens are the data iterator's"
    tokens = 256 * 2
    assert saved[7] - saved[1] == tokens * (2 * 4 * 128 + 2 * 4 + 4 * 512 + 8 + 1) + 12


def test_stages_are_the_sums_of_their_rows() -> None:
    for kernels, setup in (("cpu", SMALL), ("gpu", replace(SMALL, kernels="gpu", precision="bf16", recompute="selective"))):
        assert tuple(total(stage_saved(setup, stage)) for stage in range(8)) == stage_bytes(setup), kernels


def test_small_storages_stay() -> None:
    assert stage_bytes(SMALL)[1] - moved_bytes(SMALL, 1, 65536) == 4 * 2048, "means and scales of two norms"
    assert moved_bytes(SMALL, 1, 1) == stage_bytes(SMALL)[1]


def test_a_cpus_rms_norm_keeps_a_copy_of_its_input() -> None:
    llama = replace(SMALL, model=replace(SMALL.model, rms_norm=True))
    assert saves_input(llama)
    assert not saves_input(replace(llama, precision="bf16"))
    assert saves_input(replace(llama, precision="bf16", recompute="full"))


def test_a_cpu_has_no_flash_attention() -> None:
    with pytest.raises(ValueError, match="kernels cpu compute attention unfused"):
        replace(SMALL, attention="flash")
    with pytest.raises(ValueError, match="unknown kernels 'tpu'"):
        replace(SMALL, kernels="tpu")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_storage_is_megatrons_own() -> None:
    """First, inner and last stage; fp32 and bf16; every recomputation; tensor parallel with and without sequence parallelism; LLaMA."""
    program = Path(__file__).with_name("check_saved.py")
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=220, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert ended.stdout.splitlines()[-1] == "93 cases, 0 differ"
