"""Clusters, by name and from files: every number arrives in its unit, and what is wrong is named with its key and
file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main
from bpipe.plan.document import configuration
from bpipe.plan.predict import predict
from bpipe.plan.space import Space, enumerate_setups
from bpipe.predict.cluster import DEVICES, GIB, parse_cluster
from bpipe.predict.cluster_file import read_cluster
from bpipe.predict.context_parallel import with_exchange
from bpipe.predict.costs import predict_costs
from bpipe.predict.expert_parallel import exchange
from bpipe.predict.layer_variants import Routing
from bpipe.predict.layout import EVENLY, Setup
from bpipe.predict.links import collective_seconds
from bpipe.predict.model import PRESETS
from bpipe.predict.nodes import rank_domains, rank_nodes, replicas_share_nodes
from bpipe.predict.rates import LINK_EFFICIENCY, LINK_LATENCY_S
from bpipe.predict.replicas import update_seconds
from bpipe.predict.switches import Switches
from bpipe.predict.tensor_parallel import gather_s
from bpipe.schedule.layout import Vocabulary
from tests.unit.predict.published import MIXTRAL_8X7B

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


def test_a_file_says_everything_in_its_units(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(OWN)
    cluster = read_cluster(path)
    device = cluster.device
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.num_devices) == (16, 4, 64)
    assert (device.name, device.peak_flops_per_s, device.memory_bytes) == ("own", 500e12, int(60.5 * GIB))
    assert (device.memory_bytes_per_s, device.inside_bytes_per_s, device.between_bytes_per_s) == (2e12, 200e9, 12.5e9)
    assert device.source == str(path)


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
    values = {
        "tensor": 4,
        "pipeline": 8,
        "micro_batch": 1,
        "global_batch": 64,
        "sequence": 8192,
        "recompute": "none",
        **changes,
    }
    return Setup(
        model=PRESETS["llama3-70b"],
        cluster=parse_cluster(cluster),
        layers=(80 // values["pipeline"],) * values["pipeline"],
        **values,
    )


def test_what_a_rack_joins_takes_its_links_and_memory_stays_the_nodes() -> None:
    """Between trays of a rack messages, tensor parallelism and reductions are as fast as inside of one; copies into
    a partner's memory end at the tray."""
    rack, trays, node = setup_on("gb200-nvl72:16x4"), setup_on("gb200-186g:16x4"), setup_on("gb200-186g:1x64")
    assert (rank_nodes(rack), rank_domains(rack)) == ((0, 2, 4, 6, 8, 10, 12, 14), (0,) * 8)
    assert rank_nodes(trays) == rank_domains(trays) == rank_nodes(rack)
    assert predict(rack).timing == predict(node).timing
    assert predict(rack).timing.iteration_s < predict(trays).timing.iteration_s
    assert (replicas_share_nodes(rack), replicas_share_nodes(trays)) == (True, False)
    # A pair of eight devices is on two trays, one behind the other.
    balanced = replace(rack, balance=EVENLY)
    costs = [predict_costs(one) for one in (balanced, replace(trays, balance=EVENLY), replace(node, balance=EVENLY))]
    assert [one.links.crosses(0, 7) for one in costs] == [False, True, False]
    assert [len(one.one_sided) for one in costs] == [0, 0, 8]
    # A pair of four is on one.
    assert len(predict_costs(replace(balanced, tensor=2)).one_sided) == 8
    # Beyond a tray, and beyond a rack.
    assert rank_domains(setup_on("gb200-nvl72:16x4", tensor=8, pipeline=4)) == (0,) * 4
    with pytest.raises(ValueError, match="tensor parallel 8 does not divide the 4 devices of a node"):
        setup_on("gb200-186g:16x4", tensor=8, pipeline=4)
    with pytest.raises(
        ValueError, match="tensor parallel 64 does not divide the 72 devices of a group of nodes on one NVLink"
    ):
        setup_on("gb200-nvl72:128x4", tensor=64, pipeline=4)
    assert set(rank_domains(setup_on("gb200-nvl72:2", tensor=4, pipeline=4, global_batch=63))) == {0, 1}
    assert predict(rack).setup.cluster.nodes_per_domain == 18
    assert {
        setup.tensor for setup in enumerate_setups(Space(rack.model, rack.cluster, 64, 8192, schedules=("1f1b",)))
    } == {
        1,
        2,
        4,
        8,
        16,
        32,
        64,
    }
    assert configuration(rack)["gpus_per_domain"] == 64
    assert "gpus_per_domain" not in configuration(trays)


def test_experts_on_a_rack_reach_each_other_over_its_links() -> None:
    many = {
        "model": MIXTRAL_8X7B,
        "tensor": 1,
        "pipeline": 8,
        "sequence": 4096,
        "layers": (4,) * 8,
        "routing": Routing(8),
    }
    rack, trays = (replace(setup_on(cluster), **many) for cluster in ("gb200-nvl72:16x4", "gb200-186g:16x4"))
    assert exchange(rack).between_s == 0 < exchange(trays).between_s
    assert exchange(rack).seconds < exchange(trays).seconds


def switched(setup: Setup) -> Setup:
    """On the device with a switch in place of its mesh."""
    return replace(setup, cluster=replace(setup.cluster, device=replace(setup.cluster.device, mesh_links=None)))


def test_of_a_mesh_devices_have_the_links_to_each_other_and_no_more() -> None:
    """Any two MI300X were given all seven links, so t = 2 stood first: it gathers over one of them.

    All eight of a node use all.
    """
    device = DEVICES["mi300x-192g"]
    assert [device.among(number) / 64e9 for number in (1, 2, 4, 8)] == [1, 1, 3, 7]
    assert {
        one.among(number) == one.inside_bytes_per_s for one in DEVICES.values() if one != device for number in (2, 8)
    } == {True}
    for tensor, slower in ((2, 7), (4, 7 / 3), (8, 1)):
        mesh = setup_on("mi300x-192g:8x8", tensor=tensor, pipeline=8)
        latency = gather_s(replace(mesh, micro_batch=2)) - 2 * gather_s(mesh)
        ratio = (gather_s(mesh) + latency) / (gather_s(switched(mesh)) + latency)
        assert ratio == pytest.approx(slower)


def test_of_a_mesh_a_message_and_a_transfer_take_one_link() -> None:
    mesh = setup_on("mi300x-192g:1x8", tensor=1, balance=EVENLY)
    pair, whole = (predict_costs(one).links.link(0, 7).bytes_per_s for one in (mesh, switched(mesh)))
    assert pair is not None
    assert whole == pytest.approx(7 * pair)


def test_of_a_mesh_replicas_experts_and_parts_of_a_sequence_use_the_links_among_them() -> None:
    replicas = setup_on(
        "mi300x-192g:1x8", tensor=1, pipeline=4, switches=Switches(overlap_param_gather=True, overlap_grad_reduce=True)
    )
    assert update_seconds(replicas)[0][0] == pytest.approx(7 * update_seconds(switched(replicas))[0][0])
    many = {
        "model": MIXTRAL_8X7B,
        "tensor": 1,
        "pipeline": 4,
        "sequence": 4096,
        "layers": (8,) * 4,
        "routing": Routing(2),
    }
    experts = replace(setup_on("mi300x-192g:1x8", tensor=1), **many)
    assert exchange(experts).seconds - LINK_LATENCY_S == pytest.approx(
        7 * (exchange(switched(experts)).seconds - LINK_LATENCY_S)
    )
    parts = setup_on("mi300x-192g:1x8", tensor=1, pipeline=2, context=4, cp_comm_type="all_gather")
    waits, fewer = (with_exchange(one, 0.0, 0.0)[0] for one in (parts, switched(parts)))
    # From three others keys and values of 2048 tokens each, in 16 bit.
    gathered_s = 3 * 2 * 2048 * 2 * 8 * 128 / (448e9 * LINK_EFFICIENCY)
    assert waits - fewer == pytest.approx((7 / 3 - 1) * gathered_s)
    shards = setup_on("mi300x-192g:1x8", tensor=1, vocabulary=Vocabulary.ONE)
    assert collective_seconds(shards) == collective_seconds(switched(shards)), "all eight"
    few = setup_on("mi300x-192g:1x8", tensor=1, pipeline=4, vocabulary=Vocabulary.ONE)
    assert collective_seconds(few).gather_s == pytest.approx(7 / 3 * float(collective_seconds(switched(few)).gather_s))


def test_a_file_may_say_that_its_links_are_a_mesh(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(OWN + "mesh_links = 3\n")
    assert [read_cluster(path).device.among(number) for number in (2, 3, 4)] == pytest.approx(
        [200e9 / 3, 400e9 / 3, 200e9]
    )


def test_a_file_changes_a_known_device(tmp_path: Path) -> None:
    path = tmp_path / "half-the-ports.json"
    path.write_text(
        json.dumps({"nodes": 2, "gpus_per_node": 8, "device": {"like": "h100-80g", "between_gb_per_s": 25}})
    )
    device = read_cluster(path).device
    assert device.between_bytes_per_s == 25e9
    assert device.peak_flops_per_s == DEVICES["h100-80g"].peak_flops_per_s
    assert device.name == "half-the-ports"
    path.write_text(json.dumps({"device": "mi300x-192g"}))
    assert read_cluster(path, (3, 8)).num_devices == 24


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


@pytest.mark.parametrize("name", ["gb200-186g", "h20-96g", "mi300x-192g", "a800-80g"])
def test_newer_devices_are_known_with_their_source(name: str) -> None:
    device = parse_cluster(f"{name}:2x8").device
    assert device.source
    # What the label says in GB, less some.
    label = int(name.rpartition("-")[2].removesuffix("g"))
    assert 0.95 * label < device.memory_bytes / GIB <= label


def test_a_name_alone_takes_its_size_from_elsewhere() -> None:
    assert parse_cluster("h100-80g", (4, 8)).num_devices == 32
    assert parse_cluster("h100-80g:2", (4, 8)).num_devices == 2
    with pytest.raises(ValueError, match="is not DEVICE:NODESxDEVICES"):
        parse_cluster("h100-80g")
