"""Experts and latent attention: parameters, exchanges of tokens, patterns, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bpipe.predict.cluster import parse_cluster
from bpipe.predict.exchanges import exchange
from bpipe.predict.layer_variants import EVERY_LAYER, Experts, Latent, Routing, read_pattern, write_pattern
from bpipe.predict.layout import Setup
from bpipe.predict.model import Model
from tests.support.predicted import num_parameters
from tests.unit.predict.published import DEEPSEEK_V3, MIXTRAL_8X7B, QWEN3_30B, QWEN3_235B


@pytest.mark.parametrize(
    ("model", "billions"),
    [(MIXTRAL_8X7B, 46.7), (DEEPSEEK_V3, 671.0), (QWEN3_30B, 30.5), (QWEN3_235B, 235.1)],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_preset_has_as_many_parameters_as_published(model: Model, billions: float) -> None:
    assert num_parameters(model) / 1e9 == pytest.approx(billions, rel=2e-3)


def setup_of(model: Model, t: int = 1, p: int = 4, devices: str = "h100-80g:4x8", **changes: Any) -> Setup:
    per_rank, rest = divmod(model.num_layers, p)
    layers = tuple(per_rank + (place < rest) for place in range(p))
    values = {"micro_batch": 1, "global_batch": 256, "sequence": model.sequence, "recompute": "none", **changes}
    return Setup(model=model, cluster=parse_cluster(devices), tensor=t, pipeline=p, layers=layers, **values)


def test_seconds_of_token_exchanges() -> None:
    """Within a node NVLink carries seven eighths of what is sent; across two nodes a device's port carries half, which
    takes longer."""
    assert exchange(setup_of(MIXTRAL_8X7B, routing=Routing(1))).seconds == 0
    inside = exchange(setup_of(MIXTRAL_8X7B, routing=Routing(8)))
    sent = 4096 * 2 * 4096 * 2
    assert inside.between_s == 0
    assert inside.seconds == pytest.approx(sent * 7 / 8 / (450e9 * 0.77) + 20e-6)
    halves = exchange(setup_of(MIXTRAL_8X7B, devices="h100-80g:8x4", routing=Routing(8)))
    assert halves.between_s == pytest.approx(sent / 2 / (50e9 * 0.77))
    # A token goes to the other node once, if one of its 2 of 8 experts is there: 1 - 6 / 28 of all tokens.
    once = exchange(setup_of(MIXTRAL_8X7B, devices="h100-80g:8x4", routing=Routing(8, dispatcher="flex")))
    assert once.between_s == pytest.approx(halves.between_s * (1 - 6 / 28))
    everything = exchange(setup_of(MIXTRAL_8X7B, routing=Routing(8, dispatcher="allgather")))
    assert everything.seconds == pytest.approx(4096 * 4096 * 2 * 7 / (450e9 * 0.77) + 20e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routing": Routing(3)}, "expert parallel 3 does not divide the 8 experts"),
        ({"routing": Routing(8), "p": 8}, r"does not divide tensor \* data parallel = 4"),
        ({"t": 2, "sequence_parallel": False}, "need sequence parallelism: give"),
        ({"schedule": "chimera"}, "two pipes, for which experts are not modelled"),
        ({"model": replace(MIXTRAL_8X7B, experts=None), "routing": Routing(2)}, "has no experts"),
        (
            {"model": DEEPSEEK_V3, "kernels": "cpu", "attention": "unfused"},
            "CPU kernels are not modelled with .* latent attention",
        ),
    ],
)
def test_impossible_setups_are_refused(changes: dict[str, Any], message: str) -> None:
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
def test_impossible_values_are_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()
