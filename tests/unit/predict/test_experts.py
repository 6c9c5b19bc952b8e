"""Experts and latent attention: parameters as published, FLOPs as Megatron counts them, bytes by hand, what travels,
what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bpipe.predict.cluster import parse_cluster
from bpipe.predict.costs import predict_costs
from bpipe.predict.expert_parallel import exchange
from bpipe.predict.flops import training_flops
from bpipe.predict.layer_variants import EVERY_LAYER, Experts, Latent, LayerKind, Routing, read_pattern, write_pattern
from bpipe.predict.layers.layer import layer_saved, layer_seconds
from bpipe.predict.layout import Setup
from bpipe.predict.memory import predict_memory
from bpipe.predict.model import Model
from bpipe.predict.parameters import num_active_parameters, num_parameters
from bpipe.predict.saved_tensors import stage_bytes, stage_saved
from bpipe.predict.sizes import total
from bpipe.predict.states import rank_experts, rank_parameters, stage_experts
from tests.unit.predict.published import DEEPSEEK_V2, DEEPSEEK_V3, MIXTRAL_8X7B, MIXTRAL_8X22B, QWEN3_30B, QWEN3_235B

# Billions, of all and of those that a token meets.
PUBLISHED = [
    (MIXTRAL_8X7B, 46.7, 12.9),
    (MIXTRAL_8X22B, 141.0, 39.0),
    (DEEPSEEK_V3, 671.0, 37.0),
    (DEEPSEEK_V2, 236.0, 21.0),
    (QWEN3_30B, 30.5, 3.3),
    (QWEN3_235B, 235.0, 22.0),
]


@pytest.mark.parametrize(("model", "every", "active"), [pytest.param(*row, id=row[0].name) for row in PUBLISHED])
def test_as_many_parameters_as_published(model: Model, every: float, active: float) -> None:
    assert num_parameters(model) / 1e9 == pytest.approx(every, rel=0.004)
    # Some publishers leave one embedding out of what a token meets.
    embedding = model.vocabulary * model.hidden_size / 1e9
    assert active - 0.5 < num_active_parameters(model) / 1e9 < active + embedding + 0.5


def test_deepseeks_parameters_by_hand() -> None:
    """Shape by shape, as its safetensors have them."""
    hidden, heads = 7168, 128
    attention = (
        hidden * 1536 + 1536 + 1536 * heads * 192 + hidden * (512 + 64) + 512 + 512 * heads * 256 + heads * 128 * hidden
    )
    dense, expert = 3 * hidden * 18432, 3 * hidden * 2048
    layers = 61 * (attention + 2 * hidden) + 3 * dense + 58 * (257 * expert + 256 * hidden)
    assert num_parameters(DEEPSEEK_V3) == layers + 2 * 129280 * hidden + hidden == 671_026_404_352


def setup_of(model: Model, t: int = 1, p: int = 4, devices: str = "h100-80g:4x8", **changes: Any) -> Setup:
    each, rest = divmod(model.num_layers, p)
    layers = tuple(each + (place < rest) for place in range(p))
    values = {"micro_batch": 1, "global_batch": 256, "sequence": model.sequence, "recompute": "none", **changes}
    return Setup(model=model, cluster=parse_cluster(devices), tensor=t, pipeline=p, layers=layers, **values)


@pytest.mark.parametrize("model", [row[0] for row in PUBLISHED], ids=[row[0].name for row in PUBLISHED])
def test_flops_are_megatrons(
    model: Model, megatron_flops: Callable[..., float], megatron_args: Callable[[Any], Any]
) -> None:
    args = megatron_args(setup_of(model))
    assert training_flops(model, 256, model.sequence, vocabulary=args.padded_vocab_size) == pytest.approx(
        megatron_flops(args, 256), rel=1e-12
    )


def test_experts_are_divided_in_their_own_way() -> None:
    """Of Mixtral's layers on p = 4: eight experts, over ep = 8 one per device, over etp = 2 a half."""
    plain = setup_of(MIXTRAL_8X7B)
    expert = 3 * 4096 * 14336
    assert stage_experts(plain) == (8 * 8 * expert,) * 4
    assert stage_experts(replace(plain, routing=Routing(8))) == (8 * expert,) * 4
    assert stage_experts(replace(plain, tensor=2, routing=Routing(4, 2))) == (8 * expert,) * 4
    # Megatron divides each by tensor parallelism unless it is told otherwise.
    assert stage_experts(replace(plain, tensor=2)) == (8 * 8 * expert // 2,) * 4
    assert stage_experts(replace(plain, tensor=2, routing=Routing(1, 1))) == (8 * 8 * expert,) * 4


def test_optimizer_shards_of_experts_are_fewer() -> None:
    """d = 8 and ep = 8: every device has other experts, whose state nobody shares."""
    setup = setup_of(MIXTRAL_8X7B, routing=Routing(8))
    assert (setup.replicas, setup.expert_replicas) == (8, 1)
    (row, *_), (count, *_), (experts, *_) = predict_memory(setup), rank_parameters(setup), rank_experts(setup)
    assert row.optimizer_bytes == -(-12 * (count - experts) // 8) + 12 * experts
    assert row.weights_bytes == 2 * count


def test_saved_bytes_of_a_layer_by_hand() -> None:
    """Two bytes a value: of 4096 tokens, each twice in experts, hidden, gate and up, and their product."""
    rows = {row.name: row for row in layer_saved(setup_of(MIXTRAL_8X7B))}
    copies = 4096 * 2
    assert rows["inputs of experts"].nbytes == 2 * copies * 4096
    assert rows["inputs of experts' activation functions"].nbytes == 2 * copies * 2 * 14336
    assert rows["inputs of experts' second matrices"].nbytes == 2 * copies * 14336
    assert "input of the second MLP matrix" not in rows
    # Even loads: with experts elsewhere as many tokens come as leave. Divided experts see all tokens of those who share
    # them.
    assert total(layer_saved(setup_of(MIXTRAL_8X7B, routing=Routing(8)))) == total(tuple(rows.values()))
    halved = {row.name: row for row in layer_saved(setup_of(MIXTRAL_8X7B, 2))}
    assert halved["inputs of experts"].nbytes == rows["inputs of experts"].nbytes
    assert halved["inputs of experts' second matrices"].nbytes == rows["inputs of experts' second matrices"].nbytes // 2


def test_a_capacity_bounds_and_pads() -> None:
    def inputs(routing: Routing) -> int:
        return next(
            row.nbytes
            for row in layer_saved(setup_of(MIXTRAL_8X7B, routing=routing))
            if row.name == "inputs of experts"
        )

    free = inputs(Routing())
    assert inputs(Routing(capacity=1.5)) == free
    assert inputs(Routing(capacity=0.5)) == free // 2
    assert inputs(Routing(capacity=1.5, padded=True)) == free * 3 // 2


def test_what_may_differ_has_a_reserve() -> None:
    assert setup_of(MIXTRAL_8X7B).differs
    assert not setup_of(MIXTRAL_8X7B, routing=Routing(capacity=1.0, padded=True)).differs
    assert not setup_of(replace(MIXTRAL_8X7B, experts=None)).differs


def test_latent_attention_by_hand() -> None:
    """Queries and keys of 192 and values of 128 a head; both ranks twice; what attention gives."""
    rows = {row.name: row for row in layer_saved(setup_of(DEEPSEEK_V3, devices="h100-80g:16x8"))}
    assert rows["Q, K, V"].nbytes == 2 * 4096 * 128 * (192 + 192 + 128)
    assert rows["input of the output projection"].nbytes == 2 * 4096 * 128 * 128
    latent = rows["inputs of the norms of what is projected down, and of the matrices behind"]
    assert (latent.nbytes, latent.num) == (2 * 4096 * (1536 + 512), 2)


def test_stages_have_the_kinds_of_their_layers() -> None:
    """DeepSeek's first three layers are dense, so its first stage saves less."""
    setup = setup_of(DEEPSEEK_V3, p=4, devices="h100-80g:16x8", routing=Routing(32))
    assert setup.stage_kinds[0] == ((LayerKind(False), 3), (LayerKind(True), 13))
    assert setup.stage_kinds[1] == ((LayerKind(True), 15),)
    assert tuple(total(stage_saved(setup, stage)) for stage in range(4)) == stage_bytes(setup)
    seconds = [stage.forward_s for stage in predict_costs(setup).stages]
    assert seconds[1] == pytest.approx(15 * layer_seconds(setup, LayerKind(True))[0])
    assert seconds[0] == pytest.approx(
        13 * layer_seconds(setup, LayerKind(True))[0] + 3 * layer_seconds(setup, LayerKind(False))[0]
    )


def test_tokens_on_their_way() -> None:
    """Within a node NVLink has seven eighths of what is sent; over two nodes a device's port has half of it, and
    takes longer."""
    assert exchange(setup_of(MIXTRAL_8X7B, routing=Routing(1))).seconds == 0
    inside = exchange(setup_of(MIXTRAL_8X7B, routing=Routing(8)))
    sent = 4096 * 2 * 4096 * 2
    assert inside.between_s == 0
    assert inside.seconds == pytest.approx(sent * 7 / 8 / (450e9 * 0.77) + 20e-6)
    halves = exchange(setup_of(MIXTRAL_8X7B, devices="h100-80g:8x4", routing=Routing(8)))
    assert halves.between_s == pytest.approx(sent / 2 / (50e9 * 0.77))
    # Each token once to the other node, where three quarters and more have an expert: of 2 of 8.
    once = exchange(setup_of(MIXTRAL_8X7B, devices="h100-80g:8x4", routing=Routing(8, dispatcher="flex")))
    assert once.between_s == pytest.approx(halves.between_s * (1 - 6 / 28))
    everything = exchange(setup_of(MIXTRAL_8X7B, routing=Routing(8, dispatcher="allgather")))
    assert everything.seconds == pytest.approx(4096 * 4096 * 2 * 7 / (450e9 * 0.77) + 20e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routing": Routing(3)}, "expert parallel 3 does not divide the 8 experts"),
        ({"routing": Routing(8), "p": 8}, r"does not divide t\*d = 4"),
        ({"t": 2, "sequence_parallel": False}, "need sequence parallelism: give"),
        ({"schedule": "chimera"}, "two pipes, for which experts are not modelled"),
        ({"model": replace(MIXTRAL_8X7B, experts=None), "routing": Routing(2)}, "has no experts"),
        (
            {"model": DEEPSEEK_V3, "kernels": "cpu", "attention": "unfused"},
            "CPU kernels are not modelled with .* latent attention",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        setup_of(**{"model": MIXTRAL_8X7B, **changes})


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("1", EVERY_LAYER),
        ("2", (1, 0)),
        ("[0]*3+[1]*58", (0,) * 3 + (1,) * 58),
        ("([0]+[1]*3)*4", (0, 1, 1, 1)),
        ("([1]*3+[0]*1)*3", (1, 1, 1, 0)),
        ("[0,1]*24", (0, 1)),
    ],
)
def test_patterns_are_megatrons(text: str, pattern: tuple[int, ...]) -> None:
    assert read_pattern(text) == pattern
    num_layers = len(pattern) * 4 if len(pattern) < 60 else len(pattern)
    assert read_pattern(write_pattern(pattern, num_layers)) == pattern


@pytest.mark.parametrize("text", ["", "0", "[2]", "[1]*", "[1]+", "__import__('os')", "[1]*99999999", "([1]", "[1]**9"])
def test_no_pattern_is_evaluated(text: str) -> None:
    with pytest.raises(ValueError, match="pattern of layers"):
        read_pattern(text)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Experts(4, 5, 8), "each token goes to 5 experts"),
        (lambda: Experts(0, 1, 8), "num_experts of experts is 0"),
        (lambda: Experts(4, 1, 8, shared_gate=True), "shared expert of size 0 with a gate"),
        (lambda: Experts(4, 1, 8, pattern=(0, 0)), "no layer has experts"),
        (lambda: Latent(8, 0, 8, 8, 8), "kv_lora_rank of latent attention is 0"),
        (lambda: Routing(0), "expert parallel is 0"),
        (lambda: Routing(padded=True), "give the capacity factor"),
        (lambda: Routing(dispatcher="mail"), "unknown dispatcher 'mail'"),
        (lambda: replace(MIXTRAL_8X7B, linear_bias=True, experts=Experts(8, 2, 64, 64)), "no linear layer has a bias"),
        (lambda: replace(DEEPSEEK_V3, num_layers=30), "experts are given for 61 layers, but there are 30"),
    ],
)
def test_values_refuse_what_they_cannot_mean(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()
