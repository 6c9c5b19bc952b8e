"""The lines of scripts/gpu_check.py that only a GPU would run, run without one: a slip in one of them must not cost
a GPU's time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.scripts import pretend_gpu
from tests.scripts.pretend_gpu import BusyEvent, Cuda
from tests.support.threads import one_thread_a_rank as one_thread_a_rank

CPU = torch.device("cpu")
REAL = {name: getattr(torch.cuda, name) for name in ("Stream", "Event")}


@pytest.fixture(scope="module")
def check(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("gpu_check")


@pytest.fixture
def cuda(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return pretend_gpu.pretend(monkeypatch)


def run(check: ModuleType, name: str) -> Any:
    step = check.STEPS[name]
    return step.run(CPU, step.sizes["rehearsal"], time.monotonic() + 60)


def said(result: Any) -> dict[str, str]:
    return dict(result.rows)


@pytest.mark.parametrize("kind", ["Stream", "Event"])
def test_what_is_pretended_is_there(kind: str) -> None:
    methods = [name for name, value in vars(getattr(pretend_gpu, kind)).items() if callable(value)]
    assert all(hasattr(REAL[kind], name) for name in methods)


@pytest.mark.parametrize("name", ["limits", "memory", "overhead", "side_stream"])
def test_a_step_runs_to_its_end(check: ModuleType, cuda: Cuda, name: str) -> None:
    result = run(check, name)
    assert result.rows
    assert result.skipped is None
    assert cuda.asked


class Runtime:
    """CUDA's runtime, as one that was told of no other device."""

    version, driver_version, _batch = 13000, 13020, True

    def __init__(self, current: int) -> None:
        self._library = self
        self._current = current

    def cudaGetDevice(self, found: Any) -> int:
        found._obj.value = self._current
        return 0


def test_versions(check: ModuleType, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]
    cuda.answer("set_device", lambda device: current.__setitem__(0, device if isinstance(device, int) else 0))
    cuda.answer("current_device", lambda: current[0])
    plain_zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, **named: plain_zeros(*shape))
    monkeypatch.setattr(check.versions, "runtime", lambda: Runtime(0))
    monkeypatch.setattr(check.versions, "device_of_bindings", lambda: "7")
    monkeypatch.setenv(check.versions.ALLOCATOR, "expandable_segments:True")
    result = run(check, "versions")
    lines = said(result)
    assert lines["current device, torch 0"] == "ok: the runtime that lends memory says 0, the bindings' own 7"
    assert lines["current device, torch 1"] == "FAILED: the runtime that lends memory says 0, the bindings' own 7"
    assert lines["CUDA of the runtime, and of the driver"] == "13.0, 13.2; copies of a transfer go in one call"
    assert lines["allocator under expandable_segments:True"].startswith("ok")
    assert result.ok is False
    assert current == [0], "and back again"


def test_versions_notices_an_allocator_that_is_not_the_one_asked_for(
    check: ModuleType, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check.versions, "_same_device", lambda device, result: None)
    monkeypatch.setenv(check.versions.ALLOCATOR, "backend:cudaMallocAsync")
    assert said(run(check, "versions"))["allocator under backend:cudaMallocAsync"] == "FAILED: expandable_segments:True"
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert said(run(check, "versions"))["allocator under backend:cudaMallocAsync"] == "ok: backend:cudaMallocAsync"


def test_queues(check: ModuleType, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is over at once here, so nothing can be judged, and it says so."""
    monkeypatch.setattr(check.queues, "SHORT_S", 0.01)
    sizes = replace(check.STEPS["queues"].sizes["rehearsal"], copy_bytes=1 << 10)
    result = check.queues.run(CPU, sizes, time.monotonic() + 60)
    assert [value.startswith("cannot be judged") for value in said(result).values()] == [True] * 4
    slept = [arguments[0] for name, arguments in cuda.asked if name == "_sleep"]
    assert len(slept) == (3 + 3) * (sizes.rounds + 1), (
        "three kernels for the one question, a probe for each of the others"
    )
    assert max(slept) == 0.02 * check.queues.CYCLES_PER_S


def test_streams_with_a_gpus_mutations(check: ModuleType, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has none of these streams, and its memory is really gone where a wait is missing: what is taken out is
    put back at once."""
    for mutation in check.streams.MUTATIONS:
        mutation.instead()
    monkeypatch.setattr(check.streams, "MUTATIONS", check.streams.MUTATIONS[3:])
    assert said(run(check, "streams"))["gradients with delays and poison"].startswith("ok")
    bare = check.streams._bare("_outbound")
    with bare(type("Streams", (), {"_outbound": torch.cuda.Stream()})()):
        pass


def test_abandon(check: ModuleType, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", BusyEvent)
    assert run(check, "abandon").ok is True
    assert ("_sleep", (int(0.01 * 2e9),)) in cuda.asked


def test_abandon_notices_a_host_that_waits_for_its_device(
    check: ModuleType, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it did: a synchronisation inside, and no traceback until the device was done, if ever."""
    assert [value.startswith("FAILED") for value in said(run(check, "abandon")).values()] == [True, True], (
        "the device was done by then"
    )
    monkeypatch.setattr(torch.cuda, "Event", BusyEvent)
    monkeypatch.setattr(check.abandon, "AT_ONCE_S", 0.05)
    monkeypatch.setattr(check.abandon.Engine, "abandon", lambda engine: time.sleep(0.1))
    assert run(check, "abandon").ok is False


def test_nearly_full(check: ModuleType, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    nearly_full = check.nearly_full
    full = [False]
    cuda.answer("set_per_process_memory_fraction", lambda fraction, device: full.__setitem__(0, fraction < 1.0))
    cuda.answer("max_memory_reserved", lambda: 1 << 10)
    monkeypatch.setattr(nearly_full, "SLACK_BYTES", 1 << 10)
    plain = nearly_full.Program.gradient

    def gradient(program: Any) -> torch.Tensor:
        if full[0] and program.engine is None:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")
        result: torch.Tensor = plain(program)
        return result

    monkeypatch.setattr(nearly_full.Program, "gradient", gradient)
    result = run(check, "nearly_full")
    assert result.ok is True, result.rows
    assert (
        said(result)["without balancing, in the same room"]
        == "ok: out of memory: CUDA out of memory. Tried to allocate"
    )
    assert ("set_per_process_memory_fraction", (2 * 1024 / (4 << 20), CPU)) in cuda.asked
    assert full == [False], "the limit is lifted again"


def test_nearly_full_notices_a_limit_that_is_none(check: ModuleType, cuda: Cuda) -> None:
    assert said(run(check, "nearly_full"))["without balancing, in the same room"].startswith("FAILED: fits into")


def test_nearly_full_notices_a_lender_that_does_not_ask_torch(
    check: ModuleType, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused:
        def make(self, nbytes: int) -> Any:
            raise RuntimeError("cudaMalloc failed: cudaErrorMemoryAllocation")

    monkeypatch.setattr(check.nearly_full, "lender_on", lambda device: Refused())
    assert "cudaErrorMemoryAllocation" in said(run(check, "nearly_full"))["memory for host buffers beside a full cache"]


def test_nccl(check: ModuleType, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def started(function: Any, args: tuple[Any, ...], **named: Any) -> None:
        asked.append(args[1:3])
        engine = {"count": 4, "wrong": 0, "reference": True, "host_buffer_bytes": 512, "evictions": 3}
        for rank in (0, 1):
            Path(args[0], f"{rank}.json").write_text(
                json.dumps({"transport": "nccl", "engine": engine | {"wrong": rank}})
            )

    monkeypatch.setattr("gpu.pair.start_processes", started)
    result = run(check, "nccl")
    assert asked == [("cpu", "nccl")]
    assert [value.split(":")[0] for _, value in result.rows] == ["ok", "ok", "FAILED", "ok", "ok"]
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert "brings NCCL 2.28.9, which refuses two ranks on one GPU; 2.30 does not" in run(check, "nccl").skipped


def test_compute_units(check: ModuleType, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_kernel = pytest.importorskip("gpu.copy_kernel")
    copied: list[int] = []

    def start(source: torch.Tensor, target: torch.Tensor, programs: int, times: int) -> None:
        assert source.numel() % copy_kernel.BLOCK == 0
        target.copy_(source)
        copied.append(programs)

    from gpu import persistent_kernel

    monkeypatch.setattr(copy_kernel, "start", start)
    programs: list[int] = []

    def multiply(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor, number: int) -> None:
        product.copy_(left @ right)
        programs.append(number)

    monkeypatch.setattr(persistent_kernel, "multiply", multiply)
    result = run(check, "compute_units")
    assert set(copied) == {1, 2}
    assert set(programs) == {132}, "a program for each compute unit"
    works = {name.partition(" beside ")[0] for name, _ in result.rows if " beside " in name}
    assert works == {"products", "products of a persistent kernel"}


INTERPRETED = """
import sys, torch
sys.path.insert(0, "scripts")
from gpu import persistent_kernel as kernel
kernel.ROWS, kernel.COLUMNS, kernel.DEPTH = 16, 32, 16
left, right, product = torch.randn(40, 48), torch.randn(48, 70), torch.zeros(40, 70)
kernel.multiply(left, right, product, 3)
torch.testing.assert_close(product, left @ right)
"""


def test_the_persistent_kernel_multiplies() -> None:
    """By Triton's interpreter; on a GPU it has not run.

    Edges that tiles do not divide, and fewer programs than tiles.
    """
    pytest.importorskip("triton")
    ended = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr


# The stand-in for CUDA that Megatron gets on a CPU stays in its process. There memory is never allocated: here it is,
# more each time.
MEGATRON = """
import itertools, json, sys, time
sys.path.insert(0, "scripts")
import gpu_check, torch
from gpu import megatron_stage
from megatron.scheduling.start import startup

prepare, counter = startup.prepare, itertools.count(0, 100)

def prepared():
    prepare()
    torch.cuda.memory_allocated = torch.cuda.memory_reserved = lambda device: next(counter)

startup.prepare = prepared
megatron_stage.on_cuda = lambda device: device.type == "cpu"
result = megatron_stage.run(torch.device("cpu"), megatron_stage.SIZES["rehearsal"], time.monotonic() + 60)
print("FOUND", json.dumps(result.rows))
"""


@pytest.mark.timeout(300)
def test_megatron(scripts: Path) -> None:
    """By the allocator's counters, which say here that little moved and that memory grows: both are noticed."""
    root = scripts.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, "-c", MEGATRON],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
    rows = dict(json.loads(line.removeprefix("FOUND ")))
    for name in ("GPT-3 kind, dropout", "LLaMA kind"):
        assert "of 9.537e-05 MiB" in rows[f"{name}: part of what a forward leaves that moves"]
        assert rows[f"{name}: gradients after evicting and loading"].startswith("ok: 0 of 3")
        assert "NOT flat" in rows[f"{name}: memory reserved"]
        assert rows[f"{name}: memory reserved"].startswith("FAILED")
