"""Memory that two processes share: one and the same bytes, no name in the file system, and nothing open afterwards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
import torch

from bpipe.transport.memory import SharedMemory, own_memory
from tests.unit.transport.loopback import CPU


def descriptors() -> list[str]:
    """What this process has open, by number and target."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue  # the listing's own
    return sorted(found)


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    shared, opened = set(os.listdir("/dev/shm")), descriptors()
    yield
    assert set(os.listdir("/dev/shm")) <= shared
    assert descriptors() == opened


def numbers(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_what_one_writes_the_other_reads_and_the_other_way_round() -> None:
    handle, made = SharedMemory().make(5000)
    opened = SharedMemory().open(json.loads(json.dumps(handle)))
    for writer, reader in ((opened, made), (made, opened)):
        sent, back = numbers(1234), torch.zeros(1234, dtype=torch.uint8)
        writer.write(700, sent)
        reader.read(700, back)
        assert torch.equal(sent, back)
        writer.write(700, torch.zeros(1234, dtype=torch.uint8))
    for region in (opened, made):
        region.close()


@pytest.mark.parametrize("length", [1, 7, 8, 9, 511, 513, 4096])
def test_every_byte_is_copied_and_none_beside_them(length: int) -> None:
    """Whole words are copied as such, everything else byte by byte."""
    region = own_memory(2 * length + 512, CPU)
    region.write(0, torch.full((2 * length + 512,), 17, dtype=torch.uint8))
    region.write(512, numbers(length))
    back, whole = torch.zeros(length, dtype=torch.uint8), torch.zeros(2 * length + 512, dtype=torch.uint8)
    region.read(512, back)
    region.read(0, whole)
    assert torch.equal(back, numbers(length))
    assert torch.equal(whole[512 : 512 + length], numbers(length))
    assert (whole[:512] == 17).all()
    assert (whole[512 + length :] == 17).all()


def test_new_memory_is_zero_and_its_pages_are_there() -> None:
    """Before the first iteration, so that no copy has to wait for the kernel to find pages."""
    before = resident_pages()
    _, made = SharedMemory().make(64 << 20)
    assert resident_pages() - before >= (64 << 20) // os.sysconf("SC_PAGE_SIZE")
    back = torch.ones(100, dtype=torch.uint8)
    made.read((64 << 20) - 100, back)
    assert not back.any()
    made.close()


def resident_pages() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1])


def test_it_has_no_name_in_the_file_system() -> None:
    before = os.listdir("/dev/shm")
    _, made = SharedMemory().make(1 << 20)
    assert os.listdir("/dev/shm") == before
    made.close()


def test_the_memory_lives_as_long_as_either_end_has_it() -> None:
    """An acceptor that ended must not take an evictor's mapping away: the evictor would die of SIGBUS, not of an
    error."""
    handle, made = SharedMemory().make(5000)
    opened = SharedMemory().open(handle)
    sent, back = numbers(5000), torch.zeros(5000, dtype=torch.uint8)
    made.write(0, sent)
    made.close()
    opened.read(0, back)
    assert torch.equal(sent, back)
    opened.close()


def test_closing_twice_closes_once() -> None:
    """The number of a closed descriptor may be another file's by then."""
    _, made = SharedMemory().make(10)
    made.close()
    other = os.open("/dev/null", os.O_RDONLY)
    made.close()
    os.close(other)


def test_a_handle_of_nobodys_is_an_os_error() -> None:
    handle, made = SharedMemory().make(10)
    made.close()
    with pytest.raises(OSError, match=f"/proc/{os.getpid()}/fd/"):
        SharedMemory().open(handle)


def test_nothing_is_copied_beyond_the_end() -> None:
    region = own_memory(100, CPU)
    with pytest.raises((RuntimeError, IndexError), match=r"narrow|range|exceeds"):
        region.write(60, numbers(50))
    with pytest.raises((RuntimeError, IndexError), match=r"narrow|range|exceeds"):
        region.read(60, numbers(50))


def test_an_empty_region_can_be_made() -> None:
    handle, made = SharedMemory().make(0)
    SharedMemory().open(handle).close()
    made.close()
