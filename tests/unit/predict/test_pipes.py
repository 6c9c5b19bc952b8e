"""Two pipes in the models: two copies of weights and gradients a pipeline, one optimizer state, where ranks lie,
what they reduce."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layer_counts import split_layers
from bpipe.predict.layout import Setup
from bpipe.predict.model import PRESETS

MODEL = replace(PRESETS["gpt3-13b"], num_layers=32)


def setup(schedule: str = "chimera", chunks: int = 1, cluster: str = "a100-80g:1x8", **changes: Any) -> Setup:
    pipeline = changes.pop("pipeline", 8)
    layers = split_layers(MODEL.num_layers, pipeline * chunks)
    assert layers is not None
    sizes = {
        "tensor": 1,
        "pipeline": pipeline,
        "micro_batch": 1,
        "global_batch": 16,
        "sequence": 2048,
        "layers": layers,
    }
    return Setup(MODEL, parse_cluster(cluster), **{**sizes, "schedule": schedule, "num_chunks": chunks, **changes})


def test_what_two_pipes_cannot_take_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"chimera has 2 pipes, which need equal shares of the 15 micro-batches: use a global batch that is",
    ):
        setup(global_batch=15)
    with pytest.raises(ValueError, match=r"two pipes need an even number of ranks, not 1"):
        setup(pipeline=1)
