"""Kernels are measured here as predictions read them; what they compute is what they are named after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bpipe.models.kernel_times import read_kernel_times
from bpipe.runtime.kernel_times import DTYPES, attention, measure, product

CPU = torch.device("cpu")


def test_what_is_measured_can_be_read(tmp_path: Path) -> None:
    shapes = {"products": [[8, 16, 32]], "attention": [["flash", 2, 16, 8], ["unfused", 2, 16, 8]], "gathers": []}
    found = measure(shapes, "fp32", 2, CPU)
    path = tmp_path / "times.json"
    path.write_text(
        json.dumps({"format": "bpipe-kernel-times", "version": 1, "device": "cpu", "precision": "fp32", **found})
    )
    times = read_kernel_times([str(path)])
    assert times.product_s(8, 16, 32) == found["products"][0][-1] > 0
    assert times.attention_s("flash", 2, 16, 8) == tuple(found["attention"][0][-2:])
    assert times.attention_s("unfused", 2, 16, 8) == tuple(found["attention"][1][-2:])


@pytest.mark.parametrize("precision", DTYPES)
def test_a_product_has_the_sizes_it_says(precision: str) -> None:
    result = product((8, 16, 32), DTYPES[precision], CPU)()
    assert isinstance(result, torch.Tensor)
    assert (result.shape, result.dtype) == ((8, 16), DTYPES[precision])


def test_both_kinds_of_attention_compute_the_same() -> None:
    """Causal, with the same gradients."""
    cores = []
    for kind in ("flash", "unfused"):
        torch.manual_seed(3)
        forward, backward = attention(kind, (2, 16, 8), torch.float32, CPU)
        result, gradients = forward(), backward()
        assert isinstance(result, torch.Tensor)
        assert isinstance(gradients, tuple)
        cores.append((result, *gradients))
    for one, other in zip(*cores, strict=True):
        torch.testing.assert_close(one, other)
