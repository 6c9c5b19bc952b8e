"""What only CUDA has, and `torch.accelerator` no words for. The only file of `bpipe` that names `torch.cuda`.

In: a device, or nothing. Out: a stream's handle for CUDA's own runtime, and a device's name.
What is the same on every accelerator stands in `streams`.
"""

from __future__ import annotations

import torch


def is_available() -> bool:
    return torch.cuda.is_available()


def stream_handle() -> int:
    """Return the current stream as CUDA's runtime knows it. torch.Stream.native_handle came only with torch 2.12."""
    return int(torch.cuda.current_stream().cuda_stream)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
