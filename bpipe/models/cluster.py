"""Describe devices and how they are joined. In: text such as `a100-80g:4x8`. Out: a frozen `Cluster`. Knows no model and no schedule.

Peaks are dense 16-bit matrix FLOP/s; links are per device and one direction. What software reaches of them is in `compute`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """`memory_bytes` is what a process can use at most: the size a CUDA runtime reports, a little less than the label says."""

    name: str
    peak_flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    inside_bytes_per_s: float
    between_bytes_per_s: float
    source: str


# `between` is one network port a device: eight of 200 Gbit/s in a DGX A100, eight of 400 Gbit/s in a DGX H100, H200 and B200.
# Usable memory of the A100 with 80 GB: "total capacity of 79.25 GiB" in torch's own messages (Vad-R1 issue 11, OOTDiffusion issue 235 on
# GitHub). The others' are what torch reports on such machines, to a few tenths; `Device` takes another where yours differs.
DEVICES = {
    device.name: device
    for device in (
        Device("a100-40g", 312e12, int(39.5 * GIB), 1.555e12, 300e9, 25e9, "NVIDIA A100 data sheet; 39.5 GiB as torch reports it"),
        Device("a100-80g", 312e12, int(79.25 * GIB), 2.039e12, 300e9, 25e9, "NVIDIA A100 data sheet"),
        Device("h100-80g", 989e12, int(79.1 * GIB), 3.35e12, 450e9, 50e9, "NVIDIA H100 SXM data sheet"),
        Device("h200-141g", 989e12, int(139.8 * GIB), 4.8e12, 450e9, 50e9, "NVIDIA H200 data sheet"),
        Device("b200-180g", 2250e12, int(178.3 * GIB), 7.7e12, 900e9, 50e9, "NVIDIA DGX B200 data sheet"),
    )
}


@dataclass(frozen=True, slots=True)
class Cluster:
    device: Device
    num_nodes: int
    devices_per_node: int

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node


def parse_cluster(text: str) -> Cluster:
    """`DEVICE:NODESxDEVICES`, such as a100-80g:4x8; without `NODESx` it is one node."""
    match = re.fullmatch(r"([a-z0-9-]+):(?:([0-9]{1,5})x)?([0-9]{1,3})", text)
    if match is None:
        raise ValueError(f"cluster {text!r} is not DEVICE:NODESxDEVICES, such as a100-80g:4x8")
    name, nodes, devices = match[1], int(match[2] or 1), int(match[3])
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r} in cluster {text!r}: choose from {', '.join(DEVICES)}")
    if nodes < 1 or devices < 1:
        raise ValueError(f"cluster {text!r} has {nodes} nodes of {devices} devices: there must be at least one of each")
    return Cluster(DEVICES[name], nodes, devices)
