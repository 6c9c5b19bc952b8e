"""Split backwards of stages that recompute."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bpipe.torch.checks import refuse_split_recomputation


def test_halves_of_a_stage_that_recomputes_are_refused() -> None:
    """Torch's own error came from the second half, in the middle of a step, and named nothing."""
    x = torch.randn(4, 8, requires_grad=True)
    stage = SimpleNamespace(stage_index=3, dw_builder=None)
    out = checkpoint(torch.exp, torch.sin(x), use_reentrant=False)
    with pytest.raises(ValueError, match=r"stage 3 recomputes \(torch\.utils\.checkpoint\) and zb-v splits"):
        refuse_split_recomputation(stage, [out], "zb-v")
    refuse_split_recomputation(stage, [torch.exp(torch.sin(x))], "zb-v")
    stage.dw_builder = lambda: lambda: None
    refuse_split_recomputation(stage, [out], "zb-v")
