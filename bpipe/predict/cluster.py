"""Describe devices and how they are joined.

In: text such as `a100-80g:4x8`. Out: a frozen `Cluster`. Knows no model, schedule or file.

Peaks are dense 16-bit matrix FLOP/s; links are per device and one direction. What software reaches of them is in
`compute`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from bpipe.names import unknown

GIB = 2**30


def gib_text(num_bytes: float) -> str:
    """Return GiB as tables show them, without a sign before nothing."""
    return f"{round(num_bytes / GIB, 1) + 0:.1f}"


# What a message between stages takes beside its bytes, on an A100 and wherever nothing else is known: two processes
# come to it, launch a kernel and wait for each other. The times that Qi et al. 2024 (zero bubble) measured and put into
# their schedulers are 0.60 and 0.53 ms per message inside a node (28 and 25 MB), 0.38 and 0.41 on two and four nodes (10
# and 13 MB): 0.33 to 0.48 without their bytes. The runs of Yeung et al. 2024 (13 MB, one node) lack 0.2 ms an exchange.
# This is their middle.
EXCHANGE_GAP_S = 300e-6

# Sixteen lanes of PCI Express in one direction, by their raw rate.
PCIE_4, PCIE_5 = 32e9, 64e9


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Published properties of a device.

    `memory_bytes` is what a process can use at most: what the CUDA runtime reports, a little less than the label says.

    Inside a node and between nodes a message between stages takes its bytes' time and a gap. `host_bytes_per_s` is the
    link to the node's memory; `host_node_bytes_per_s` what those of all its devices carry together, None where each
    carries all at once. `num_processors` are its multiprocessors, None where nothing is known of them; `product_share`
    is what the best product of matrices reaches of the peak. `fp8_flops_per_s` and `fp8_share` are the same of 8-bit
    values, None where it multiplies none; `fp8_blocks`: it multiplies those with a scale for every 32 (mxfp8), and any
    in every layout, so that none has to be transposed. `mesh_links`: a device has so many links, each to one other of
    its node, and `inside_bytes_per_s` is of all of them together; None where a switch joins them, so that any pair has
    all.
    """

    name: str
    peak_flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    inside_bytes_per_s: float
    between_bytes_per_s: float
    source: str
    inside_gap_s: float = EXCHANGE_GAP_S
    between_gap_s: float = EXCHANGE_GAP_S
    host_bytes_per_s: float = PCIE_5
    host_node_bytes_per_s: float | None = None
    num_processors: int | None = None
    product_share: float = 0.80
    fp8_flops_per_s: float | None = None
    fp8_share: float = 0.734
    fp8_blocks: bool = False
    mesh_links: int | None = None

    def among(self, number: int) -> float:
        """Return the bytes a second that a device sends inside its node while `number` devices, itself included,
        exchange with each other.

        In a mesh it sends to each by their own link, and only by that: a pair has one link, and of a mesh of 8 all
        devices use 7.
        """
        if self.mesh_links is None:
            return self.inside_bytes_per_s
        return self.inside_bytes_per_s * min(max(1, number - 1), self.mesh_links) / self.mesh_links


# `between` is one network port a device: eight of 200 Gbit/s in a DGX A100, eight of 400 Gbit/s in a DGX H100, H200 and
# B200. Usable memory of the A100 with 80 GB: "total capacity of 79.25 GiB" in torch's own messages (Vad-R1 issue 11,
# OOTDiffusion issue 235 on GitHub). The A800's: "total capacity of 79.33 GiB" (PB-LLM issue 3, Kimi-VL issue 51). The
# others' are what torch reports on such machines, to a few tenths; a cluster file takes another where yours differs. Of
# the H20 and the GB200: 97871 and 189471 MiB, as nvidia-smi shows, less the half to three quarters of a GiB by which
# torch reports less on an H100 and a B200. `inside` is NVLink. Of the MI300X it is the seven links of 64 GB/s to the
# seven others of a node (`_MESHES`). The NVLink of a GB200 NVL72 joins 72, of nodes of 4: `gb200-nvl72` below; of
# `gb200-186g` alone it joins the devices of a node. To the node's memory it is PCIe 5 where nothing else stands here;
# of a GB200 half of what joins its CPU and two GPUs, 900 GB/s both ways.
_HOST = {"a100-40g": PCIE_4, "a100-80g": PCIE_4, "a800-80g": PCIE_4, "gb200-186g": 225e9}
_MESHES = {"mi300x-192g": 7}
# Multiprocessors (of the MI300X, compute units) as the data sheets say.
_PROCESSORS = {
    **dict.fromkeys(("a100-40g", "a100-80g", "a800-80g"), 108),
    **dict.fromkeys(("h100-80g", "h200-141g"), 132),
    **dict.fromkeys(("b200-180g", "gb200-186g"), 148),
    "h20-96g": 78,
    "mi300x-192g": 304,
}
# The best of many shapes, measured with bfloat16 (S. Bekman, Machine Learning Engineering, table of the maximum
# achievable matmul FLOPS): A100 SXM 267.9 of 312 TFLOP/s, H100 SXM 792.1 of 989, B200 1745 of 2250, MI300X 781.9 of
# 1300 (ROCm 6.2). Others as the H100.
_SHARES = {
    **dict.fromkeys(("a100-40g", "a100-80g", "a800-80g"), 0.859),
    **dict.fromkeys(("b200-180g", "gb200-186g"), 0.776),
    "mi300x-192g": 0.601,
}
# Dense products of 8-bit values: half of what the data sheets say with sparsity. Of the MI300X no training was looked
# at.
_FP8 = {"h100-80g": 1979e12, "h200-141g": 1979e12, "h20-96g": 296e12, "b200-180g": 4500e12, "gb200-186g": 5000e12}
# The best that was measured of them (S. Bekman, Machine Learning Engineering, in its guide to upgrading GPUs): H200 SXM
# 1453.4 of 1979 TFLOP/s, 73.4 %, and B200 SXM 3432.5 of 4500, 76.3 %. Others of a generation as these.
_FP8_SHARES = dict.fromkeys(("b200-180g", "gb200-186g"), 0.763)
DEVICES = {
    device.name: replace(
        device,
        fp8_flops_per_s=_FP8.get(device.name),
        fp8_share=_FP8_SHARES.get(device.name, 0.734),
        fp8_blocks=device.name in _FP8_SHARES,
        host_bytes_per_s=_HOST.get(device.name, PCIE_5),
        num_processors=_PROCESSORS[device.name],
        product_share=_SHARES.get(device.name, 0.801),
        mesh_links=_MESHES.get(device.name),
    )
    for device in (
        DeviceKind(
            "a100-40g",
            312e12,
            int(39.5 * GIB),
            1.555e12,
            300e9,
            25e9,
            "NVIDIA A100 data sheet; 39.5 GiB as torch reports it",
        ),
        DeviceKind("a100-80g", 312e12, int(79.25 * GIB), 2.039e12, 300e9, 25e9, "NVIDIA A100 data sheet"),
        DeviceKind("h100-80g", 989e12, int(79.1 * GIB), 3.35e12, 450e9, 50e9, "NVIDIA H100 SXM data sheet"),
        DeviceKind("h200-141g", 989e12, int(139.8 * GIB), 4.8e12, 450e9, 50e9, "NVIDIA H200 data sheet"),
        DeviceKind(
            "a800-80g",
            312e12,
            int(79.33 * GIB),
            2.039e12,
            200e9,
            25e9,
            "NVIDIA A100 data sheet, NVLink at 400 GB/s both ways",
        ),
        DeviceKind(
            "h20-96g",
            148e12,
            int(95.0 * GIB),
            4.0e12,
            450e9,
            50e9,
            "NVIDIA H20: 148 TFLOP/s, 96 GB at 4.0 TB/s, NVLink 900 GB/s",
        ),
        DeviceKind("b200-180g", 2250e12, int(178.3 * GIB), 7.7e12, 900e9, 50e9, "NVIDIA DGX B200 data sheet"),
        DeviceKind(
            "gb200-186g",
            2500e12,
            int(184.3 * GIB),
            8.0e12,
            900e9,
            50e9,
            "NVIDIA GB200 NVL72: of 72, 360 PFLOP/s with sparsity",
        ),
        DeviceKind("mi300x-192g", 1307.4e12, int(191.98 * GIB), 5.3e12, 448e9, 50e9, "AMD Instinct MI300X data sheet"),
    )
}


class Rack(NamedTuple):
    """Nodes that one NVLink joins: their device, how many devices each has, any number if 0, and how many nodes
    there are."""

    device: str
    devices_per_node: int
    nodes: int


# NVIDIA GB200 NVL72: 18 compute trays of 4 devices, each a host of its own.
RACKS = {"gb200-nvl72": Rack("gb200-186g", 4, 18)}


# A number alone is one node; of more devices than any has it was probably meant as all.
MOST_OF_A_NODE = 16


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices of a training.

    `factor`: measured seconds for one predicted second (`bpipe calibrate`). `nodes_per_domain`: so many nodes have the
    links between them that the devices of one have. Memory of nodes stays apart. `budget_bytes`: what may be used of a
    device's memory, if that is not all of it.
    """

    device: DeviceKind
    num_nodes: int
    devices_per_node: int
    factor: float = 1.0
    nodes_per_domain: int = 1
    budget_bytes: int | None = None

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
        raise ValueError(
            f"cluster {text!r} is not DEVICE:NODESxDEVICES or DEVICE:NODESxDEVICES@GB, such as a100-80g:4x8@12.5"
        )
    name = match[1]
    if name not in DEVICES and name not in RACKS:
        raise ValueError(f"cluster {text!r}: {unknown('device', name, (*DEVICES, *RACKS))}")
    rack = RACKS.get(name, Rack(name, 0, 1))
    nodes, each = devices if match[3] is None and devices is not None else _sizes(match, rack)
    if nodes < 1 or each < 1:
        raise ValueError(f"cluster {text!r} has {nodes} nodes of {each} devices: there must be at least one of each")
    if each > rack.devices_per_node > 0:
        raise ValueError(
            f"cluster {text!r}: a node of {name} has {rack.devices_per_node} devices; {name}:2 is two racks"
        )
    return Cluster(_with_port(DEVICES[rack.device], match[4], text), nodes, each, nodes_per_domain=rack.nodes)


def _with_port(device: DeviceKind, port: str | None, text: str) -> DeviceKind:
    """Return the device with the port between nodes that the text says, in GB/s, if any."""
    if port is None:
        return device
    if not float(port):
        raise ValueError(f"cluster {text!r}: a port of {port} GB/s must be above 0: give more, or leave @ out")
    return replace(device, between_bytes_per_s=float(port) * 1e9)


def _sizes(match: re.Match[str], rack: Rack) -> tuple[int, int]:
    """Return the nodes, and devices of one; of racks a number alone counts those.

    Raises ValueError for a number alone that no node has.
    """
    text, name, nodes, each = match[0], match[1], match[2], int(match[3])
    if nodes is None and rack.devices_per_node:
        return each * rack.nodes, rack.devices_per_node
    if nodes is None and each > MOST_OF_A_NODE:
        raise ValueError(
            f"cluster {text!r} is one node of {each} devices: write {name}:NODESxDEVICES, such as "
            f"{name}:{-(-each // 8)}x8, or {name}:1x{each} if it is one node"
        )
    return int(nodes or 1), each
