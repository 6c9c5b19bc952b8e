"""Build torch's own pipeline schedules without processes.

Stages have only what a schedule reads when it is constructed: no module, no group. Imports torch.
"""

import csv
import io
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules

# Since 2.15, torch counts what a schedule holds.
COUNTS = hasattr(schedules, "analyze_pipeline_activation_liveness")

# Classes by stages per rank; with a V shape, the first and the last stage are on rank 0.
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
LOOPED = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
MULTIPLE = (*LOOPED, *V_SHAPED)


def torch_schedule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1, **settings: Any) -> Any:
    """Return torch's schedule on rank 0, which has the orders of all ranks."""
    num_stages = num_ranks * num_chunks
    own = (0, num_stages - 1) if name in V_SHAPED else range(0, num_stages, num_ranks)
    stages = [_stage(index, num_ranks, num_stages) for index in own]
    return getattr(schedules, name)(stages[0] if name in SINGLE else stages, num_microbatches, **settings)


def _stage(index: int, num_ranks: int, num_stages: int) -> Any:
    return SimpleNamespace(
        stage_index=index,
        group_size=num_ranks,
        group_rank=0,
        num_stages=num_stages,
        submod=None,
        has_backward=True,
        is_first=index == 0,
        is_last=index == num_stages - 1,
        stage_index_to_group_rank={},
    )


def rows(schedule: Any) -> dict[int, list[Any]]:
    """Return every rank's order, as torch keeps it."""
    if isinstance(schedule, schedules.PipelineScheduleMulti):
        orders: dict[int, list[Any]] = schedule.pipeline_order
    else:
        orders = schedule._get_pipeline_order()
        if isinstance(schedule, schedules.Schedule1F1B):
            # Torch 2.15 counts the last rank's forwards from 1, one micro-batch too many; its running loop does not.
            last = max(orders)
            orders[last] = [
                action._replace(microbatch_index=action.microbatch_index - 1)
                if action.computation_type.name == "FORWARD"
                else action
                for action in orders[last]
            ]
    return orders


def as_csv(schedule: Any) -> str:
    """Return what torch's own `_dump_csv` writes."""
    file = io.StringIO(newline="")
    csv.writer(file).writerows(rows(schedule).values())
    return file.getvalue()


def parsed(text: str) -> dict[int, list[Any]]:
    """Return what torch's own `_load_csv` reads."""
    return {
        rank: [schedules._Action.from_str(cell) for cell in row]
        for rank, row in enumerate(csv.reader(io.StringIO(text)))
    }


def peak(schedule: Any, rank: int, stages: list[int]) -> int:
    """Return the most (stage, micro-batch) pairs whose activations the rank holds at once, as torch counts them."""
    if not isinstance(schedule, schedules.PipelineScheduleMulti):
        schedule = SimpleNamespace(pipeline_order=rows(schedule), _n_microbatches=schedule._n_microbatches)
    liveness = schedules.analyze_pipeline_activation_liveness(
        schedule, pp_rank=rank, stage_indices=stages, granularity="stage_microbatch"
    )
    return liveness.num_slots
