"""Let gloo sum in the order of late groups: from the last rank down (csrc/exchange.cpp).

NCCL and gloo promise no order, and another order rounds differently, so runs on late devices and on CPUs can be
compared only if both sum in the same order. This changes sums of more than two ranks in a training on CPUs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class _Over:
    """A finished sum."""

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
    """Replace both functions. Call it once, before anything is summed."""
    reduce, all_reduce = dist.reduce, dist.all_reduce

    def ordered_reduce(
        tensor: torch.Tensor, dst: int, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if not _is_sum(tensor, op, group):
            return reduce(tensor, dst, op, group, async_op)
        total = _total(tensor, group)
        return _assigned(tensor, total, async_op) if dist.get_rank() == dst else _Over() if async_op else None

    def ordered_all_reduce(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if not _is_sum(tensor, op, group):
            return all_reduce(tensor, op, group, async_op)
        return _assigned(tensor, _total(tensor, group), async_op)

    calls: dict[str, Callable[..., Any]] = {"reduce": ordered_reduce, "all_reduce": ordered_all_reduce}
    for name, call in calls.items():
        setattr(dist, name, call)
        setattr(torch.distributed.distributed_c10d, name, call)


@torch.no_grad()
def _assigned(tensor: torch.Tensor, total: torch.Tensor, async_op: bool) -> _Over | None:
    tensor.copy_(total)
    return _Over() if async_op else None
