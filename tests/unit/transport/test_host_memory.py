"""What limits a host's memory, as the kernel writes it, and whether the buffers of all who share a limit fit."""

import re
from pathlib import Path

import pytest

from bpipe.transport.host_memory import Budget, Buffers, LocalRank, MemoryLimit, memory_limits
from bpipe.transport.one_sided import HostMemory
from tests.unit.transport.loopback import CPU, NoLane

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
    """What it keeps of files can be given up: a job that read its data looks full and is not."""
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
    """Each alone would fit."""
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
