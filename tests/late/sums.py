"""Let gloo add in the order of late groups: from the last rank down (csrc/exchange.cpp).

In: a process of a training run on CPUs. Out: the same, whose sums of more than two ranks have the bits of late groups.
NCCL and gloo promise no order, and another order is another rounding: a run on late devices can be laid beside one on
CPUs only if both add alike.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class _Over:
    """A sum that is there already."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _is_sum(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup | None) -> bool:
    return op == dist.ReduceOp.SUM and tensor.is_floating_point() and dist.get_world_size(group) > 2


def _total(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    total = parts.pop()
    while parts:
        total += parts.pop()
    return total


def install() -> None:
    """Call once, before anything is added."""
    reduce, all_reduce = dist.reduce, dist.all_reduce

    def one_takes(
        tensor: torch.Tensor, dst: int, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if not _is_sum(tensor, op, group):
            return reduce(tensor, dst, op, group, async_op)
        total = _total(tensor, group)
        return _kept(tensor, total, async_op) if dist.get_rank() == dst else _Over() if async_op else None

    def all_take(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if not _is_sum(tensor, op, group):
            return all_reduce(tensor, op, group, async_op)
        return _kept(tensor, _total(tensor, group), async_op)

    calls: dict[str, Callable[..., Any]] = {"reduce": one_takes, "all_reduce": all_take}
    for name, call in calls.items():
        setattr(dist, name, call)
        setattr(torch.distributed.distributed_c10d, name, call)


@torch.no_grad()
def _kept(tensor: torch.Tensor, total: torch.Tensor, async_op: bool) -> _Over | None:
    tensor.copy_(total)
    return _Over() if async_op else None
