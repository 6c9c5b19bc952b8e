"""Refuse split backwards of stages that recompute, which torch's own halves cannot do.

In: a stage, and the roots of its first micro-batch's graph. Out: nothing, or a ValueError with the way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bpipe.runtime.checkpoints import Regions
from bpipe.runtime.graph import nodes_of, saved_names


def refuse_split_recomputation(stage: Any, outputs: Sequence[torch.Tensor], name: str) -> None:
    """Raise ValueError where a stage of a schedule with split backwards recomputes by `torch.utils.checkpoint`.

    Torch's dgrad computes a region again and its wgrad asks for it a second time, of which torch says only "Trying to
    backward through the graph a second time". A stage that defers its wgrad itself (`dw_builder`) has one backward.
    """
    if stage.dw_builder is not None:
        return
    regions = Regions()
    roots = [output.grad_fn for output in outputs]
    if any(regions.recomputes(node, attribute) for node in nodes_of(roots) for attribute in saved_names(type(node))):
        raise ValueError(
            f"stage {stage.stage_index} recomputes (torch.utils.checkpoint) and {name} splits its backward, which "
            "torch's own dgrad and wgrad do not support together: use a schedule with whole backwards (1f1b, "
            "interleaved-1f1b), leave "
            f"recomputation out, or let the stage defer its wgrad itself (PipelineStage's dw_builder)"
        )
