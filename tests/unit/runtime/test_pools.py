"""Engines where one rank sends to several: what a file may not say. Pools train in tests/gloo and tests/late."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.rules import check
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.hosts import read_hosts
from bpipe.schedule.schedule import Slot
from bpipe.transport.config import TransferConfig


def test_a_micro_batch_goes_to_one_host_only() -> None:
    """A file may say otherwise; what leaves a second time is still known to whoever sent it first."""
    plain = FAMILIES["1f1b"].generate(4, 4, 1)
    rows = [list(row) for row in plain.ranks]
    for slot, host, kinds in ((2, 2, "EH"), (3, 2, "LR"), (4, 3, "EH"), (5, 3, "LR")):
        own, other = (Kind.EVICT, Kind.HOST) if kinds == "EH" else (Kind.LOAD, Kind.RETURN)
        for rank, kind in ((0, own), (host, other)):
            rows[rank][slot] = Slot(rows[rank][slot].compute, (*rows[rank][slot].transfers, Action(0, kind, 1)))
    schedule = replace(plain, ranks=tuple(map(tuple, rows)), hosts=read_hosts("2+3,none,none,none"))
    check(schedule)
    with pytest.raises(ValueError, match=r"rank 0: micro-batch 1 of stage 0 is evicted both to rank 2 and to rank 3"):
        Engine(
            schedule, 0, {}, EngineConfig("rank 0", torch.device("cpu"), TransferConfig(minimum_bytes=1, timeout_s=1.0))
        )
