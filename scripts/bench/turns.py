"""Measure several ways of doing one thing in turns, on ranks forked from this process."""

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

# Rounds that are not measured.
WARM_UP = 2


def on_ranks(measure: Callable[..., Any], num_ranks: int, *arguments: Any) -> list[Any]:
    """Return what `measure(rank, *arguments)` returns on every rank, as JSON values.

    Forked, because importing torch in each process takes longer than the measurement. So no thread may have been
    started before.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_one_rank, (measure, num_ranks, folder, arguments), nprocs=num_ranks, start_method="fork")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def _one_rank(rank: int, measure: Callable[..., Any], num_ranks: int, folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=num_ranks)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(measure(rank, *arguments)))
    dist.barrier()
    dist.destroy_process_group()


def in_turn(names: Sequence[str], rounds: int) -> Iterator[tuple[bool, str]]:
    """Yield every name in each round, and whether the round counts. The order rotates, because of caches."""
    for turn in range(WARM_UP + rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            yield turn >= WARM_UP, name


def spread(values: list[float], form: str) -> str:
    """Return the median, and the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def quotients(parts: Sequence[float], wholes: Sequence[float], scale: float = 1) -> list[float]:
    return [scale * part / whole for part, whole in zip(parts, wholes, strict=True)]
