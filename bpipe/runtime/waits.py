"""Say how strictly a rank may wait for transfers, which decides whether a schedule can deadlock."""

from __future__ import annotations

import os

import torch

from bpipe.schedule.check.deadlock import WaitLevel
from bpipe.transport.config import TransferConfig

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
BLOCKING = "CUDA_LAUNCH_BLOCKING"


def wait_level(transfers: TransferConfig, device: torch.device) -> tuple[WaitLevel, str]:
    """Return how strictly a rank may wait for transfers that need their partner, and what makes it so; "" if nothing
    does.

    A GPU has fewer queues than a run has streams, and which streams share one is not known; timers and profilers
    synchronise it, and NCCL may order its kernels across communicators (`NCCL_LAUNCH_ORDER_IMPLICIT`). A plan that
    stands all of this waits for each transfer where it is posted. With one queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`)
    messages stand behind each other, too; with `CUDA_LAUNCH_BLOCKING=1` the host waits for each.
    """
    if device.type != "cpu" and os.environ.get(BLOCKING, "0") != "0":
        return WaitLevel.BLOCKING_LAUNCHES, f"{BLOCKING}=1"
    if device.type != "cpu" and os.environ.get(CONNECTIONS) == "1":
        return WaitLevel.ONE_QUEUE, f"{CONNECTIONS}=1"
    if transfers.synchronous:
        return WaitLevel.AT_ISSUE, "--bpipe-sync-transfers"
    if device.type != "cpu":
        return WaitLevel.AT_ISSUE, "transfers over NCCL and streams that share a GPU's queues"
    return WaitLevel.IN_EVERY_OPERATION, ""
