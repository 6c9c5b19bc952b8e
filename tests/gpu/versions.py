"""Installed versions, and whether torch and the CUDA runtime that lends memory use the same device.

Reports versions, the current device of each runtime, and, if the environment selects an allocator, whether it is used.
"""

import ctypes
import importlib.metadata
import os
import platform
import subprocess
import sys

import torch

from bpipe.transport.cuda_runtime import runtime
from tests.gpu.accelerators import Accelerator
from tests.gpu.common import FULL, MODERATE, SMALL, Result

PACKAGES = [
    "cuda-bindings",
    "triton",
    "megatron-core",
    "transformer-engine",
    "flash-attn",
    "apex",
    "pytest",
    "hypothesis",
]
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
SIZES = dict.fromkeys((FULL, MODERATE, SMALL))


def run(on: Accelerator, sizes: None, until: float) -> Result:
    result = Result()
    result.row("python", f"{platform.python_version()} at {sys.executable}")
    result.row("torch", f"{torch.__version__}, CUDA {torch.version.cuda}, NCCL {_nccl()}")
    result.row("packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    result.row("compiler for torch.compile", _compiler())
    result.row("devices", on.described())
    _same_device(on, result)
    configured = os.environ.get(ALLOCATOR, "")
    in_use = on.allocator()
    result.facts["allocator"] = in_use
    if configured:
        result.check(f"allocator under {configured}", in_use in configured, in_use)
    return result


def device_of_runtime(device_type: str) -> int:
    """Return the current device of the runtime that lends memory."""
    number = ctypes.c_int(-1)
    status = runtime(device_type)._library.cudaGetDevice(ctypes.byref(number))
    return number.value if status == 0 else -status


def device_of_bindings() -> str:
    """Return the same for the package of bindings, which has its own runtime that is not used here."""
    try:
        from cuda.bindings import runtime as bindings
    except ImportError as error:
        return f"none ({error})"
    status, *numbers = bindings.cudaGetDevice()
    return str(numbers[0]) if int(status) == 0 else status.name


def _same_device(on: Accelerator, result: Result) -> None:
    """One process may hold several CUDA runtimes: lent memory must be on torch's current device.

    With one GPU, all can only answer 0. With more, the last one is made current and each is asked again.
    """
    here = torch.accelerator.current_device_index()
    for index in sorted({here, torch.accelerator.device_count() - 1}):
        torch.accelerator.set_device_index(index)
        torch.zeros(1, device=on.device.type)
        theirs = device_of_runtime(on.device.type)
        text = f"the runtime that lends memory says {theirs}, the bindings' own {device_of_bindings()}"
        result.check(f"current device, torch {torch.accelerator.current_device_index()}", theirs == index, text)
    torch.accelerator.set_device_index(here)
    library = runtime(on.device.type)
    numbers = [f"{version // 1000}.{version % 1000 // 10}" for version in (library.version, library.driver_version)]
    batched = "in one call" if library._batch is not None else "one by one"
    result.row("CUDA of the runtime, and of the driver", f"{', '.join(numbers)}; copies of a transfer go {batched}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _nccl() -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return "none"


def _compiler() -> str:
    """Return the version of the C compiler, which Triton and inductor need to compile Megatron's fusions."""
    try:
        printed = subprocess.run(["cc", "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"none: {error}"
    return printed.splitlines()[0] if printed else "gives no version"
