"""Recomputation: texts and values both ways, and its bytes and seconds. `test_saved` compares bytes with Megatron's
layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpipe.predict.activations import again_bytes, stage_bytes
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layer_variants import Experts, Latent, LayerKind
from bpipe.predict.layers.layer import layer_bytes, layer_saved, layer_seconds
from bpipe.predict.layout import Setup
from bpipe.predict.matmul import exposed, gather_s
from bpipe.predict.model import PRESETS
from bpipe.predict.recompute import (
    METHODS,
    MODULES,
    NO_RECOMPUTATION,
    LayerScope,
    Recompute,
    read_recompute,
    stage_layers,
)
from bpipe.predict.sizes import sent_bytes, total
from bpipe.predict.training import Fp8

LLAMA = Setup(PRESETS["llama3-70b"], parse_cluster("h100-80g:8x8"), 8, 8, 1, 32, 8192, (10,) * 8, recompute="none")
BIASED = Setup(*(PRESETS["gpt3-96b"], parse_cluster("a100-80g:4x8"), 4, 8, 1, 128, 2048, (10,) * 8, "none", "unfused"))
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
def test_the_shortest_text_is_kept(text: str, short: str) -> None:
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
def test_unknown_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LLAMA, recompute=text)


def test_recomputation_that_megatron_lacks_is_refused() -> None:
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


@given(
    recompute=st.one_of(values(), st.builds(Recompute, method=st.sampled_from(METHODS), num_layers=st.integers(1, 9))),
    patterns=st.tuples(*[st.lists(st.integers(0, 1), min_size=1, max_size=4)] * 2),
    stages=st.lists(st.integers(0, 15), min_size=1, max_size=4),
)
def test_layers_of_a_stage_equal_a_count_one_by_one(
    recompute: Recompute, patterns: tuple[list[int], list[int]], stages: list[int]
) -> None:
    # At least one layer has experts.
    experts, windows = (*patterns[0], 1), tuple(patterns[1])
    model = replace(
        LLAMA.model, num_layers=60, experts=Experts(8, 2, 4096, pattern=experts), window=64, window_pattern=windows
    )
    result, first = stage_layers(model, recompute, tuple(stages)), 0
    for of_stage, number in zip(result, stages, strict=True):
        counts = Counter((model.kind(first + place), recompute.scope(place)) for place in range(number))
        assert {(kind, scope): count for kind, scope, count in of_stage if count} == counts
        first += number


def test_parts_of_a_gpus_layer_by_hand() -> None:
    """The MLP's input, both halves of its SwiGLU and their product are freed; its norm is in the same module."""
    tokens, hidden, ffn = 8192, 8192, 28672
    less = layer_bytes(LLAMA) - layer_bytes(LLAMA, "selective:mlp")
    assert less == 2 * tokens * (hidden + 3 * ffn) // 8
    assert again_bytes(replace(LLAMA, recompute="selective:mlp"), [LLAMA.model.kind(0)]) == less
    assert layer_bytes(LLAMA, "selective:layernorm") == layer_bytes(LLAMA), "no norm is a module of its own"
    # Two parts are independent of each other.
    both = layer_bytes(LLAMA) - layer_bytes(LLAMA, "selective:core_attn+mlp")
    assert both == less + layer_bytes(LLAMA) - layer_bytes(LLAMA, "selective")


def test_parts_of_experts_and_latent_attention_by_hand() -> None:
    """Recomputed up-projections keep what was projected down instead of queries, keys, values and the inputs and
    outputs of norms."""
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


def test_recomputed_parts_add_their_forward() -> None:
    """Together they take no more than a layer's forward; collectives that are waited for count, too."""

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
        seconds = [more(MIXED, part, kind) for part in parts]
        assert min(seconds) > 0
        assert more(MIXED, "+".join(parts), kind) == pytest.approx(sum(seconds))
        assert sum(seconds) < layer_seconds(MIXED, kind, NO_RECOMPUTATION)[0]
    assert 0 < more(MIXED, "moe_act", experts) < more(MIXED, "shared_experts", experts) < more(MIXED, "moe", experts)
    assert more(MIXED, "moe", dense) == more(MIXED, "mlp", experts) == 0
    # A gather before the first matrix and a scatter after the second.
    mlp = replace(LLAMA, recompute="selective:mlp")
    assert exposed(mlp).backward_s - exposed(LLAMA).backward_s == pytest.approx(2 * gather_s(LLAMA))
    apart = replace(LLAMA, sequence_parallel=False)
    assert exposed(replace(apart, recompute="selective:mlp")).backward_s - exposed(apart).backward_s == pytest.approx(
        2 * gather_s(LLAMA)
    )


def test_in_fp8_whole_layers_and_the_attention_core_are_modelled() -> None:
    low = replace(LLAMA, fp8=Fp8())
    for text in ("selective", "full", "full:uniform:2", "full:block:3"):
        assert stage_bytes(replace(low, recompute=text))[1] <= stage_bytes(replace(LLAMA, recompute=text))[1]
    with pytest.raises(
        ValueError, match="selective:mlp: in FP8 only core_attn is modelled: leave out the other parts, or FP8"
    ):
        replace(low, recompute="selective:mlp")
