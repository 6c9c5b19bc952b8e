"""The runtime that torch brings: it is the one that is called, and all that is asked of it is there.

No GPU is needed to load it.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from bpipe.transport.cuda_runtime import SIGNATURES, CudaError, CudaRuntime, runtime

with_cuda = pytest.mark.skipif(torch.version.cuda is None, reason="torch was built without CUDA")


@with_cuda
def test_it_is_torchs_own() -> None:
    """A package of bindings brought a second one, made for a CUDA of its own: without a driver for that, `peer` and
    `host` were gone."""
    major, minor = (int(part) for part in (torch.version.cuda or "").split(".")[:2])
    assert runtime().version == 1000 * major + 10 * minor
    with open("/proc/self/maps") as maps:
        assert len({line.split()[-1] for line in maps if "libcudart" in line}) <= 1


@with_cuda
def test_every_function_that_is_called_is_there() -> None:
    library = ctypes.CDLL(torch._C.__file__)
    for name in (*SIGNATURES, "cudaGetErrorName"):
        assert getattr(library, name)
    if runtime().version >= 12080:
        assert library.cudaMemcpyBatchAsync


@with_cuda
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_error_has_cudas_name() -> None:
    with pytest.raises(CudaError, match=r"cudaMemGetInfo failed: cudaError(InsufficientDriver|NoDevice|StubLibrary)"):
        runtime().memory()


def test_a_torch_without_cuda_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"this torch \(.*\) includes no CUDA runtime"):
        CudaRuntime(SimpleNamespace())
