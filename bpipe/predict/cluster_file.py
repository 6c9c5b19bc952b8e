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
from bpipe.values import a_text, load_json

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
    _refuse_unknown("", document, ("nodes", "gpus_per_node", "gpus_per_domain", "device"))
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
    return Cluster(_device(document["device"], path), nodes, per_node, nodes_per_domain=joined)


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
