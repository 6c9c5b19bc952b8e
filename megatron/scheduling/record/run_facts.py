"""Say what every rank of a training by Megatron knows before its first iteration, for the record of `--bpipe-report`.

In: the configuration and the device. Out: a `RunRecord`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from bpipe.record.format import RunInfo
from bpipe.runtime.run_record import PeakFlops, RunRecord
from megatron.scheduling.hooks import upstream
from megatron.scheduling.loop.pipelines import pipelines
from megatron.scheduling.options.arguments import SchedulingConfig


def begin_record(folder: Path, config: SchedulingConfig, peak: PeakFlops | None) -> RunRecord:
    """Return this rank's record in a folder, before the first step. Collective over the world."""
    megatron = upstream.running()
    info = RunInfo(
        balanced=config.balance is not None,
        synchronous=config.transfers.synchronous,
        torch=str(torch.__version__),
        megatron_core=megatron.version,
        megatron_core_path=str(megatron.place),
        peak_flops=peak.flops_per_s if peak else None,
        peak_source=peak.source if peak else None,
    )
    return RunRecord(
        folder,
        info,
        pipelines(config.positions),
        place=config.positions.here(),
        device=device_name(),
        limit_bytes=limit_bytes(),
    )


def device_name() -> str:
    """Return the device's name as torch has it, or "cpu"."""
    device = torch.device(torch.cuda.current_device())
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def limit_bytes() -> int | None:
    device = torch.device(torch.cuda.current_device())
    return None if device.type == "cpu" else int(torch.cuda.get_device_properties(device).total_memory)
