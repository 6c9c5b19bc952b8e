"""What is recomputed: texts and values both ways, and what follows for bytes and seconds; bytes beside Megatron's
layers are in `test_saved`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpipe.predict.activations import parts_of
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.costs import predict_costs
from bpipe.predict.fp8 import Fp8
from bpipe.predict.layer_variants import Experts, Latent, LayerKind
from bpipe.predict.layers.layer import layer_bytes, layer_saved, layer_seconds
from bpipe.predict.layout import Setup
from bpipe.predict.memory import predict_memory
from bpipe.predict.model import PRESETS, Model
from bpipe.predict.recompute import (
    METHODS,
    MODULES,
    NO_RECOMPUTATION,
    WHOLE_LAYER,
    LayerScope,
    Recompute,
    read_recompute,
    stage_layers,
)
from bpipe.predict.saved_tensors import again_bytes, moved_bytes, stage_bytes, stage_saved
from bpipe.predict.sizes import sent_bytes, total
from bpipe.predict.temporaries import working_bytes
from bpipe.predict.tensor_parallel import exposed, gather_s

LLAMA = Setup(PRESETS["llama3-70b"], parse_cluster("h100-80g:8x8"), 8, 8, 1, 32, 8192, (10,) * 8, recompute="none")
BIASED = Setup(
    PRESETS["gpt3-96b"],
    parse_cluster("a100-80g:4x8"),
    4,
    8,
    1,
    128,
    2048,
    (10,) * 8,
    recompute="none",
    attention="unfused",
)
MIXED = replace(
    LLAMA,
    model=replace(
        LLAMA.model,
        name="mixed",
        experts=Experts(8, 2, 4096, shared_size=4096, pattern=(0, 0, 1)),
        num_query_groups=64,
        latent=Latent(1536, 512, 128, 64, 128),
    ),
)
BLOCKS = [f"full:block:{number}" for number in range(1, 11)]


@st.composite
def values(draw: st.DrawFn) -> Recompute:
    if draw(st.booleans()):
        return Recompute(tuple(draw(st.permutations(draw(st.lists(st.sampled_from(MODULES), unique=True))))))
    return Recompute(method=draw(st.sampled_from(METHODS)), num_layers=draw(st.integers(1, 10_000)))


@given(values())
def test_a_text_is_its_value_and_a_value_its_text(value: Recompute) -> None:
    assert read_recompute(value.text) == value


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("none", "none"),
        ("selective", "selective"),
        ("full", "full"),
        ("selective:core_attn", "selective"),
        ("full:uniform:1", "full"),
        ("full:block:0", "none"),
        ("full:block:3", "full:block:3"),
        ("selective:layernorm+core_attn+mlp", "selective:core_attn+mlp+layernorm"),
    ],
)
def test_of_several_texts_the_shortest_is_kept(text: str, short: str) -> None:
    assert read_recompute(text).text == short
    assert replace(LLAMA, recompute=text) == replace(LLAMA, recompute=short)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all", "unknown recompute 'all': choose from none, selective, full, full:uniform:N"),
        ("full:block", "unknown recompute"),
        ("full:block:-1", "unknown recompute"),
        ("selective:", "unknown recompute"),
        ("full:uniform:0", "0 layers to recompute: give 1 to 10000, or none for no layer"),
        ("full:every:2", "unknown method of recomputation 'every': choose from uniform, block"),
        ("selective:norms", "unknown part of a layer to recompute 'norms': choose from core_attn, mlp"),
        ("selective:moe", "llama3-70b has no experts: leave moe out"),
        ("selective:mla_up_proj", "llama3-70b has no latent attention"),
    ],
)
def test_what_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LLAMA, recompute=text)


def test_what_megatron_cannot_is_refused() -> None:
    with pytest.raises(
        ValueError, match="Megatron hangs when an MLP with biases is recomputed: leave mlp out or the biases"
    ):
        replace(BIASED, recompute="selective:mlp")
    with pytest.raises(ValueError, match="parts of layers and whole layers cannot both be recomputed"):
        Recompute(("mlp",), "block", 2)
    small = replace(
        LLAMA,
        tensor=1,
        pipeline=8,
        global_batch=64,
        attention="unfused",
        model=replace(LLAMA.model, experts=Experts(8, 2, 96)),
    )
    with pytest.raises(ValueError, match="only in grouped products: leave moe_act out"):
        replace(small, kernels="cpu", recompute="selective:moe_act")


@pytest.mark.parametrize("setup", [LLAMA, BIASED, MIXED], ids=lambda setup: setup.model.name)
def test_block_goes_from_none_to_full_and_saves_less_with_every_layer(setup: Setup) -> None:
    """And takes longer with every layer."""
    every = [replace(setup, recompute=text) for text in ("none", *BLOCKS, "full")]
    saved = [stage_bytes(one) for one in every]
    assert stage_bytes(replace(setup, recompute="full:block:0")) == saved[0]
    assert saved[-2] == saved[-1] == stage_bytes(replace(setup, recompute="full:block:99"))
    assert predict_memory(every[-2]) == predict_memory(every[-1])
    for more, less in pairwise(saved[:-1]):
        assert all(one > other for one, other in zip(more, less, strict=True))
    seconds = [predict_costs(one).stages for one in every]
    for stage in range(setup.num_stages):
        backwards = [of_stages[stage].backward_s for of_stages in seconds]
        assert backwards[:-1] == sorted(set(backwards[:-1]))
        assert backwards[-2] == pytest.approx(backwards[-1])
        assert len({of_stages[stage].forward_s for of_stages in seconds}) <= 2, (
            "forwards are the same, but for rounding"
        )


def test_a_block_is_so_many_layers_of_either_kind() -> None:
    """Of each stage the first ones, whatever these are."""
    block = replace(LLAMA, recompute="full:block:3")
    none, full = layer_bytes(LLAMA, "none"), layer_bytes(LLAMA, "full")
    assert stage_bytes(block)[1] == 3 * full + 7 * none
    experts, dense = LayerKind(True), LayerKind(False)
    assert replace(MIXED, recompute="full:block:3").stage_layers[0] == (
        (dense, WHOLE_LAYER, 2),
        (experts, WHOLE_LAYER, 1),
        (dense, NO_RECOMPUTATION, 5),
        (experts, NO_RECOMPUTATION, 2),
    )
    # The eleventh layer is the second of three.
    assert replace(MIXED, recompute="full:block:2").stage_layers[1][:2] == (
        (dense, WHOLE_LAYER, 1),
        (experts, WHOLE_LAYER, 1),
    )
    chunked = replace(LLAMA, num_chunks=2, layers=(5,) * 16, schedule="interleaved-1f1b", recompute="full:block:3")
    assert stage_bytes(chunked)[1] == 3 * full + 2 * none, "of every chunk"


@given(
    recompute=st.one_of(values(), st.builds(Recompute, method=st.sampled_from(METHODS), num_layers=st.integers(1, 9))),
    patterns=st.tuples(*[st.lists(st.integers(0, 1), min_size=1, max_size=4)] * 2),
    stages=st.lists(st.integers(0, 15), min_size=1, max_size=4),
)
def test_layers_are_counted_as_one_after_the_other_would_be(
    recompute: Recompute, patterns: tuple[list[int], list[int]], stages: list[int]
) -> None:
    # Some layer has experts.
    experts, windows = (*patterns[0], 1), tuple(patterns[1])
    model = replace(
        LLAMA.model, num_layers=60, experts=Experts(8, 2, 4096, pattern=experts), window=64, window_pattern=windows
    )
    found, first = stage_layers(model, recompute, tuple(stages)), 0
    for of_stage, number in zip(found, stages, strict=True):
        every = Counter((model.kind(first + place), recompute.scope(place)) for place in range(number))
        assert {(kind, scope): count for kind, scope, count in of_stage if count} == every
        first += number


@pytest.mark.parametrize("model", [LLAMA.model, MIXED.model], ids=["alike", "in a pattern"])
@pytest.mark.parametrize("text", ["none", "full", "full:block:3", "full:uniform:4", "selective"])
def test_many_layers_are_counted(model: Model, text: str) -> None:
    """A damaged config.json said 300 million, and for a minute nothing was answered: no model has more than ten
    thousand."""
    many = replace(model, num_layers=10**4)
    (stage,) = stage_layers(many, read_recompute(text), (10**4,))
    assert sum(count for _, _, count in stage) == 10**4
    with pytest.raises(ValueError, match="num_layers is 10001, but must be at most 10000"):
        replace(model, num_layers=10**4 + 1)


def test_uniform_keeps_an_input_of_every_group() -> None:
    four, input_bytes = replace(LLAMA, recompute="full:uniform:4"), sent_bytes(LLAMA)
    assert stage_bytes(four)[1] == 3 * input_bytes
    assert again_bytes(four) == 4 * layer_bytes(LLAMA, "none") - input_bytes
    assert again_bytes(replace(LLAMA, recompute="full:uniform:99")) == 10 * layer_bytes(LLAMA, "none") - input_bytes
    # Larger groups need more at work than they spare, and take as long.
    costs = predict_costs(four).stages[1], predict_costs(replace(LLAMA, recompute="full")).stages[1]
    assert costs[0].backward_s == pytest.approx(costs[1].backward_s)
    assert working_bytes(four)[0] - working_bytes(replace(LLAMA, recompute="full"))[0] == 3 * layer_bytes(LLAMA, "none")


def test_parts_of_a_gpus_layer_by_hand() -> None:
    """Of a SwiGLU's both halves and its product; the norm before it is in the same module."""
    tokens, hidden, ffn = 8192, 8192, 28672
    less = layer_bytes(LLAMA) - layer_bytes(LLAMA, "selective:mlp")
    assert less == 2 * tokens * (hidden + 3 * ffn) // 8
    assert again_bytes(replace(LLAMA, recompute="selective:mlp")) == less
    assert layer_bytes(LLAMA, "selective:layernorm") == layer_bytes(LLAMA), "no norm is a module of its own"
    # Two parts do not know of each other.
    both = layer_bytes(LLAMA) - layer_bytes(LLAMA, "selective:core_attn+mlp")
    assert both == less + layer_bytes(LLAMA) - layer_bytes(LLAMA, "selective")


def test_parts_of_experts_and_latent_attention_by_hand() -> None:
    """Up-projections keep what was projected down, in place of queries, keys, values and the inputs and outputs of
    norms."""
    dense, experts = LayerKind(False), LayerKind(True)
    rows = {name: num * nbytes for name, nbytes, num in layer_saved(MIXED, "none", experts)}

    def less(part: str, kind: LayerKind) -> int:
        return total(layer_saved(MIXED, "none", kind)) - total(layer_saved(MIXED, f"selective:{part}", kind))

    hidden = sent_bytes(MIXED)
    assert (less("layernorm", dense), less("layernorm", experts)) == (hidden, 2 * hidden)
    assert less("moe_act", experts) == rows["inputs of experts' second matrices"]
    shared = rows["input of the shared experts' activation function"] + rows["inside of the shared experts"]
    assert less("shared_experts", experts) == shared
    around = {
        "inputs of norms and of the matrices behind them",
        "Q, K, V",
        "input of the output projection",
        "log-sum-exp of attention",
    }
    latents = "inputs of the norms of what is projected down, and of the matrices behind"
    assert less("moe", experts) == sum(rows.values()) - sum(rows[name] for name in {*around, latents})
    assert less("moe+shared_experts+moe_act", experts) == less("moe", experts)
    assert (less("moe", dense), less("mlp", experts)) == (0, 0)
    down = 2 * 8192 * (1536 + 512 + 64) // 8 + 2 * 8192 * 64
    assert less("mla_up_proj", dense) == less("mla_up_proj", experts) == rows["Q, K, V"] + rows[latents] - down


def test_parts_take_their_forward_again() -> None:
    """All of them no more than the layer; what is waited for on links, too."""

    def more(setup: Setup, part: str, kind: LayerKind) -> float:
        scope = LayerScope(frozenset(part.split("+")))
        forward, backward = layer_seconds(setup, kind, scope)
        plain = layer_seconds(setup, kind, NO_RECOMPUTATION)
        assert forward == plain[0]
        return backward - plain[1]

    dense, experts = LayerKind(False), LayerKind(True)
    for kind, parts in (
        (dense, ("core_attn", "mlp", "layernorm", "mla_up_proj")),
        (experts, ("core_attn", "moe", "layernorm", "mla_up_proj")),
    ):
        each = [more(MIXED, part, kind) for part in parts]
        assert min(each) > 0
        assert more(MIXED, "+".join(parts), kind) == pytest.approx(sum(each))
        assert sum(each) < layer_seconds(MIXED, kind, NO_RECOMPUTATION)[0]
    assert 0 < more(MIXED, "moe_act", experts) < more(MIXED, "shared_experts", experts) < more(MIXED, "moe", experts)
    assert more(MIXED, "moe", dense) == more(MIXED, "mlp", experts) == 0
    # A gather before the first matrix and a scatter behind the second.
    mlp = replace(LLAMA, recompute="selective:mlp")
    assert exposed(mlp).backward_s - exposed(LLAMA).backward_s == pytest.approx(2 * gather_s(LLAMA))
    apart = replace(LLAMA, sequence_parallel=False)
    assert exposed(replace(apart, recompute="selective:mlp")).backward_s - exposed(apart).backward_s == pytest.approx(
        2 * gather_s(LLAMA)
    )


def test_what_leaves_of_layers_that_differ_is_never_more_than_all() -> None:
    for text in ("full:block:3", "full:uniform:3", "selective:mlp"):
        setup = replace(LLAMA, recompute=text)
        for stage, parts in enumerate(parts_of(setup, 1)):
            assert list(parts) == sorted(set(parts))
            assert parts[-1] == moved_bytes(setup, stage, 1)


def test_a_received_input_that_the_loop_shares_stays() -> None:
    """A norm that is recomputed keeps another tensor of what a stage has received."""
    model: Model = replace(BIASED.model, linear_bias=False)
    cpu = replace(BIASED, model=model, kernels="cpu", recompute="selective:layernorm")
    stays = [total(stage_saved(cpu, stage)) - moved_bytes(cpu, stage, 1) for stage in range(8)]
    assert stays == [0, *(sent_bytes(cpu),) * 7]


def test_in_fp8_whole_layers_and_the_attention_core_are_modelled() -> None:
    low = replace(LLAMA, fp8=Fp8())
    for text in ("selective", "full", "full:uniform:2", "full:block:3"):
        assert stage_bytes(replace(low, recompute=text))[1] <= stage_bytes(replace(LLAMA, recompute=text))[1]
    with pytest.raises(
        ValueError, match="selective:mlp: in FP8 only core_attn is modelled: leave out the other parts, or FP8"
    ):
        replace(low, recompute="selective:mlp")
