"""Let flags of Megatron's follow from the schedule that a run asks for.

In: Megatron's parsed arguments, before it judges them. Out: the same, with as many virtual stages a rank as the schedule has. Raises
ValueError where there is no such schedule. Knows no tensors and imports no Megatron.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from bpipe.generate.families import FAMILIES
from bpipe.ir.schedule import Schedule
from bpipe.ir.text import NAME
from bpipe.names import unknown
from bpipe.read import read_file
from megatron.scheduling import upstream


def complete(args: Any) -> None:
    """Give every rank as many virtual stages as the schedule asked for has, where it can have no other number and nobody said how many."""
    # A YAML configuration replaces the command line, and ours with it; it is refused later.
    name = getattr(args, "bpipe_schedule", None)
    if name is None:
        return
    upstream.require(args, "following")
    said = args.num_virtual_stages_per_pipeline_rank, args.num_layers_per_virtual_pipeline_stage, args.pipeline_model_parallel_layout
    if any(way is not None for way in said):
        return
    if name in FAMILIES:
        family = FAMILIES[name]
        num_chunks = family.min_chunks if family.min_chunks == family.max_chunks else 1
    else:
        num_chunks = of_file(name).num_chunks
    if num_chunks > 1:
        args.num_virtual_stages_per_pipeline_rank = num_chunks


@lru_cache(maxsize=1)
def of_file(name: str) -> Schedule:
    """The schedule of a file. Raises ValueError where there is none, or nothing that can be read."""
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"--bpipe-schedule {name}: {unknown('schedule', name, FAMILIES)}; nor is there a file of that name")
    try:
        schedule = read_file(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"--bpipe-schedule {error}") from None
    # A plain CSV names itself nowhere.
    nameless = schedule.name == "csv" and NAME.fullmatch(path.stem) and path.stem not in FAMILIES
    return replace(schedule, name=path.stem) if nameless else schedule
