"""Late devices whose ranks are processes, and the group between them, which replaces NCCL under its name.

torch.distributed has a backend `nccl` for late devices that work by themselves. Its rules are those of
`tests.late.group`. As with NCCL, communicators are made through the group's store (ProcessGroupNCCL.cpp,
broadcastUniqueNCCLID), and a watchdog ends a process whose operation takes longer than the group's time-out.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.late.devices import TYPE, Draw, begin, extension
from tests.late.group import Group, Message


class WiredGroup(Group):
    """A group whose ranks are processes of one machine."""

    def __init__(self, name: str, rank: int, size: int, store: dist.Store, timeout: timedelta) -> None:
        super().__init__(name, rank, size)
        self._store, self._timeout = store, timeout

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(TYPE)]

    def _make(self, name: str, ranks: Sequence[int]) -> None:
        process, descriptor = extension().make_board(name, list(ranks).index(self._rank), len(ranks))
        self._store.set(f"{name}/{self._rank}", f"{process} {descriptor}")
        self._store.wait([f"{name}/{rank}" for rank in ranks], self._timeout)
        for number, rank in enumerate(ranks):
            place = map(int, self._store.get(f"{name}/{rank}").decode().split())
            extension().map_board(name, number, *place)

    def _begin(
        self, name: str, stream: torch.Stream, ranks: Sequence[int], batch: Sequence[Message], label: str
    ) -> Any:
        numbers = list(ranks)
        ends = [(numbers.index(peer), sends, tensor.data_ptr(), tensor.nbytes) for peer, sends, tensor in batch]
        return extension().wired_exchange(
            stream.device_index, stream.stream_id, name, ends, label, self._timeout.total_seconds()
        )

    def _begin_collective(
        self, name: str, stream: torch.Stream, kind: str, root: int, numbers: tuple[str, int, int, int]
    ) -> Any:
        stream_numbers, seconds = (stream.device_index, stream.stream_id), self._timeout.total_seconds()
        return extension().wired_collective(
            *stream_numbers, name, self._rank, self._size, kind, root, *numbers, f"{name} {kind}", seconds
        )

    def abort(self) -> None:
        for name in self._streams:
            extension().abort_wired(name)


def stand_in_for_nccl() -> None:
    """Make the backend `nccl` the late group."""

    def make(options: Any, backend_options: Any) -> WiredGroup:
        name = f"{options.group_id}@{'.'.join(map(str, options.global_ranks_in_group))}"
        timeout = options.timeout if backend_options is None else backend_options._timeout
        return WiredGroup(name, options.group_rank, options.group_size, options.store, timeout)

    dist.Backend._plugins["NCCL"] = dist.Backend._BackendPlugin(make, True)
    dist.Backend.backend_capability["nccl"] = [TYPE]
    dist.Backend.default_device_backend_map[TYPE] = "nccl"


def begin_process(rank: int, index: int, draw: Draw) -> None:
    """Reset the devices of this process, and select its own one."""
    begin(draw)
    torch.accelerator.set_device_index(index)
    if not extension().works_by_itself():
        extension().work_by_themselves(rank)
