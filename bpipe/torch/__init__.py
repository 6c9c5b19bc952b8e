"""Balanced pipelines for `torch.distributed.pipelining`, without Megatron: `BalancedSchedule`.

Imported only by who asks for it: it imports torch, and refuses one that lacks a name that is used.
"""

from bpipe.torch.schedule import BalancedSchedule

__all__ = ["BalancedSchedule"]
