"""Devices and how they are joined, from text such as `a100-80g:4x8` or a file, and error bars of times on them.

Peaks are dense 16-bit matrix FLOP/s. The share of them that software reaches is in `sizes.Rates`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from math import floor, log10
from pathlib import Path
from typing import Any, NamedTuple

from bpipe.names import unknown
from bpipe.values import a_number, a_text, load_json

GIB = 2**30


def gib_text(num_bytes: float) -> str:
    """Return GiB as tables show them, without a sign before nothing."""
    return f"{round(num_bytes / GIB, 1) + 0:.1f}"


# Time of a message between stages beyond that of its bytes, on an A100 and wherever nothing else is known: two processes
# come to it, launch a kernel and wait for each other. The times that Qi et al. 2024 (zero bubble) measured and put into
# their schedulers are 0.60 and 0.53 ms per message inside a node (28 and 25 MB), 0.38 and 0.41 on two and four nodes (10
# and 13 MB): 0.33 to 0.48 without their bytes. The runs of Yeung et al. 2024 (13 MB, one node) lack 0.2 ms an exchange.
# This is their middle.
EXCHANGE_GAP_S = 300e-6

# Sixteen lanes of PCI Express in one direction, by their raw rate.
PCIE_4, PCIE_5 = 32e9, 64e9


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """Published properties of a device. Links are per device, in one direction."""

    name: str
    peak_flops_per_s: float
    """Dense products of 16-bit matrices."""
    memory_bytes: int
    """The most that a process can use, as the CUDA runtime reports it: a little less than the label says."""
    memory_bytes_per_s: float
    inside_bytes_per_s: float
    """Bandwidth within a node; in a mesh that of all links together."""
    between_bytes_per_s: float
    """Bandwidth of the network port."""
    source: str
    """Where the numbers come from."""
    inside_gap_s: float = EXCHANGE_GAP_S
    """Time of a message between stages of one node beyond that of its bytes."""
    between_gap_s: float = EXCHANGE_GAP_S
    """The same between nodes."""
    host_bytes_per_s: float = PCIE_5
    """Bandwidth to the node's memory."""
    host_node_bytes_per_s: float | None = None
    """The same of all devices of a node together; None if each has its own at the same time."""
    num_processors: int | None = None
    """Multiprocessors, or compute units; None if unknown."""
    product_share: float = 0.80
    """Share of the peak that the best measured product reaches."""
    fp8_flops_per_s: float | None = None
    """Dense products of 8-bit matrices; None without FP8."""
    fp8_share: float = 0.734
    """Share of that which the best measured product reaches."""
    fp8_blocks: bool = False
    """Whether it multiplies 8-bit values with a scale per 32 of them (mxfp8), and in any layout."""
    mesh_links: int | None = None
    """Links of a device, one to each other device of a full mesh; None if a switch joins them."""

    def among(self, number: int) -> float:
        """Return a device's bandwidth inside its node while `number` devices, itself included, exchange with each
        other.

        In a mesh it reaches each by their own link only: a pair has one link, and all devices of a mesh of 8 use 7.
        """
        if self.mesh_links is None:
            return self.inside_bytes_per_s
        return self.inside_bytes_per_s * min(max(1, number - 1), self.mesh_links) / self.mesh_links

    def host_among(self, number: float) -> float:
        """Return a device's bandwidth to its node's memory while `number` devices of the node use theirs."""
        shared = self.host_node_bytes_per_s
        return self.host_bytes_per_s if shared is None else min(self.host_bytes_per_s, shared / max(1.0, number))


# Network: one port per device, eight of 200 Gbit/s in a DGX A100, eight of 400 Gbit/s in a DGX H100, H200 and B200.
#
# Usable memory: of the A100 with 80 GB "total capacity of 79.25 GiB" in torch's own messages (Vad-R1 issue 11, OOTDiffusion
# issue 235 on GitHub), of the A800 79.33 GiB (PB-LLM issue 3, Kimi-VL issue 51). Of the H20 and the GB200 97871 and 189471 MiB,
# as nvidia-smi shows, less the half to three quarters of a GiB by which torch reports less on an H100 and a B200. The others
# are what torch reports on such machines, to a few tenths; a cluster file replaces them.
#
# Best of many shapes of products, measured with bfloat16 (S. Bekman, Machine Learning Engineering, table of the maximum
# achievable matmul FLOPS): A100 SXM 267.9 of 312 TFLOP/s, H100 SXM 792.1 of 989, B200 1745 of 2250, MI300X 781.9 of 1300 (ROCm
# 6.2). In 8 bit (the same, in its guide to upgrading GPUs): H200 SXM 1453.4 of 1979 TFLOP/s, B200 SXM 3432.5 of 4500. Peaks in
# 8 bit are half of what the data sheets say with sparsity. Others of a generation as these.
_A100 = DeviceKind(
    name="a100-80g",
    peak_flops_per_s=312e12,
    memory_bytes=int(79.25 * GIB),
    memory_bytes_per_s=2.039e12,
    inside_bytes_per_s=300e9,
    between_bytes_per_s=25e9,
    host_bytes_per_s=PCIE_4,
    num_processors=108,
    product_share=0.859,
    source="NVIDIA A100 data sheet",
)
_H100 = DeviceKind(
    name="h100-80g",
    peak_flops_per_s=989e12,
    memory_bytes=int(79.1 * GIB),
    memory_bytes_per_s=3.35e12,
    inside_bytes_per_s=450e9,
    between_bytes_per_s=50e9,
    num_processors=132,
    product_share=0.801,
    fp8_flops_per_s=1979e12,
    source="NVIDIA H100 SXM data sheet",
)
_B200 = DeviceKind(
    name="b200-180g",
    peak_flops_per_s=2250e12,
    memory_bytes=int(178.3 * GIB),
    memory_bytes_per_s=7.7e12,
    inside_bytes_per_s=900e9,
    between_bytes_per_s=50e9,
    num_processors=148,
    product_share=0.776,
    fp8_flops_per_s=4500e12,
    fp8_share=0.763,
    fp8_blocks=True,
    source="NVIDIA DGX B200 data sheet",
)
DEVICES = {
    device.name: device
    for device in (
        replace(
            _A100,
            name="a100-40g",
            memory_bytes=int(39.5 * GIB),
            memory_bytes_per_s=1.555e12,
            source="NVIDIA A100 data sheet; 39.5 GiB as torch reports it",
        ),
        _A100,
        _H100,
        replace(
            _H100,
            name="h200-141g",
            memory_bytes=int(139.8 * GIB),
            memory_bytes_per_s=4.8e12,
            source="NVIDIA H200 data sheet",
        ),
        replace(
            _A100,
            name="a800-80g",
            memory_bytes=int(79.33 * GIB),
            inside_bytes_per_s=200e9,
            source="NVIDIA A100 data sheet, NVLink at 400 GB/s both ways",
        ),
        replace(
            _H100,
            name="h20-96g",
            peak_flops_per_s=148e12,
            memory_bytes=int(95.0 * GIB),
            memory_bytes_per_s=4.0e12,
            num_processors=78,
            fp8_flops_per_s=296e12,
            source="NVIDIA H20: 148 TFLOP/s, 96 GB at 4.0 TB/s, NVLink 900 GB/s",
        ),
        _B200,
        # Half of what joins a CPU and two GPUs, 900 GB/s both ways. Its NVLink joins 72 devices (`RACKS`).
        replace(
            _B200,
            name="gb200-186g",
            peak_flops_per_s=2500e12,
            memory_bytes=int(184.3 * GIB),
            memory_bytes_per_s=8.0e12,
            host_bytes_per_s=225e9,
            fp8_flops_per_s=5000e12,
            source="NVIDIA GB200 NVL72: of 72, 360 PFLOP/s with sparsity",
        ),
        # No FP8 training on it was looked at.
        DeviceKind(
            name="mi300x-192g",
            peak_flops_per_s=1307.4e12,
            memory_bytes=int(191.98 * GIB),
            memory_bytes_per_s=5.3e12,
            inside_bytes_per_s=448e9,
            between_bytes_per_s=50e9,
            num_processors=304,
            product_share=0.601,
            mesh_links=7,
            source="AMD Instinct MI300X data sheet",
        ),
    )
}


class Rack(NamedTuple):
    """Nodes joined by one NVLink: their device, how many devices each has (0: any number), and how many nodes."""

    device: str
    devices_per_node: int
    nodes: int


# NVIDIA GB200 NVL72: 18 compute trays of 4 devices, each a host of its own.
RACKS = {"gb200-nvl72": Rack("gb200-186g", 4, 18)}


# A number alone is one node; of more devices than any has it was probably meant as all.
MOST_OF_A_NODE = 16


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices of a training."""

    device: DeviceKind
    num_nodes: int
    devices_per_node: int
    factor: float = 1.0
    """Measured seconds per predicted second, of a cluster file."""
    nodes_per_domain: int = 1
    """Nodes that are joined by links as a node's devices are; their memory stays apart."""
    budget_bytes: int | None = None
    """Bytes of a device's memory that may be used; by default all."""

    @property
    def limit_bytes(self) -> int:
        """Bytes of a device that may be used."""
        return self.budget_bytes or self.device.memory_bytes

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def domain(self) -> str:
        """The domain in words."""
        return "a node" if self.nodes_per_domain == 1 else "a group of nodes on one NVLink"

    @property
    def devices_per_domain(self) -> int:
        """Number of devices joined as those of a node are; all of them where there are fewer."""
        return self.devices_per_node * min(self.nodes_per_domain, self.num_nodes)


def parse_cluster(text: str, devices: tuple[int, int] | None = None) -> Cluster:
    """Read `DEVICE:NODESxDEVICES`, such as a100-80g:4x8; without `NODESx` it is one node.

    `devices`: both, where the text says none.

    `@GB` behind it is what a device's port between nodes carries, in 1e9 bytes a second: a100-80g:4x8@12.5 has one of
    200 Gbit/s for two. Of `RACKS` a number alone is one of racks: gb200-nvl72:8, or 36x4 nodes of two.
    """
    # 80GB of a device is its name as everybody says it.
    plain = re.sub(r"(\d)gb\b", r"\1g", text.lower())
    match = re.fullmatch(r"([a-z0-9-]+)(?::(?:([0-9]{1,5})x)?([0-9]{1,3}))?(?:@([0-9]{1,4}(?:\.[0-9]{1,3})?))?", plain)
    if match is None or (match[3] is None and devices is None):
        raise ValueError(f"cluster {text!r} is not DEVICE:NODESxDEVICES[@GB], such as a100-80g:4x8@12.5")
    name = match[1]
    if name not in DEVICES and name not in RACKS:
        raise ValueError(f"cluster {text!r}: {unknown('device', name, (*DEVICES, *RACKS))}")
    rack = RACKS.get(name, Rack(name, 0, 1))
    nodes, per_node = devices if match[3] is None and devices is not None else _sizes(match, rack)
    if nodes < 1 or per_node < 1:
        raise ValueError(f"cluster {text!r} has {nodes} nodes of {per_node} devices: give at least one of each")
    if per_node > rack.devices_per_node > 0:
        raise ValueError(f"cluster {text!r}: a node of {name} has {rack.devices_per_node} devices; {name}:2 is 2 racks")
    device, port = DEVICES[rack.device], match[4]
    if port is not None:
        if not float(port):
            raise ValueError(f"cluster {text!r}: a port of {port} GB/s must be above 0: give more, or leave @ out")
        device = replace(device, between_bytes_per_s=float(port) * 1e9)
    return Cluster(device, nodes, per_node, nodes_per_domain=rack.nodes)


def _sizes(match: re.Match[str], rack: Rack) -> tuple[int, int]:
    """Return the nodes and the devices of each; a number alone counts racks, if the name is a rack's."""
    text, name, nodes, number = match[0], match[1], match[2], int(match[3])
    if nodes is None and rack.devices_per_node:
        return number * rack.nodes, rack.devices_per_node
    if nodes is None and number > MOST_OF_A_NODE:
        raise ValueError(
            f"cluster {text!r} is one node of {number} devices: write {name}:NODESxDEVICES, such as "
            f"{name}:{-(-number // 8)}x8, or {name}:1x{number} if it is one node"
        )
    return int(nodes or 1), number


# -- error bars: those of the runs in docs/validation.md, as scripts/bench/predictions.py computes them

# From this number of runs on the range leaves out 5 % at each end; below it holds all.
MANY_RUNS = 20


class ErrorBars(NamedTuple):
    """Range of measured times of one kind of runs."""

    kind: str
    num_runs: int
    low: int
    """Percent by which the quickest took longer than predicted; negative if it was quicker."""
    median: int
    """The same of the median."""
    high: int
    """The same of the slowest."""
    time_factor: float = 1.0
    """What the formulas' seconds of such runs are multiplied by."""

    def range_s(self, predicted_s: float) -> tuple[float, float]:
        """Return the least and the most seconds that a run predicted so is likely to take."""
        return predicted_s * (1 + self.low / 100), predicted_s * (1 + self.high / 100)


AMPERE = ErrorBars("dense models on A100s", 65, -5, 2, 11)
HOPPER = ErrorBars("dense models on H100s", 7, -4, 1, 10)
BLACKWELL = ErrorBars("dense models on Blackwell", 7, -6, 0, 7, time_factor=1.18)
EXPERTS = ErrorBars("models with experts", 6, -10, 0, 44, time_factor=1.17)
# Of every two runs of one source, one predicted with the factor of the other.
CALIBRATED = ErrorBars("one source, one calibrating the other", 748, -6, 0, 6)

# By device, the runs of dense models of its generation.
_DENSE = {
    **dict.fromkeys(("a100-40g", "a100-80g", "a800-80g"), AMPERE),
    **dict.fromkeys(("h100-80g", "h200-141g"), HOPPER),
    **dict.fromkeys(("b200-180g", "gb200-186g"), BLACKWELL),
}


def _kind(device: str, has_experts: bool) -> ErrorBars | None:
    dense = _DENSE.get(device)
    return EXPERTS if dense is not None and has_experts else dense


def time_factor(cluster: Cluster, has_experts: bool) -> float:
    """Return what the formulas' seconds are multiplied by for such models on a cluster."""
    kind = _kind(cluster.device.name, has_experts)
    return cluster.factor if kind is None else cluster.factor * kind.time_factor


def error_bars(cluster: Cluster, has_experts: bool) -> ErrorBars | None:
    """Return the error bars of such models on a cluster: of calibrated clusters those of calibrated runs."""
    return CALIBRATED if cluster.factor != 1 else _kind(cluster.device.name, has_experts)


def is_never_calibrated(cluster: Cluster) -> bool:
    """Whether no run on such a device had a say in the constants of predictions, and none of the user's has."""
    return cluster.factor == 1 and cluster.device.name not in _DENSE


def range_words(bars: ErrorBars | None, predicted_s: float) -> str:
    """Return the range in seconds without brackets, its longest to three digits; nothing where none is known."""
    if bars is None:
        return ""
    least_s, most_s = bars.range_s(predicted_s)
    decimals = max(0, 2 - floor(log10(most_s)))
    return f"{least_s:.{decimals}f} to {most_s:.{decimals}f}"


# -- cluster files in JSON or TOML (docs/planning.md)

# Keys of `device`, the field each sets and how many of its units one of the key's is.
_REQUIRED = {
    "peak_tflops": ("peak_flops_per_s", 1e12),
    "memory_gib": ("memory_bytes", GIB),
    "memory_gb_per_s": ("memory_bytes_per_s", 1e9),
    "inside_gb_per_s": ("inside_bytes_per_s", 1e9),
    "between_gb_per_s": ("between_bytes_per_s", 1e9),
}
_KEYS = {
    **_REQUIRED,
    "inside_gap_us": ("inside_gap_s", 1e-6),
    "between_gap_us": ("between_gap_s", 1e-6),
    "host_gb_per_s": ("host_bytes_per_s", 1e9),
    "host_node_gb_per_s": ("host_node_bytes_per_s", 1e9),
    "multiprocessors": ("num_processors", 1),
    "mesh_links": ("mesh_links", 1),
    "fp8_tflops": ("fp8_flops_per_s", 1e12),
}
# Of these there is no half.
_WHOLE = ("multiprocessors", "mesh_links")
_SUFFIXES = (".json", ".toml")
# Predictions of published runs are off by at most 23 %. A factor of two means another configuration or device.
_SLOWEST = 2.0
# More than any device has: beyond, the unit was mistaken.
_LARGEST = 1e6


def cluster_named(text: str, devices: tuple[int, int] | None = None) -> Cluster:
    """Return the cluster of a file or of `parse_cluster`. `devices`: nodes and GPUs of each, if neither says them."""
    path = Path(text)
    return read_cluster(path, devices) if path.suffix in _SUFFIXES else parse_cluster(text, devices)


def read_cluster(path: Path, devices: tuple[int, int] | None = None) -> Cluster:
    """Read a cluster file. `devices`: nodes and GPUs of each, for a file that does not say them."""
    data = path.read_bytes()
    try:
        document = load_json(data) if path.suffix == ".json" else tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid {path.suffix[1:].upper()}: {error}") from None
    try:
        return _cluster(document, devices or (None, None), path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _cluster(document: object, devices: tuple[int | None, int | None], path: Path) -> Cluster:
    if not isinstance(document, dict):
        raise ValueError("a cluster must be an object with nodes, gpus_per_node and device")
    _refuse_unknown("", document, ("nodes", "gpus_per_node", "gpus_per_domain", "device", "time_factor"))
    nodes, per_node = (
        _size(document, key, size) for key, size in zip(("nodes", "gpus_per_node"), devices, strict=True)
    )
    if "device" not in document:
        raise ValueError(f"device is missing: give one of {', '.join(DEVICES)}, or an object with its numbers")
    joined, rest = divmod(_size(document, "gpus_per_domain", per_node), per_node)
    if rest:
        raise ValueError(
            f"gpus_per_domain is {document['gpus_per_domain']}, but must be a multiple of the {per_node} per node"
        )
    factor = a_number(document.get("time_factor", 1), "time_factor", 1 / _SLOWEST, _SLOWEST)
    return Cluster(_device(document["device"], path), nodes, per_node, factor=factor, nodes_per_domain=joined)


def _size(document: dict[str, Any], key: str, default: int | None) -> int:
    size = document.get(key, default)
    if type(size) is not int or not 1 <= size <= _LARGEST:
        found = "missing" if size is None else repr(size)[:60]
        raise ValueError(f"{key} is {found}, but must be a whole number from 1 to {_LARGEST:.0f}")
    return size


def _device(value: object, path: Path) -> DeviceKind:
    if isinstance(value, str):
        return _known("device", value)
    if not isinstance(value, dict):
        raise ValueError(f"device is {repr(value)[:60]}, but must be a name or an object")
    _refuse_unknown("device.", value, ("like", "name", *_KEYS))
    numbers: dict[str, Any] = {
        field: _number(key, value[key]) * unit for key, (field, unit) in _KEYS.items() if key in value
    }
    if "memory_bytes" in numbers:
        numbers["memory_bytes"] = int(numbers["memory_bytes"])
    numbers |= {"name": a_text(value.get("name", path.stem), "device.name"), "source": str(path)}
    if "like" in value:
        return replace(_known("device.like", value["like"]), **numbers)
    missing = [f"device.{key}" for key in _REQUIRED if key not in value]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing: give all of them, or device.like")
    return DeviceKind(**numbers)


def _known(key: str, name: object) -> DeviceKind:
    if not isinstance(name, str) or name not in DEVICES:
        raise ValueError(f"{key}: {unknown('device', str(name), DEVICES)}")
    return DEVICES[name]


def _number(key: str, value: Any) -> Any:
    kinds, kind = ((int,), "whole number") if key in _WHOLE else ((int, float), "number")
    if type(value) not in kinds or not 0 < value <= _LARGEST:
        raise ValueError(f"device.{key} is {repr(value)[:60]}, but must be a {kind} above 0 and at most {_LARGEST:.0f}")
    return value if key in _WHOLE else float(value)


def _refuse_unknown(before: str, entries: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in entries:
        if key not in keys:
            raise ValueError(unknown("key", before + key, [before + name for name in keys]))
