"""Cluster files, in JSON or TOML.

nodes = 16
gpus_per_node = 8
gpus_per_domain = 32          # joined by a node's links; by default those of one node

[device]                      # or a name
like = "h100-80g"             # supplies every other value
between_gb_per_s = 25
"""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from bpipe.names import unknown
from bpipe.predict.cluster import DEVICES, GIB, Cluster, DeviceKind, parse_cluster
from bpipe.values import load_json, printable

# Keys of `device`, the field each sets and how many of its units one of the key's is.
NUMBERS = {
    "peak_tflops": ("peak_flops_per_s", 1e12),
    "memory_gib": ("memory_bytes", GIB),
    "memory_gb_per_s": ("memory_bytes_per_s", 1e9),
    "inside_gb_per_s": ("inside_bytes_per_s", 1e9),
    "between_gb_per_s": ("between_bytes_per_s", 1e9),
}
# These may be left out.
OPTIONAL = {
    "inside_gap_us": ("inside_gap_s", 1e-6),
    "between_gap_us": ("between_gap_s", 1e-6),
    "host_gb_per_s": ("host_bytes_per_s", 1e9),
    "host_node_gb_per_s": ("host_node_bytes_per_s", 1e9),
    "multiprocessors": ("num_processors", 1),
    "mesh_links": ("mesh_links", 1),
    "fp8_tflops": ("fp8_flops_per_s", 1e12),
}
# Of these there is no half.
WHOLE = ("multiprocessors", "mesh_links")
SUFFIXES = (".json", ".toml")
# More than any device has: beyond, the unit was mistaken.
LARGEST = 1e6


def cluster_named(text: str, devices: tuple[int, int] | None = None) -> Cluster:
    """Return the cluster of a file or of `parse_cluster`. `devices`: nodes and GPUs of each, if neither says them."""
    path = Path(text)
    return read_cluster(path, devices) if path.suffix in SUFFIXES else parse_cluster(text, devices)


def read_cluster(path: Path, devices: tuple[int, int] | None = None) -> Cluster:
    """Read a cluster file. `devices`: nodes and GPUs of each, for a file that does not say them."""
    data = path.read_bytes()
    try:
        document = load_json(data) if path.suffix == ".json" else tomllib.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{path}: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path}: a cluster must be an object with nodes, gpus_per_node and device")
    _refuse_unknown(path, "", document, ("nodes", "gpus_per_node", "gpus_per_domain", "device"))
    nodes, per_node = devices or (None, None)
    sizes = [_size(path, document, key, default) for key, default in (("nodes", nodes), ("gpus_per_node", per_node))]
    if "device" not in document:
        raise ValueError(f"{path}: device is missing: give one of {', '.join(DEVICES)}, or an object with its numbers")
    num_nodes, devices_per_node = sizes
    joined, rest = divmod(_size(path, document, "gpus_per_domain", devices_per_node), devices_per_node)
    if rest:
        raise ValueError(
            f"{path}: gpus_per_domain is {document['gpus_per_domain']}, but must be a multiple of the "
            f"{devices_per_node} per node"
        )
    return Cluster(_device(path, document["device"]), num_nodes, devices_per_node, nodes_per_domain=joined)


def _size(path: Path, document: dict[str, Any], key: str, default: int | None) -> int:
    size = document.get(key, default)
    if type(size) is not int or not 1 <= size <= LARGEST:
        raise ValueError(f"{path}: {key} is {_said(size)}, but must be a whole number from 1 to {LARGEST:.0f}")
    return size


def _device(path: Path, value: object) -> DeviceKind:
    if isinstance(value, str):
        return _known(path, "device", value)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: device is {_said(value)}, but must be a name or an object")
    keys = {**NUMBERS, **OPTIONAL}
    _refuse_unknown(path, "device.", value, ("like", "name", *keys))
    numbers: dict[str, Any] = {
        field: _number(path, key, value[key]) * unit for key, (field, unit) in keys.items() if key in value
    }
    if "memory_bytes" in numbers:
        numbers["memory_bytes"] = int(numbers["memory_bytes"])
    name = value.get("name", path.stem)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{path}: device.name is {_said(name)}, but must be text")
    name = printable(name)
    if "like" in value:
        return replace(_known(path, "device.like", value["like"]), name=name, source=str(path), **numbers)
    missing = [f"device.{key}" for key in NUMBERS if key not in value]
    if missing:
        raise ValueError(f"{path}: {', '.join(missing)} missing: give all of them, or device.like")
    return DeviceKind(name=name, source=str(path), **numbers)


def _known(path: Path, key: str, name: object) -> DeviceKind:
    if not isinstance(name, str) or name not in DEVICES:
        raise ValueError(f"{path}: {key}: {unknown('device', str(name), DEVICES)}")
    return DEVICES[name]


def _number(path: Path, key: str, value: Any) -> Any:
    kinds, kind = ((int,), "whole number") if key in WHOLE else ((int, float), "number")
    if type(value) not in kinds or not 0 < value <= LARGEST:
        raise ValueError(
            f"{path}: device.{key} is {_said(value)}, but must be a {kind} above 0 and at most {LARGEST:.0f}"
        )
    return value if key in WHOLE else float(value)


def _refuse_unknown(path: Path, before: str, entries: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in entries:
        if key not in keys:
            raise ValueError(f"{path}: {unknown('key', before + key, [before + name for name in keys])}")


def _said(value: object) -> str:
    return "missing" if value is None else repr(value)[:60]
