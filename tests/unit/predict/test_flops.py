"""FLOPs, compared with Megatron's function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bpipe.predict.cluster import parse_cluster
from bpipe.predict.flops import training_flops
from bpipe.predict.layout import Setup, split_layers
from bpipe.predict.model import PRESETS, Model
from tests.unit.predict.published import DEEPSEEK_V3

FURTHER = [
    replace(PRESETS["llama3-8b"], name="llama3 and two tokens", mtp_num_layers=2, mtp_use_repeated_layer=True),
    replace(DEEPSEEK_V3, name="deepseek and a token", mtp_num_layers=1),
]


@pytest.mark.parametrize("model", [*PRESETS.values(), *FURTHER], ids=lambda model: model.name)
def test_flops_are_megatrons(
    model: Model, megatron_flops: Callable[..., float], megatron_args: Callable[[Any], Any]
) -> None:
    layers = split_layers(model.num_layers, 2, allow_uneven=True)
    assert layers is not None
    setup = Setup(model, parse_cluster("h100-80g:1x8"), 4, 2, 1, 16, model.sequence, layers)
    assert training_flops(model, 16, model.sequence, setup.padded_vocabulary) == pytest.approx(
        megatron_flops(megatron_args(setup), 16), rel=1e-12
    )
