"""Say where putting the weights' half of a backward off costs more memory than it frees.

In: a first iteration's computations. Out: lines.

Between I and W a micro-batch holds the inputs of its linear layers and the gradients of their outputs; it no longer
holds the rest of what its forward saved. With tensor parallelism and sequence parallelism, with attention that saves
little, or with recomputation, the former is the larger part: then `--bpipe-keep-weights-halves none` takes less memory,
and so does another schedule. Measures one iteration and then nothing. Knows no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bpipe.runtime.capture import find
from bpipe.runtime.meter import Meter
from bpipe.schedule.action import Action, Kind

# What whoever computes keeps from the first half of a backward to the second.
Waiting = Callable[[Action], Sequence[torch.UntypedStorage]]


class Weighing:
    """One rank's first iteration. Where a graph cannot be walked nothing is said: it trains all the same."""

    def __init__(self, waiting: Waiting, device: torch.device) -> None:
        self._waiting = waiting
        self._device = device
        self._meter: Meter | None = Meter()

    def after(self, op: Action, outputs: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor | None]) -> None:
        """Weigh a computation that has run; of a forward, `outputs` are the stage's and `inputs` what it received."""
        if self._meter is None:
            return
        if op.kind is Kind.FORWARD:
            try:
                found = find([output.grad_fn for output in outputs if output is not None], inputs, self._device)
            except ValueError:
                self._meter = None
                return
            self._meter.saved(op, found)
            return
        if op.kind is Kind.BACKWARD_INPUT:
            self._meter.waiting(op, self._waiting(op))
        self._meter.touched(op)
        self._meter.sample(0, 0)

    def lines(self) -> list[str]:
        """Return a line for every stage whose micro-batches hold at least as much after I as before it."""
        if self._meter is None:
            return []
        saved = self._meter.saved_bytes
        return [
            f"stage {stage}: between the halves of its backward a micro-batch holds {after / 1e6:.4g} MB, but its "
            f"forward saved only {saved[stage] / 1e6:.4g} MB: deferring the weight half costs more memory than it "
            "frees. With --bpipe-keep-weights-halves none the whole backward runs at once and holds nothing in "
            "between"
            for stage, after in sorted(self._meter.after_input_bytes.items())
            if after >= saved[stage]
        ]
