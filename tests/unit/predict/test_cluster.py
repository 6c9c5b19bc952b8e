"""Clusters, by name and from files: every number has the right unit, and errors name the key and the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main
from bpipe.plan.candidates import configuration
from bpipe.plan.predict import predict
from bpipe.plan.space import Space
from bpipe.predict.cluster import DEVICES, parse_cluster, read_cluster
from bpipe.predict.costs import predict_costs
from bpipe.predict.exchanges import rank_domains, rank_nodes, replicas_share_nodes
from bpipe.predict.layout import EVENLY, Setup
from bpipe.predict.model import PRESETS
from tests.support.predicted import enumerate_setups

OWN = """
nodes = 16
gpus_per_node = 4

[device]
name = "own"
peak_tflops = 500
memory_gib = 60.5
memory_gb_per_s = 2000
inside_gb_per_s = 200
between_gb_per_s = 12.5
"""


def test_what_a_port_carries_and_what_a_message_takes_besides_may_be_said(tmp_path: Path) -> None:
    usual, half = parse_cluster("a100-80g:4x8").device, parse_cluster("a100-80g:4x8@12.5").device
    assert (usual.between_bytes_per_s, half.between_bytes_per_s) == (25e9, 12.5e9)
    assert (usual.inside_gap_s, usual.between_gap_s) == (300e-6, 300e-6)
    path = tmp_path / "cluster.toml"
    path.write_text(OWN + "between_gap_us = 400\n")
    assert (read_cluster(path).device.inside_gap_s, read_cluster(path).device.between_gap_s) == pytest.approx(
        (300e-6, 400e-6)
    )
    with pytest.raises(ValueError, match=r"a port of 0\.0 GB/s must be above 0"):
        parse_cluster("a100-80g:4x8@0.0")


def test_a_factor_multiplies_all_times_and_is_no_mistake(tmp_path: Path) -> None:
    path, usual = tmp_path / "cluster.toml", tmp_path / "usual.toml"
    usual.write_text(OWN)
    path.write_text(f"time_factor = 1.2\n{OWN}")
    model = PRESETS["llama3-8b"]
    setups = [Setup(model, read_cluster(file), 4, 4, 1, 16, 8192, (8,) * 4, "none", "flash") for file in (usual, path)]
    plain_s, slower_s = (predict(setup).timing.iteration_s for setup in setups)
    assert slower_s == pytest.approx(1.2 * plain_s)
    assert configuration(setups[1])["calibration_factor"] == 1.2
    for factor in ("0.4", "2.5", '"much"', "true"):
        path.write_text(f"time_factor = {factor}\n{OWN}")
        with pytest.raises(ValueError, match=r"cluster\.toml: time_factor is .* must be a number from 0\.5 to 2"):
            read_cluster(path)


def test_racks_are_nodes_that_one_link_joins(tmp_path: Path) -> None:
    racks, nodes, launched = (
        parse_cluster("gb200-nvl72:2"),
        parse_cluster("gb200-nvl72:36x4"),
        parse_cluster("gb200-nvl72", (36, 4)),
    )
    assert racks == nodes == launched
    assert (racks.num_nodes, racks.devices_per_node, racks.devices_per_domain, racks.num_devices) == (36, 4, 72, 144)
    assert racks.device == DEVICES["gb200-186g"]
    assert parse_cluster("gb200-nvl72:4x4").devices_per_domain == 16, "a part of a rack"
    assert parse_cluster("gb200-186g:36x4").devices_per_domain == 4
    with pytest.raises(ValueError, match="a node of gb200-nvl72 has 4 devices"):
        parse_cluster("gb200-nvl72:2x8")
    path = tmp_path / "cluster.toml"
    path.write_text("gpus_per_domain = 32\n" + OWN)
    assert read_cluster(path).devices_per_domain == 32
    path.write_text(OWN)
    assert read_cluster(path).devices_per_domain == 4


def setup_on(cluster: str, **changes: Any) -> Setup:
    pipeline = changes.pop("pipeline", 8)
    layers = (80 // pipeline,) * pipeline
    setup = {"tensor": 4, "micro_batch": 1, "global_batch": 64, "sequence": 8192, "recompute": "none", **changes}
    return Setup(PRESETS["llama3-70b"], parse_cluster(cluster), pipeline=pipeline, layers=layers, **setup)


def test_what_a_rack_joins_takes_its_links_and_memory_stays_the_nodes() -> None:
    """Between trays of a rack, messages, tensor parallelism and reductions are as fast as inside of one, but copies
    into a partner's memory are not possible."""
    rack, trays, node = setup_on("gb200-nvl72:16x4"), setup_on("gb200-186g:16x4"), setup_on("gb200-186g:1x64")
    assert (rank_nodes(rack), rank_domains(rack)) == ((0, 2, 4, 6, 8, 10, 12, 14), (0,) * 8)
    assert rank_nodes(trays) == rank_domains(trays) == rank_nodes(rack)
    assert predict(rack).timing == predict(node).timing
    assert predict(rack).timing.iteration_s < predict(trays).timing.iteration_s
    assert (replicas_share_nodes(rack), replicas_share_nodes(trays)) == (True, False)
    # A pair of eight devices is on two trays.
    balanced = replace(rack, balance=EVENLY)
    costs = [
        predict_costs(setup) for setup in (balanced, replace(trays, balance=EVENLY), replace(node, balance=EVENLY))
    ]
    assert [cost.links.crosses(0, 7) for cost in costs] == [False, True, False]
    assert [len(cost.one_sided) for cost in costs] == [0, 0, 8]
    # A pair of four devices is on one.
    assert len(predict_costs(replace(balanced, tensor=2)).one_sided) == 8
    # Tensor parallelism beyond a tray, and beyond a rack.
    assert rank_domains(setup_on("gb200-nvl72:16x4", tensor=8, pipeline=4)) == (0,) * 4
    with pytest.raises(ValueError, match="tensor parallel 8 does not divide the 4 devices of a node"):
        setup_on("gb200-186g:16x4", tensor=8, pipeline=4)
    with pytest.raises(
        ValueError, match="tensor parallel 64 does not divide the 72 devices of a group of nodes on one NVLink"
    ):
        setup_on("gb200-nvl72:128x4", tensor=64, pipeline=4)
    assert set(rank_domains(setup_on("gb200-nvl72:2", tensor=4, pipeline=4, global_batch=63))) == {0, 1}
    assert predict(rack).setup.cluster.nodes_per_domain == 18
    setups = enumerate_setups(Space(rack.model, rack.cluster, 64, 8192, schedules=("1f1b",)))
    assert {setup.tensor for setup in setups} == {2**number for number in range(7)}
    assert configuration(rack)["gpus_per_domain"] == 64
    assert "gpus_per_domain" not in configuration(trays)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes = ", "not valid TOML"),
        ("nodes = 2", "gpus_per_node is missing"),
        ("nodes = 0\ngpus_per_node = 8", "nodes is 0, but must be a whole number"),
        ("nodes = 1\ngpus_per_node = 8", "device is missing: give one of a100-40g"),
        ("nodes = 1\ngpus_per_node = 8\ndevice = 3", "device is 3, but must be a name or an object"),
        ('nodes = 1\ngpus_per_node = 8\ndevice = "h100"', "device: unknown device 'h100'"),
        ("nodes = 1\ngpu_per_node = 8", "unknown key 'gpu_per_node', did you mean 'gpus_per_node'"),
        (
            OWN.replace("peak_tflops = 500", 'peak_tflops = "500"'),
            "device.peak_tflops is '500', but must be a number above 0",
        ),
        (OWN.replace("60.5", "-1"), "device.memory_gib is -1"),
        (OWN.replace("60.5", "nan"), "device.memory_gib is nan"),
        (OWN + "multiprocessors = 0.5\n", "device.multiprocessors is 0.5, but must be a whole number above 0"),
        (OWN.replace("60.5", "64e9"), "device.memory_gib is 64000000000.0, but must be a number above 0 and at most"),
        (OWN.replace("peak_tflops = 500\n", ""), "device.peak_tflops missing: give all of them, or device.like"),
        ("gpus_per_domain = 6\n" + OWN, "gpus_per_domain is 6, but must be a multiple of the 4 per node"),
        ("gpus_per_domain = 0\n" + OWN, "gpus_per_domain is 0, but must be a whole number"),
        (
            OWN.replace("peak_tflops", "peak_flops"),
            "unknown key 'device.peak_flops', did you mean 'device.peak_tflops'",
        ),
        (OWN.replace('name = "own"', "name = 3"), "device.name is 3"),
    ],
)
def test_errors_name_the_key_and_the_file(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    assert main(["simulate", "--model", "gpt3-13b", "--cluster", str(path), "--pp", "8", "--gbs", "32"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(path) in error
    assert error.count("\n") == 1


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "gpt3-13b", "--cluster", "nowhere.toml", "--gbs", "32"]) == 2
    assert "nowhere.toml" in capsys.readouterr().err
