"""Measure single kernels on this machine's device.

In: `KernelShapes` as JSON. Out: the JSON that `KernelTimes` is read from.

A program of its own: `python -m bpipe.runtime.kernel_times --precision bf16`, under torchrun where gathers are among
the shapes. All ranks measure at once, as they compute in training; the slowest one's seconds count, each the median of
several. Knows no model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bpipe.runtime import cuda
from bpipe.transport.distributed import gather_into

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TIMEOUT = timedelta(minutes=10)
# One call lasts so long at least, of as many kernels as that takes: else the clock and the launch are measured.
SHORTEST_S = 2e-3

Kernel = Callable[[], object]


def product(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Kernel:
    rows, columns, terms = sizes
    one, other = (
        torch.randn(rows, terms, dtype=dtype, device=device),
        torch.randn(columns, terms, dtype=dtype, device=device),
    )
    result = torch.empty(rows, columns, dtype=dtype, device=device)
    # As a linear layer has it: weights lie transposed.
    return lambda: torch.mm(one, other.t(), out=result)


def attention(kind: str, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Kernel, Kernel]:
    """Return kernels of causal attention, forward and backward: torch's fused kernel, or products with a softmax in
    32 bit."""
    heads, sequence, head_size = sizes
    inputs = [
        torch.randn(1, heads, sequence, head_size, dtype=dtype, device=device, requires_grad=True) for _ in range(3)
    ]
    ahead = torch.ones(sequence, sequence, dtype=torch.bool, device=device).triu(1)

    def core() -> torch.Tensor:
        query, key, value = inputs
        if kind == "flash":
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        scores = (query @ key.transpose(2, 3) / head_size**0.5).masked_fill(ahead, float("-inf"))
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(dtype) @ value

    gradient = torch.randn(1, heads, sequence, head_size, dtype=dtype, device=device)

    def forward() -> object:
        with torch.no_grad():
            return core()

    result = core()
    return forward, lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)


def gather(num_bytes: int, dtype: torch.dtype, device: torch.device) -> Kernel:
    """Return a kernel that gathers over all ranks."""
    count = num_bytes // dtype.itemsize
    whole = torch.zeros(count, dtype=dtype, device=device)
    part = torch.zeros(count // dist.get_world_size(), dtype=dtype, device=device)
    return lambda: gather_into(whole[: part.numel() * dist.get_world_size()], part)


def seconds(kernel: Kernel, calls: int, device: torch.device) -> float:
    """Return seconds of one of `calls` calls, issued one behind the other."""
    if device.type != "cpu":
        start, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
        start.record()
        for _ in range(calls):
            kernel()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / calls
    began = time.perf_counter()
    for _ in range(calls):
        kernel()
    return (time.perf_counter() - began) / calls


def median_of_measurements(kernel: Kernel, repeats: int, device: torch.device) -> float:
    """Return the median of several measurements, behind one that warms up and says how many calls one takes.

    The same number on all ranks.
    """
    calls = max(1, round(SHORTEST_S / max(_slowest(seconds(kernel, 1, device), device), 1e-9)))
    return _slowest(statistics.median(seconds(kernel, calls, device) for _ in range(repeats)), device)


def _slowest(value: float, device: torch.device) -> float:
    if not dist.is_initialized():
        return value
    slowest = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.item())


def measure(shapes: dict[str, Any], precision: str, repeats: int, device: torch.device) -> dict[str, Any]:
    """Return the seconds of all shapes."""
    dtype = DTYPES[precision]
    products = [
        [*sizes, median_of_measurements(product(sizes, dtype, device), repeats, device)] for sizes in shapes["products"]
    ]
    cores = []
    for kind, *sizes in shapes["attention"]:
        cores.append(
            [
                kind,
                *sizes,
                *(median_of_measurements(kernel, repeats, device) for kernel in attention(kind, sizes, dtype, device)),
            ]
        )
    gathers = [
        [ranks, num_bytes, median_of_measurements(gather(num_bytes, dtype, device), repeats, device)]
        for ranks, num_bytes in shapes["gathers"]
    ]
    return {"products": products, "attention": cores, "gathers": gathers}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--precision", choices=DTYPES, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shapes", required=True, help="JSON")
    parser.add_argument("--output", help="default: standard output")
    options = parser.parse_args()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.accelerator.set_device_index(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    found = measure(json.loads(options.shapes), options.precision, options.repeats, device)
    first = not dist.is_initialized() or dist.get_rank() == 0
    if dist.is_initialized():
        dist.destroy_process_group()
    if not first:
        return
    name = cuda.device_name(device) if device.type == "cuda" else "cpu"
    head = {
        "format": "bpipe-kernel-times",
        "version": 1,
        "device": name,
        "precision": options.precision,
        "torch": torch.__version__,
    }
    text = json.dumps({**head, **found}, indent=1) + "\n"
    if options.output is None:
        sys.stdout.write(text)
    else:
        with open(options.output, "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
