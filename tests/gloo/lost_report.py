"""A rank of a test's training runs (see worker.py) whose report cannot be written from some time on: the disk is full,
or the folder gone.

In: the worker's cases; what breaks is in a case's name. Out: the worker's. `full`: what two ranks write goes to a
device that is always full. `gone`: the folder is taken away after the first iteration.
"""

from __future__ import annotations

import functools
import inspect
import shutil
import sys
from pathlib import Path
from typing import Any

import pretrain_gpt  # noqa: F401  before Megatron: it readies the process

# isort: split
import torch.distributed as dist
import worker
from megatron.training import get_args, training


def break_after_the_first(train_step: Any) -> Any:
    """Around the reporter's own step, so that it finds the damage when it next writes."""

    signature = inspect.signature(train_step)

    @functools.wraps(train_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        report = get_args().bpipe_report
        if signature.bind(*args, **kwargs).arguments["iteration"] == 0 and report is not None:
            damage(Path(report))
        return result

    return step


def damage(folder: Path) -> None:
    rank = dist.get_rank()
    if "full" in folder.name and rank in (1, 2):
        (folder / f"record_{rank:05d}.jsonl").symlink_to("/dev/full")
    if "gone" in folder.name:
        dist.barrier()
        if rank == 0:
            # At once: another rank may be writing into it already.
            shutil.rmtree(folder.rename(folder.with_name(f"taken_from_{rank}")))


if __name__ == "__main__":
    training.train_step = break_after_the_first(training.train_step)
    worker.main(*sys.argv[1:])
