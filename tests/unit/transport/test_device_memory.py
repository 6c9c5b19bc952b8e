"""Lending and reaching GPU memory: the calls, their addresses and errors, against a fake CUDA runtime."""

import ctypes
import json
import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bpipe.transport.cuda_runtime import SIGNATURES, CudaRuntime, runtime
from bpipe.transport.host_memory import Budget, Buffers, LocalRank, MemoryLimit, memory_limits
from bpipe.transport.memory import DeviceMemory, own_memory
from bpipe.transport.one_sided import HostMemory
from tests.unit.transport.fake_cuda import Error, FakeCuda, installed
from tests.unit.transport.loopback import CPU, NoLane


def lender(cuda: FakeCuda, index: int = 0) -> DeviceMemory:
    return DeviceMemory(cuda.device(index))


def numbers(length: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))


def test_an_opened_handle_is_the_lenders_memory(cuda: FakeCuda) -> None:
    handle, lent = lender(cuda).make(4096)
    opened = lender(cuda).open(json.loads(json.dumps(handle)))
    sent, received = numbers(1000), torch.zeros(1000, dtype=torch.uint8)
    opened.write([(96, sent)])
    lent.read([(96, received)])
    assert torch.equal(sent, received)
    received.zero_()
    opened.read([(96, received)])
    assert torch.equal(sent, received)
    opened.close()
    lent.close()
    assert cuda.opened == []
    assert cuda.allocated == {}


def test_nothing_is_copied_beyond_the_end(cuda: FakeCuda) -> None:
    _, lent = lender(cuda).make(100)
    with pytest.raises(AssertionError, match="50 bytes at 60 of a region of 100"):
        lent.write([(60, numbers(50))])
    with pytest.raises(AssertionError, match="50 bytes at 60 of a region of 100"):
        lent.read([(60, numbers(50))])
    assert cuda.streams == []


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("cudaMalloc", Error.cudaErrorMemoryAllocation),
        ("cudaIpcGetMemHandle", Error.cudaErrorMapBufferObjectFailed),
        ("cudaIpcOpenMemHandle", Error.cudaErrorMapBufferObjectFailed),
        ("cudaMemcpyAsync", Error.cudaErrorMapBufferObjectFailed),
        ("cudaDeviceSynchronize", Error.cudaErrorMapBufferObjectFailed),
        ("cudaIpcCloseMemHandle", Error.cudaErrorMapBufferObjectFailed),
        ("cudaFree", Error.cudaErrorMemoryAllocation),
    ],
)
def test_an_error_of_cudas_names_the_call(cuda: FakeCuda, call: str, error: Error) -> None:
    def one_transfer() -> None:
        handle, lent = lender(cuda).make(100)
        opened = lender(cuda).open(handle)
        opened.write([(0, numbers(100))])
        opened.close()
        lent.close()

    cuda.failing[call] = error
    with pytest.raises(RuntimeError, match=f"{call} failed: {error.name}"):
        one_transfer()


@pytest.mark.parametrize("index", [0, 3])
def test_memory_is_made_and_opened_on_this_ranks_device(cuda: FakeCuda, index: int) -> None:
    """It was device 0 for every rank unless something had set another one."""
    handle, _ = lender(cuda, index).make(100)
    cuda.current_device = 7
    lender(cuda, index).open(handle)
    assert cuda.devices == {"cudaMalloc": index, "cudaIpcOpenMemHandle": index}


def test_what_torch_keeps_unused_is_given_back_before_lending_fails(cuda: FakeCuda) -> None:
    """If torch's cache fills the GPU, the driver has nothing left, and lending used to fail."""
    cuda.free_bytes, cuda.cached_bytes = 1 << 20, 16 << 20
    _, lent = lender(cuda).make(8 << 20)
    assert (
        cuda.calls == ("cudaSetDevice cudaMalloc cudaGetLastError empty_cache cudaMalloc cudaIpcGetMemHandle").split()
    )
    lent.close()


def test_an_error_is_taken_off_the_record(cuda: FakeCuda) -> None:
    """torch checks it after each kernel and would raise in mid-model what a probe had already handled."""
    cuda.failing["cudaIpcGetMemHandle"] = Error.cudaErrorMapBufferObjectFailed
    with pytest.raises(RuntimeError, match="cudaIpcGetMemHandle failed"):
        lender(cuda).make(100)
    assert cuda.last_error == 0


def pieces(*lengths: int) -> list[tuple[int, torch.Tensor]]:
    return [(1000 * place, numbers(length)) for place, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("version", "driver", "captures", "batched"),
    [
        (13020, 13020, False, True),
        (13000, 13010, False, True),
        (12080, 12080, False, True),
        (12080, 12040, False, False),
        (12060, 13000, False, False),
        (13000, 13010, True, False),
    ],
)
def test_a_transfer_is_one_call_where_cuda_has_one(
    version: int, driver: int, captures: bool, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """340 storages took 340 calls and milliseconds of the host; CUDA 12.8 batches them, 13.0 by another signature. A
    graph has no node for a batch, and replays need no host."""
    cuda = installed(FakeCuda(version, driver), monkeypatch)
    cuda.captures = captures
    _, lent = lender(cuda).make(4096)
    lent.write(pieces(10, 1000, 7))
    received = [(offset, torch.zeros_like(sent)) for offset, sent in pieces(10, 1000, 7)]
    lent.read(received)
    assert all(torch.equal(target, sent) for (_, target), (_, sent) in zip(received, pieces(10, 1000, 7), strict=True))
    assert cuda.batches == ([3, 3] if batched else [])
    assert cuda.streams == [7] * (2 if batched else 6)


def test_a_batch_that_cuda_refuses_is_an_error(cuda: FakeCuda) -> None:
    _, lent = lender(cuda).make(4096)
    cuda.failing["cudaMemcpyBatchAsync"] = Error.cudaErrorMapBufferObjectFailed
    with pytest.raises(RuntimeError, match="cudaMemcpyBatchAsync failed: cudaErrorMapBufferObjectFailed"):
        lent.write(pieces(10, 20))


def test_after_an_error_nothing_waits_for_the_device_and_nothing_is_freed(cuda: FakeCuda) -> None:
    """A kernel that waits for a lost partner never ends, and the partner may be copying."""
    handle, lent = lender(cuda).make(4096)
    opened, pinned = lender(cuda).open(handle), own_memory(4096, cuda.device())
    for region in (lent, opened, pinned):
        region.write([(0, numbers(100))])
    cuda.calls.clear()
    for region in (opened, lent, pinned):
        region.abandon()
    assert cuda.calls == []
    copied_to = weakref.ref(pinned._owner)  # type: ignore[attr-defined]
    del pinned, region
    assert copied_to() is not None, "what copies may still reach is gone"


with_cuda = pytest.mark.skipif(torch.version.cuda is None, reason="torch was built without CUDA")


@with_cuda
def test_it_is_torchs_own() -> None:
    """A package of bindings brought a second runtime, made for another CUDA: `peer` and `host` were gone."""
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


def test_a_torch_without_cuda_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"this torch \(.*\) includes no CUDA runtime"):
        CudaRuntime(SimpleNamespace())


GIB = 1 << 30
V2_MOUNT = "31 23 0:28 {base} /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1_MOUNT = "35 31 0:32 {base} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory"


def machine(root: Path, groups: str = "", mounts: str = "", **files: str) -> Path:
    """A machine with 64 GiB available; `files` are those of cgroups, by folder (__ for slashes)."""
    proc = root / "proc"
    (proc / "self/ns").mkdir(parents=True)
    (proc / "self/ns/cgroup").symlink_to("cgroup:[4026531835]")
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text("boot-1\n")
    (proc / "meminfo").write_text(f"MemTotal:  {128 << 20} kB\nMemFree: 1 kB\nMemAvailable:   {64 << 20} kB\n")
    (proc / "self/cgroup").write_text(groups)
    (proc / "self/mountinfo").write_text(f"23 1 0:2 / / rw - ext4 /dev/sda rw\n{mounts}\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/")
        path.mkdir(parents=True, exist_ok=True)
        for line in text.split("; "):
            file, _, value = line.partition("=")
            (path / file).write_text(value + "\n")
    return root


def available(root: Path) -> list[float]:
    return [room.available_bytes / GIB for room in memory_limits(root)]


def version_2(limit: object, current: int, inactive: int = 0) -> str:
    return (
        f"memory.max={limit}; memory.current={current}; memory.stat=anon 5\nactive_file 0\ninactive_file "
        f"{inactive}\nslab 7"
    )


def version_1(limit: int, usage: int, inactive: int = 0) -> str:
    return (
        f"memory.limit_in_bytes={limit}; memory.usage_in_bytes={usage}; memory.stat=cache 5\ntotal_inactive_file "
        f"{inactive}"
    )


def test_a_group_of_version_2_and_its_parents_limit(tmp_path: Path) -> None:
    """A group's file cache can be reclaimed: a job that has read its data looks full, but is not."""
    files = {
        "job__step": version_2(32 * GIB, 10 * GIB, 4 * GIB),
        "job": version_2(48 * GIB, 40 * GIB),
        ".": version_2("max", GIB),
    }
    root = machine(tmp_path, "0::/job/step\n", V2_MOUNT.format(base="/"), **files)
    assert available(root) == [64, 26, 8]
    names = [room.name for room in memory_limits(root)[1:]]
    assert names == ["the 32 GiB of cgroup /job/step (memory.max)", "the 48 GiB of cgroup /job (memory.max)"]


def test_a_group_of_version_1_limits_and_no_limit_does_not(tmp_path: Path) -> None:
    files = {
        "memory__slurm__job": version_1(16 * GIB, 3 * GIB, GIB),
        "memory__slurm": version_1(0x7FFFFFFFFFFFF000, GIB),
    }
    root = machine(tmp_path, "5:devices:/x\n4:memory:/slurm/job\n0::/\n", V1_MOUNT.format(base="/"), **files)
    assert available(root) == [64, 14]
    assert memory_limits(root)[1].name == "the 16 GiB of cgroup /slurm/job (memory.limit_in_bytes)"


NODE = MemoryLimit("boot-1", "node-a's memory (MemAvailable)", 40 * GIB)


def neighbours(*counts: int, most_gib: int = 0, node: MemoryLimit = NODE) -> list[LocalRank]:
    return [LocalRank(Buffers(count, most_gib * GIB), (node,)) for count in counts]


def test_the_buffers_of_all_ranks_of_a_node_count() -> None:
    """Each rank's buffers alone would fit."""
    everyone = neighbours(3, 3, 3, 3, 0, 0)
    assert Budget(everyone[0], everyone[:1]).of(9 * GIB) is None
    assert Budget(everyone[0], everyone).of(9 * GIB) is None, "36 GiB of 40"
    why = Budget(everyone[0], everyone).of(10 * GIB)
    assert why == (
        "the host buffers of 4 ranks need 40 GiB, but node-a's memory (MemAvailable) has 40 GiB available, "
        "of which a tenth must stay free"
    )


def test_nobody_is_given_host_memory_that_might_not_suffice() -> None:
    everyone = neighbours(3, 0, 2, most_gib=10)
    assert re.search("2 ranks need 50 GiB, .* 40 GiB available", Budget(everyone[1], everyone).at_most() or "")
    everyone = neighbours(2, 0, 1, most_gib=10)
    assert Budget(everyone[1], everyone).at_most() is None


def test_buffers_that_do_not_fit_are_refused_with_both_numbers_and_the_way_out() -> None:
    everyone = neighbours(1, 1)
    host = HostMemory(CPU, NoLane(), NoLane(), Budget(everyone[0], everyone))
    with pytest.raises(
        RuntimeError,
        match=r"--bpipe-transport host: the host buffers of 2 ranks need 60 GiB, but .* 40 GiB available.*Use another",
    ):
        host._add(30 * GIB)
    for _ in range(2):
        host._add(512)
    assert host._region(0) is not host._region(1)
    with pytest.raises(RuntimeError, match="host buffers of 2 ranks need 60 GiB"):
        host._add(30 * GIB - 1024)
    host.release()
