"""Memory that two processes share: one and the same bytes, no name in the file system, and nothing open afterwards."""

import os
from collections.abc import Iterator

import pytest
import torch

from bpipe.transport.memory import SharedMemory, own_memory
from tests.unit.transport.loopback import CPU


def descriptors() -> list[str]:
    """This process's open file descriptors, with their targets."""
    names = []
    for name in os.listdir("/proc/self/fd"):
        try:
            names.append(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue  # the listing's own
    return sorted(names)


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    shared, opened = set(os.listdir("/dev/shm")), descriptors()
    yield
    assert set(os.listdir("/dev/shm")) <= shared
    assert descriptors() == opened


def numbers(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", [1, 5, 7, 8, 9, 511, 513, 4096])
def test_every_byte_is_copied_and_none_beside_them(length: int) -> None:
    """Whole words are copied as such, everything else byte by byte."""
    region = own_memory(2 * length + 512, CPU)
    region.write([(0, torch.full((2 * length + 512,), 17, dtype=torch.uint8))])
    region.write([(512, numbers(length))])
    received, whole = torch.zeros(length, dtype=torch.uint8), torch.zeros(2 * length + 512, dtype=torch.uint8)
    region.read([(512, received)])
    region.read([(0, whole)])
    assert torch.equal(received, numbers(length))
    assert torch.equal(whole[512 : 512 + length], numbers(length))
    assert (whole[:512] == 17).all()
    assert (whole[512 + length :] == 17).all()


def test_the_memory_lives_as_long_as_either_end_has_it() -> None:
    """Otherwise an evictor would die of SIGBUS when its acceptor ends."""
    handle, memory = SharedMemory().make(5000)
    opened = SharedMemory().open(handle)
    sent, received = numbers(5000), torch.zeros(5000, dtype=torch.uint8)
    memory.write([(0, sent)])
    memory.close()
    opened.read([(0, received)])
    assert torch.equal(sent, received)
    opened.close()


def test_closing_twice_closes_once() -> None:
    """The number of a closed descriptor may be another file's by then."""
    _, memory = SharedMemory().make(10)
    memory.close()
    descriptor = os.open("/dev/null", os.O_RDONLY)
    memory.close()
    os.close(descriptor)


def test_a_handle_of_nobodys_is_an_os_error() -> None:
    handle, memory = SharedMemory().make(10)
    memory.close()
    with pytest.raises(OSError, match=f"/proc/{os.getpid()}/fd/"):
        SharedMemory().open(handle)
