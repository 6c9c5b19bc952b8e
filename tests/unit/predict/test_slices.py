"""Slices of a sequence: what each saves, sends and takes, what is kept for them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from bpipe.balance.config import named_balance
from bpipe.balance.pairs import allocated_bytes
from bpipe.build import orders_of, unchecked
from bpipe.plan.options import setup_from
from bpipe.plan.predict import predict, simulation_of
from bpipe.predict.activations import activations, memory_of_setup, parts_of, sizes_of
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.costs import lengths_of_equal_seconds, predict_costs
from bpipe.predict.hybrid import Hybrid
from bpipe.predict.layer_counts import split_layers
from bpipe.predict.layers.attention import core_seconds
from bpipe.predict.layers.layer import layer_seconds
from bpipe.predict.layout import Setup
from bpipe.predict.memory import predict_memory
from bpipe.predict.model import PRESETS, gpt
from bpipe.predict.peak_counts import held_within
from bpipe.predict.profile import Entry, Profile
from bpipe.predict.rates import Rates
from bpipe.predict.saved_tensors import stage_bytes
from bpipe.predict.sizes import sent_bytes
from bpipe.predict.slice_lengths import attention_share
from bpipe.predict.slices import kept_memory, slice_bounds, slice_setups
from bpipe.predict.temporaries import working_bytes
from bpipe.schedule.families.families import FAMILIES, families_with_slices
from bpipe.schedule.layout import WORK
from bpipe.schedule.memory import KeptMemory, peak_of_order

# 64 heads and 8 groups of 128 channels, 8192 wide; 40 layers per stage.
WHOLE = Setup(PRESETS["llama3-70b"], parse_cluster("h100-80g:2x8"), 8, 2, 1, 4, 65536, (40, 40), recompute="none")
SLICED = replace(WHOLE, slices=4)
LENGTHS = (32768, 16384, 8192, 8192)
LISTED = replace(SLICED, slice_lengths=LENGTHS)


def test_slices_are_cut_as_the_trainer_cuts_them() -> None:
    assert slice_bounds(SLICED) == (0, 16384, 32768, 49152, 65536)
    assert slice_bounds(LISTED) == (0, 32768, 49152, 57344, 65536)
    work = slice_bounds(replace(SLICED, slice_lengths=WORK))
    assert all(one % 8 == 0 for one in work)
    # 2 * 8192 * (8192 + 1024) for Q, O, K, V and three matrices of 28672; scores and sums with 8192 channels.
    share = attention_share(65536, 8192, 8192, 1024, 28672, 3)
    assert share == 8192 * 65536 / (8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672 + 8192 * 65536)
    parts = [
        3 * (1 - share) * (end - begin) / 65536 + 3.5 * share * (end**2 - begin**2) / 65536**2
        for begin, end in pairwise(work)
    ]
    assert max(parts) - min(parts) < 1e-3


def test_lengths_that_are_no_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="3 lengths for 4 slices: give one for each"):
        slice_bounds(replace(SLICED, slice_lengths=(32768, 16384, 16384)))
    with pytest.raises(ValueError, match="a slice of 8193 tokens is not a multiple of 8"):
        slice_bounds(replace(SLICED, slice_lengths=(32768, 16384, 8193, 8191)))


def test_a_layer_keeps_all_keys_and_values_and_sums_in_32_bits() -> None:
    values = 65536 * 2 * 8 * 128 // 8
    assert kept_memory(SLICED) == (KeptMemory(40 * 2 * values, 40 * 4 * values),) * 2
    assert kept_memory(replace(SLICED, precision="fp32")) == (KeptMemory(40 * 4 * values, 40 * 4 * values),) * 2
    assert kept_memory(WHOLE) == ()


@pytest.mark.parametrize("setup", [SLICED, LISTED], ids=["even", "listed"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_slices_save_together_what_the_whole_does_but_for_keys_and_values(setup: Setup, recompute: str) -> None:
    whole, sliced = replace(WHOLE, recompute=recompute), replace(setup, recompute=recompute)
    slices = slice_setups(sliced)
    keys = [0 if recompute == "full" else kept.keys_bytes for kept in kept_memory(sliced)]
    together = [sum(saved) for saved in zip(*map(stage_bytes, slices), strict=True)]
    # A recomputed core of the whole is given values as a part of what was projected, which stays beside rotated
    # queries and keys. Slices copy their values to the others'.
    rotated = 40 * 65536 * 2 * (64 + 8) * 128 // 8 if recompute == "selective" else 0
    assert together == [size - kept - rotated for size, kept in zip(stage_bytes(whole), keys, strict=True)]
    assert sum(map(sent_bytes, slices)) == sent_bytes(whole)
    assert [sent_bytes(one) for one in slices] == [
        sent_bytes(whole) * (end - begin) // 65536 for begin, end in pairwise(slice_bounds(sliced))
    ]


def test_a_slice_of_unfused_attention_saves_scores_of_all_keys_so_far() -> None:
    whole = replace(WHOLE, attention="unfused", sequence=4096)
    first, second = slice_setups(replace(whole, slices=2))
    # 64 heads over 8 devices, 2 bytes.
    scores = 40 * 2 * 2048 * 2048 * 8
    assert stage_bytes(second)[0] - stage_bytes(first)[0] == scores


def test_a_slice_attends_to_the_triangle_and_the_square_before_it() -> None:
    """By flash attention, at half of the peak: 4 FLOPs a pair and channel, and what is copied to the kept keys."""
    rates = Rates.of(SLICED)
    for one, (begin, end) in zip(slice_setups(LISTED), pairwise(slice_bounds(LISTED)), strict=True):
        pairs = (end - begin) ** 2 / 2 + (end - begin) * begin
        flops = 4 * pairs * 64 * 128 / 8
        own, every = (tokens * 2 * 8 * 128 / 8 for tokens in (end - begin, end))
        forward = flops / rates.flash + 2 * 2 * own / rates.memory
        backward = 2.5 * flops / rates.flash + (10 * every + 6 * own) / rates.memory
        assert core_seconds(one, rates) == pytest.approx((forward, backward))
    inside = replace(SLICED, model=replace(SLICED.model, window=8192))
    # Beyond a window no token attends to more.
    first, *_, last = (core_seconds(one, rates, 8192)[0] for one in slice_setups(inside))
    pairs = 8192**2 / 2 + 8192 * 8192
    assert first == pytest.approx(4 * pairs * 1024 / rates.flash + 4 * 16384 * 256 / rates.memory)
    assert last == pytest.approx(4 * 16384 * 8192 * 1024 / rates.flash + 4 * 16384 * 256 / rates.memory)


def test_slices_take_together_as_long_as_the_whole_and_what_is_copied_and_read_again() -> None:
    costs, whole = predict_costs(LISTED), predict_costs(WHOLE)
    assert costs.slices == 4
    assert len(costs.stages) == 8
    for stage in range(2):
        of_slices = costs.of_stage(stage)
        forward, backward = (
            sum(getattr(cost, name) for cost in of_slices) for name in ("whole_forward_s", "whole_backward_s")
        )
        assert 1 <= forward / whole.of(stage).whole_forward_s < 1.02
        assert 1 <= backward / whole.of(stage).whole_backward_s < 1.03
        assert [cost.sent_bytes for cost in of_slices] == [2 * 8192 * tokens // 8 for tokens in LENGTHS]
        assert {cost.reduction_s for cost in of_slices} == {whole.of(stage).reduction_s}
    # Kernels that were slower by a tenth.
    slow = replace(LISTED, cluster=replace(LISTED.cluster, factor=1.1))
    assert predict_costs(slow).of(1, 3).forward_s == pytest.approx(1.1 * costs.of(1, 3).forward_s)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_lengths_of_equal_seconds_are_nearly_that(recompute: str) -> None:
    setup = replace(SLICED, recompute=recompute, sequence=131072, slices=8)
    lengths = lengths_of_equal_seconds(setup)
    assert sum(lengths) == 131072
    assert all(one % 256 == 0 for one in lengths)
    seconds = [sum(layer_seconds(one)) for one in slice_setups(replace(setup, slice_lengths=lengths))]
    assert max(seconds) < 1.05 * min(seconds)
    even = [sum(layer_seconds(one)) for one in slice_setups(setup)]
    assert max(even) > 2.5 * min(even)
    assert predicted_s(replace(setup, slice_lengths=lengths)) < 0.92 * predicted_s(setup)


def predicted_s(setup: Setup) -> float:
    return predict(setup).timing.iteration_s


def test_memory_of_1f1b_by_hand() -> None:
    """Two ranks, two micro-batches in two slices: rank 0 computes F0 F1 F2 B1 F3 B0 B3 B2, rank 1 F0 F1 B1 F2 B0 F3 B3
    B2."""
    setup = replace(WHOLE, slices=2, slice_lengths=(40960, 24576), global_batch=2)
    assert [str(action) for action in next(orders_of(setup.program()))][:4] == ["0F0", "0F1", "0F2", "0B1"]
    memory = memory_of_setup(setup)
    keys, sums = 40 * 2 * 65536 * 256, 40 * 4 * 65536 * 256
    (first, second), (last, end) = memory.sizes(0), memory.sizes(1)
    # While B1 runs: both micro-batches' keys, the first's sums, and three slices. When F3 runs B1 has given its own.
    rank_0 = 2 * keys + sums + 2 * first.saved_bytes + second.saved_bytes
    # While B1 runs: one micro-batch; while B0 runs the first slice of the next is there, too.
    rank_1 = max(keys + sums + last.saved_bytes + end.saved_bytes, 2 * keys + sums + 2 * last.saved_bytes)
    assert activations(setup) == ((rank_0, 0), (rank_1, 0))
    assert [row.activations_bytes for row in predict_memory(setup)] == [rank_0, rank_1]
    # The simulator, which knows when, says no more.
    found = simulation_of(setup)
    assert [found.peak_bytes(rank) for rank in range(2)] == [rank_0, rank_1]


def test_what_comes_and_goes_is_that_of_the_largest_slice() -> None:
    """The gradients of all keys come when those of the MLP's inside, which are more, are gone."""
    alone = replace(WHOLE, sequence=32768)
    keys = 2 * 65536 * 256
    assert keys < working_bytes(alone)[0]
    assert working_bytes(LISTED)[0] == working_bytes(alone)[0]


def test_sizes_are_by_slice_and_host_buffers_have_a_reserve_where_they_differ() -> None:
    assert not SLICED.differs
    assert LISTED.differs
    assert replace(SLICED, sequence=65536 + 8).differs
    assert replace(SLICED, attention="unfused").differs
    assert not replace(SLICED, attention="unfused", recompute="selective").differs
    memory = sizes_of(LISTED, 2**20)
    assert (memory.slices, memory.reserved, len(memory.stages)) == (4, True, 8)
    assert memory.size(1, 2).moved_bytes < memory.size(1, 1).moved_bytes < memory.size(1, 4).moved_bytes
    # Of even slices some layers may leave, of others all do.
    assert parts_of(LISTED, 2**20) == ()
    assert [len(of_stage) for of_stage in parts_of(SLICED, 2**20)] == [8, 8]
    assert parts_of(SLICED, 2**20)[0][-1] == sizes_of(SLICED, 2**20).size(0, 0).moved_bytes


def test_what_is_not_modelled_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="slice lengths need slices: give slices, too"):
        replace(WHOLE, slice_lengths=WORK)
    with pytest.raises(ValueError, match="slices 4 and context parallel 2: a ring of context-parallel ranks"):
        replace(SLICED, cluster=parse_cluster("h100-80g:4x8"), context=2)
    with pytest.raises(ValueError, match="does not cut micro-batches into slices, because its two pipes"):
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


def test_a_launch_says_its_slices() -> None:
    def read(*more: str) -> Setup:
        return setup_from([*LAUNCH, *more], "h100-80g:1x2", 1024, "gpu")

    assert read("--bpipe-slices", "4") == replace(read(), slices=4)
    work = read("--bpipe-slices", "4", "--bpipe-slice-lengths", "work")
    assert work == replace(read(), slices=4, slice_lengths=WORK)
    assert read("--bpipe-slices", "1") == read()
    with pytest.raises(ValueError, match="the lengths add up to 4095 tokens, but a sequence has 4096"):
        read("--bpipe-slices", "2", "--bpipe-slice-lengths", "2048,2047")


@pytest.mark.parametrize("schedule", families_with_slices().split(", "))
@pytest.mark.parametrize("balance", ["none", "bpipe"])
def test_counts_of_slices_are_what_their_orders_and_transfers_hold(schedule: str, balance: str) -> None:
    """Counted once for all sizes, the search of 2,048 devices does not walk an order for each of them. Layers that do
    not divide, so that stages differ."""
    family = FAMILIES[schedule]
    for pipeline, batch, slices in ((2, 4, 2), (3, 6, 4), (4, 8, 2)):
        chunks = family.min_chunks if family.max_chunks else 2
        layers = split_layers(2 * pipeline * chunks + 1, pipeline * chunks, allow_uneven=True)
        assert layers is not None
        model = gpt("odd", sum(layers), 1024, 16)
        setup = Setup(
            model,
            parse_cluster(f"h100-80g:1x{pipeline}"),
            1,
            pipeline,
            1,
            batch,
            8192,
            layers,
            schedule=schedule,
            num_chunks=chunks,
            slices=slices,
            balance=named_balance(balance),
            recompute="none",
        )
        memory, config = memory_of_setup(setup), setup.program()
        if balance == "none":
            held = tuple((peak_of_order(order, memory), 0) for order in orders_of(config))
        else:
            held = tuple(allocated_bytes(unchecked(config), rank, memory) for rank in range(pipeline))
        sizes = [(one.saved_bytes, one.after_input_bytes) for one in memory.stages[::slices]]
        saved, after = map(list, zip(*sizes, strict=True))
        kept = [list(one) for one in zip(*((one.keys_bytes, one.gradients_bytes) for one in memory.kept), strict=True)]
        assert tuple(one.num_bytes(saved, after, *kept) for one in held_within(config)) == held
