"""Measured kernels in the place of formulas: taken as they stand, scaled from near ones, refused where they are of
something else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main
from bpipe.models.cluster import parse_cluster
from bpipe.models.costs import predict_costs
from bpipe.models.kernel_shapes import kernel_shapes
from bpipe.models.kernel_times import KernelTimes, read_kernel_times
from bpipe.models.layers.attention import core_seconds
from bpipe.models.layout import Setup
from bpipe.models.model import PRESETS
from bpipe.models.products import matrix_products
from bpipe.models.rates import Rates
from bpipe.models.tensor_parallel import gather_s

SETUP = Setup(
    PRESETS["llama3-70b"],
    parse_cluster("h100-80g:8x8"),
    8,
    8,
    1,
    32,
    8192,
    (10,) * 8,
    recompute="selective",
    attention="unfused",
)


def with_times(setup: Setup, times: KernelTimes) -> Setup:
    return replace(setup, cluster=replace(setup.cluster, kernels=times))


def by_formula(setup: Setup, slower: float = 1.0) -> KernelTimes:
    """As if a device had been measured that the formulas describe, or one that much slower."""
    shapes, products = kernel_shapes([setup]), {}
    for rows, columns, terms in shapes.products:
        # As a matrix whose forward product has these sizes: its tokens are the rows.
        same = replace(
            setup,
            micro_batch=1,
            sequence=rows,
            model=replace(setup.model, window=None),
            tensor=1,
            cluster=parse_cluster("h100-80g:8x8"),
        )
        products[rows, columns, terms] = slower * matrix_products(same, terms, columns).forward_s
    cores: dict[str, dict[Any, tuple[float, float]]] = {}
    for kind, *sizes in shapes.attention:
        forward, backward = core_seconds(setup, Rates.of(setup))
        cores.setdefault(kind, {})[tuple(sizes)] = slower * forward, slower * backward
    return KernelTimes("h100", "bf16", products, cores, {sizes: slower * gather_s(setup) for sizes in shapes.gathers})


def test_a_device_that_is_as_the_formulas_say_changes_nothing() -> None:
    """Of all kernels, each at its own sizes: none is asked for by others than those that are measured."""
    for setup in (
        SETUP,
        replace(SETUP, recompute="full"),
        replace(SETUP, sequence_parallel=False),
        replace(SETUP, schedule="zb-h1"),
    ):
        mine, formulas = predict_costs(with_times(setup, by_formula(setup))), predict_costs(setup)
        for measured, predicted in zip(mine.stages, formulas.stages, strict=True):
            for name in ("forward_s", "backward_s", "input_s", "weight_s", "output_forward_s"):
                # A product for weights was written down when it was measured, in whole waves by the formula.
                assert getattr(measured, name) == pytest.approx(getattr(predicted, name), rel=5e-3), name


def test_a_slower_device_is_slower() -> None:
    usual, slow = (predict_costs(with_times(SETUP, by_formula(SETUP, slower))).stages[3] for slower in (1.0, 3.0))
    assert 2.3 < float(slow.forward_s / usual.forward_s) < 3


def test_near_sizes_are_scaled_and_far_ones_are_not() -> None:
    times = KernelTimes("d", "bf16", {(100, 200, 300): 6.0}, {"flash": {(8, 1024, 64): (1.0, 2.0)}}, {(4, 1000): 5.0})
    assert times.product_s(100, 200, 300) == 6
    assert times.product_s(200, 200, 150) == pytest.approx(6)
    assert times.product_s(200, 400, 600) == pytest.approx(48)
    assert times.product_s(201, 200, 300) is None
    assert times.attention_s("flash", 8, 2048, 64) == pytest.approx((4, 8)), "twice the sequence is four times the work"
    assert times.attention_s("unfused", 8, 1024, 64) is None
    assert times.gather_s(4, 1500) == pytest.approx(7.5)
    assert times.gather_s(2, 1000) is None
    empty = KernelTimes("d", "bf16", {}, {}, {})
    assert predict_costs(with_times(SETUP, empty)) == replace(predict_costs(SETUP))


def test_the_nearest_of_several_counts() -> None:
    times = KernelTimes("d", "bf16", {(100, 100, 100): 1.0, (150, 100, 100): 30.0}, {}, {})
    assert times.product_s(110, 100, 100) == pytest.approx(1.1)
    assert times.product_s(140, 100, 100) == pytest.approx(28)


GOOD: dict[str, Any] = {
    "format": "bpipe-kernel-times",
    "version": 1,
    "device": "d",
    "precision": "bf16",
    "products": [[1, 2, 3, 0.5]],
    "attention": [["flash", 8, 1024, 64, 1.0, 2.0]],
    "gathers": [[4, 1000, 5.0]],
}


def write(path: Path, **changed: object) -> str:
    path.write_text(json.dumps(GOOD | changed))
    return str(path)


def test_files_are_joined(tmp_path: Path) -> None:
    one, other = (
        write(tmp_path / "1.json"),
        write(tmp_path / "2.json", products=[[1, 2, 3, 9.0], [4, 5, 6, 0.25]], attention=[], gathers=[[2, 8, 1.0]]),
    )
    times = read_kernel_times([one, other])
    assert dict(times.products) == {(1, 2, 3): 0.5, (4, 5, 6): 0.25}, "the first that measured something counts"
    assert dict(times.gathers) == {(4, 1000): 5.0, (2, 8): 1.0}
    assert times.attention == {"flash": {(8, 1024, 64): (1.0, 2.0)}}
    with pytest.raises(
        ValueError, match=r"2\.json: measured on other with bf16, .*1\.json on d with bf16: give files of one device"
    ):
        read_kernel_times([one, write(tmp_path / "2.json", device="other")])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": 2}, "it is not marked as bpipe-kernel-times, version 1"),
        ({"products": [[1, 2, 0.5]]}, "a row of products has 3 values, but must have 4"),
        ({"products": [[1, 2.5, 3, 0.5]]}, "a size of products"),
        ({"products": [[1, 0, 3, 0.5]]}, "sizes and seconds must be above 0"),
        ({"gathers": [[4, 1000, 0]]}, "sizes and seconds must be above 0"),
        ({"attention": [[8, 8, 1024, 64, 1.0, 2.0]]}, "attention's kind"),
        ({"attention": [["flash", 8, 1024, 64, 1.0, -2.0]]}, "seconds of attention"),
        ({"gathers": None}, "gathers"),
        ({"device": 3}, "device"),
    ],
)
def test_what_a_file_may_not_say(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_kernel_times([write(tmp_path / "times.json", **changed)])
    assert str(caught.value).startswith(f"{tmp_path}/times.json: ")


def test_simulate_and_plan_say_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [
        "--num-layers",
        "4",
        "--hidden-size",
        "256",
        "--num-attention-heads",
        "4",
        "--seq",
        "256",
        "--vocab-size",
        "1024",
    ]
    path = write(tmp_path / "times.json", products=[[256, 256, 256, 1.0]])
    asked = [*sizes, "--cluster", "a100-80g:4", "--gbs", "16", "--kernel-times", path]
    cut = ["--tp", "1", "--pp", "4"]
    assert main(["simulate", *asked, *cut]) == 0
    said = capsys.readouterr().out
    assert "kernels that were measured on d have the times measured there\n" in said
    assert (
        "measured kernels: of 6 products 1 as measured; of 1 attention cores 0 as measured; all else by formula\n"
        in said
    )
    assert main(["simulate", *asked, *cut, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["configuration"]["kernel_times"] == "d"
    assert main(["plan", *asked, "--rows", "1"]) == 0
    assert "kernels that were measured on d have" in capsys.readouterr().out
    assert main(["simulate", *asked, *cut, "--precision", "fp32"]) == 2
    assert (
        "the kernel times are for bf16, but the training run is in fp32: measure that, too" in capsys.readouterr().err
    )
