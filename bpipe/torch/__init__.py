"""Balanced pipelines for `torch.distributed.pipelining`, without Megatron: `BalancedSchedule`.

Imported only by who asks for it: it imports torch, and refuses one that lacks a name that is used.
"""

from bpipe.balance.config import BalanceConfig
from bpipe.torch.schedule import BalancedSchedule
from bpipe.transport.config import TransferConfig

__all__ = ["BalanceConfig", "BalancedSchedule", "TransferConfig"]
