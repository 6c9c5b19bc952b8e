"""What only CUDA has, and `torch.accelerator` no words for. The only file of `bpipe` that names `torch.cuda`.

In: nothing. Out: the current stream's handle for CUDA's own runtime. What is the same on every accelerator stands in
`streams`.
"""

from __future__ import annotations

import torch


def stream_handle() -> int:
    """Return the current stream as CUDA's runtime knows it. torch.Stream.native_handle came only with torch 2.12."""
    return int(torch.cuda.current_stream().cuda_stream)
