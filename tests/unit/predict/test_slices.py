"""Slices of a sequence: what each saves, sends and takes, what is kept for them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from bpipe.plan.options import setup_from
from bpipe.plan.predict import predict
from bpipe.predict.activations import parts_of, sizes_of, stage_bytes
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.costs import lengths_of_equal_seconds, predict_costs
from bpipe.predict.layer_variants import Hybrid
from bpipe.predict.layers.layer import layer_seconds
from bpipe.predict.layout import Setup
from bpipe.predict.model import PRESETS
from bpipe.predict.profile import Entry, Profile
from bpipe.predict.sizes import sent_bytes
from bpipe.predict.slices import attention_share, kept_memory, slice_bounds, slice_setups
from bpipe.schedule.layout import WORK

# 64 heads and 8 groups of 128 channels, 8192 wide; 40 layers per stage.
WHOLE = Setup(PRESETS["llama3-70b"], parse_cluster("h100-80g:2x8"), 8, 2, 1, 4, 65536, (40, 40), recompute="none")
SLICED = replace(WHOLE, slices=4)
LENGTHS = (32768, 16384, 8192, 8192)
LISTED = replace(SLICED, slice_lengths=LENGTHS)


def test_slices_are_cut_as_the_trainer_cuts_them() -> None:
    assert slice_bounds(SLICED) == (0, 16384, 32768, 49152, 65536)
    assert slice_bounds(LISTED) == (0, 32768, 49152, 57344, 65536)
    work = slice_bounds(replace(SLICED, slice_lengths=WORK))
    assert all(length % 8 == 0 for length in work)
    # 2 * 8192 * (8192 + 1024) for Q, O, K, V and three matrices of 28672; scores and sums with 8192 channels.
    share = attention_share(65536, 8192, 8192, 1024, 28672, 3)
    assert share == 8192 * 65536 / (8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672 + 8192 * 65536)
    parts = [
        3 * (1 - share) * (end - begin) / 65536 + 3.5 * share * (end**2 - begin**2) / 65536**2
        for begin, end in pairwise(work)
    ]
    assert max(parts) - min(parts) < 1e-3


def test_lengths_that_do_not_make_a_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="3 lengths for 4 slices: give one for each"):
        slice_bounds(replace(SLICED, slice_lengths=(32768, 16384, 16384)))
    with pytest.raises(ValueError, match="a slice of 8193 tokens is not a multiple of 8"):
        slice_bounds(replace(SLICED, slice_lengths=(32768, 16384, 8193, 8191)))


@pytest.mark.parametrize("setup", [SLICED, LISTED], ids=["even", "listed"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_slices_save_together_what_the_whole_does_but_for_keys_and_values(setup: Setup, recompute: str) -> None:
    whole, sliced = replace(WHOLE, recompute=recompute), replace(setup, recompute=recompute)
    slices = slice_setups(sliced)
    keys = [0 if recompute == "full" else memory.keys_bytes for memory in kept_memory(sliced)]
    together = [sum(saved) for saved in zip(*map(stage_bytes, slices), strict=True)]
    # Without slices, a recomputed core gets values as a part of the projection, which is then kept besides rotated
    # queries and keys. Slices copy their values instead.
    rotated = 40 * 65536 * 2 * (64 + 8) * 128 // 8 if recompute == "selective" else 0
    assert together == [size - memory - rotated for size, memory in zip(stage_bytes(whole), keys, strict=True)]
    assert sum(map(sent_bytes, slices)) == sent_bytes(whole)
    assert [sent_bytes(piece) for piece in slices] == [
        sent_bytes(whole) * (end - begin) // 65536 for begin, end in pairwise(slice_bounds(sliced))
    ]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_lengths_of_equal_seconds_are_nearly_that(recompute: str) -> None:
    setup = replace(SLICED, recompute=recompute, sequence=131072, slices=8)
    lengths = lengths_of_equal_seconds(setup)
    assert sum(lengths) == 131072
    assert all(length % 256 == 0 for length in lengths)
    seconds = [sum(layer_seconds(piece)) for piece in slice_setups(replace(setup, slice_lengths=lengths))]
    assert max(seconds) < 1.05 * min(seconds)
    even = [sum(layer_seconds(piece)) for piece in slice_setups(setup)]
    assert max(even) > 2.5 * min(even)
    assert predicted_s(replace(setup, slice_lengths=lengths)) < 0.92 * predicted_s(setup)


def predicted_s(setup: Setup) -> float:
    return predict(setup).timing.iteration_s


def test_sizes_are_by_slice_and_host_buffers_have_a_reserve_where_they_differ() -> None:
    assert not SLICED.differs
    assert LISTED.differs
    assert replace(SLICED, sequence=65536 + 8).differs
    assert replace(SLICED, attention="unfused").differs
    assert not replace(SLICED, attention="unfused", recompute="selective").differs
    memory = sizes_of(LISTED, 2**20)
    assert (memory.slices, memory.reserved, len(memory.stages)) == (4, True, 8)
    assert memory.size(1, 2).moved_bytes < memory.size(1, 1).moved_bytes < memory.size(1, 4).moved_bytes
    # Some layers of even slices can be evicted; of others only all layers.
    assert parts_of(LISTED, 2**20) == ()
    assert [len(of_stage) for of_stage in parts_of(SLICED, 2**20)] == [8, 8]
    assert parts_of(SLICED, 2**20)[0][-1] == sizes_of(SLICED, 2**20).size(0, 0).moved_bytes


def test_what_is_not_modelled_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="slice lengths need slices: give slices, too"):
        replace(WHOLE, slice_lengths=WORK)
    with pytest.raises(ValueError, match="slices 4 and context parallel 2: a ring of context-parallel ranks"):
        replace(SLICED, cluster=parse_cluster("h100-80g:4x8"), context=2)
    with pytest.raises(ValueError, match="does not cut micro-batches into slices"):
        replace(SLICED, schedule="chimera", cluster=parse_cluster("h100-80g:4x8"), pipeline=4, layers=(20,) * 4)
    mamba = replace(
        WHOLE.model, num_layers=4, hybrid=Hybrid("M*-M", 128, 64, 8, 128), tied_embedding=False, linear_bias=False
    )
    with pytest.raises(
        ValueError, match="Mamba layers carry a state from token to token, but slices do not pass it on"
    ):
        replace(WHOLE, model=mamba, layers=(2, 2), slices=2)
    profile = Profile("p.json", (Entry(forward_s=1.0),))
    with pytest.raises(ValueError, match=r"p\.json: whole sequences were measured, but slices 4 take other"):
        profile.apply(SLICED, predict_costs(SLICED))


LAUNCH = (
    *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4", "--seq-length", "4096"),
    *("--max-position-embeddings", "4096", "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1"),
    *("--global-batch-size", "8", "--bf16"),
)


def test_a_launch_gives_its_slices() -> None:
    def read(*more: str) -> Setup:
        return setup_from([*LAUNCH, *more], "h100-80g:1x2", 1024, "gpu")

    assert read("--bpipe-slices", "4") == replace(read(), slices=4)
    work = read("--bpipe-slices", "4", "--bpipe-slice-lengths", "work")
    assert work == replace(read(), slices=4, slice_lengths=WORK)
    assert read("--bpipe-slices", "1") == read()
    with pytest.raises(ValueError, match="the lengths add up to 4095 tokens, but a sequence has 4096"):
        read("--bpipe-slices", "2", "--bpipe-slice-lengths", "2048,2047")
