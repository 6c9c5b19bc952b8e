"""Balanced pipelines for `torch.distributed.pipelining`, without Megatron: `BalancedSchedule`.

It imports torch, and refuses a torch that lacks a name that is used here.
"""

from bpipe.balance.config import BalanceConfig
from bpipe.torch.schedule import BalancedSchedule
from bpipe.transport.config import TransferConfig

__all__ = ["BalanceConfig", "BalancedSchedule", "TransferConfig"]
