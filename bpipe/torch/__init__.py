"""Balanced pipelines for `torch.distributed.pipelining`, without Megatron: `BalancedSchedule`.

Importing it imports torch, and refuses a version that lacks a name used here.
"""

from bpipe.balance.config import BalanceConfig
from bpipe.torch.schedule import BalancedSchedule
from bpipe.transport.config import TransferConfig

__all__ = ["BalanceConfig", "BalancedSchedule", "TransferConfig"]
