"""Build the late device: C++ against the installed torch, once for each version of the sources and of torch.

The module is kept in the user's cache folder, under a name derived from everything that it was built from. Raises
`NoCompiler` if there is no compiler.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

SOURCES = Path(__file__).parent / "csrc"
NAME = "bpipe_late_device"
# Optimizing more takes three times as long, and the kernels that run are torch's.
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-w", "-fvisibility=hidden")


class NoCompiler(RuntimeError):
    """There is no compiler."""


def load() -> ModuleType:
    """Return the module, built if necessary."""
    path = built()
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built() -> Path:
    """Return the module's path; build it if necessary."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bpipe" / "late"
    sources = sorted(SOURCES.glob("*.cpp"))
    library = folder / f"{_hash(*map(_name_of, sources))}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            # One process of the machine builds, and the others wait for it.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _build(library, {source: folder / _name_of(source) for source in sources})
    return library


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _name_of(source: Path) -> str:
    """Return an object's name, derived from everything that it is built from."""
    headers = [path.name + path.read_text() for path in sorted(SOURCES.glob("*.h"))]
    return f"{source.stem}-{_hash(torch.__version__, sys.version, *FLAGS, *headers, source.read_text())}.o"


def _build(library: Path, objects: dict[Path, Path]) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        raise NoCompiler("the late device is built by g++ and needs Python's headers; one of them is not here")
    from torch.utils.cpp_extension import include_paths, library_paths

    includes = [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    defined = f"-DTORCH_EXTENSION_NAME={NAME}"
    # Start the longest first.
    missing = sorted(
        (source for source in objects if not objects[source].exists()), key=lambda source: -source.stat().st_size
    )
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        list(
            workers.map(
                lambda source: _make(objects[source], compiler, *FLAGS, abi, defined, *includes, "-c", source), missing
            )
        )
    paths = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    torch_libraries = [f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python")]
    _make(library, compiler, "-shared", *objects.values(), *paths, *torch_libraries)


def _make(output: Path, *command: object) -> None:
    """Run a compiler. Its output gets its final name when it is complete."""
    partial = output.with_suffix(f".{os.getpid()}")
    full = [*map(str, command), "-o", str(partial)]
    process = subprocess.run(full, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"building the late device failed: {' '.join(full)}\n{process.stderr[-4000:]}")
    partial.replace(output)
