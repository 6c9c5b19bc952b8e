"""What only CUDA has and `torch.accelerator` does not. The only file of `bpipe` that names `torch.cuda`."""

from __future__ import annotations

import torch


def stream_handle() -> int:
    """Return the current stream as CUDA's runtime knows it. torch.Stream.native_handle came only with torch 2.12."""
    return int(torch.cuda.current_stream().cuda_stream)
