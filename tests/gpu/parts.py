"""A layer that runs in parts on two streams, as in Megatron's combined 1F1B, for one micro-batch or for two at once.

The parts, their order and their waits are those of megatron-core 0.19.2 (`TransformerLayerSchedulePlan.run`); the layer
is our own: an exchange of experts is a computation on a second stream. Tensors are detached between parts, and the
input of `combine` is freed after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bpipe.runtime.graph import Pieces
from bpipe.transport.streams import current

Tensors = tuple[torch.Tensor, ...]
Steps = list[Callable[[], object]]


class Part:
    """One part of a layer for one micro-batch, on one stream, with its detached inputs and its output."""

    def __init__(self, compute: Callable[..., torch.Tensor], stream: torch.Stream, plan: LayerPlan) -> None:
        self._compute, self._stream, self._plan = compute, stream, plan
        self.inputs: Tensors = ()
        self.output: torch.Tensor | None = None

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        self._stream.wait_event(self._plan.event)
        with current(self._stream):
            self.inputs = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs)
            self.output = self._compute(*self.inputs)
            self._plan.event = self._stream.record_event()
        return self.output

    def backward(self, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        self._stream.wait_event(self._plan.event)
        with current(self._stream):
            assert self.output is not None
            torch.autograd.backward(self.output, gradient)
            gradient.record_stream(self._stream)
            gradients = tuple(tensor.grad for tensor in self.inputs)
            self._plan.event = self._stream.record_event()
        self.inputs, self.output = (), None
        return gradients


class LayerPlan:
    """The parts of one micro-batch of one stage, kept until its backward: attention, dispatch, experts, combine."""

    def __init__(self, compute: torch.Stream, exchange: torch.Stream, weight: torch.Tensor, end: Any) -> None:
        self.event = compute.record_event()
        self._compute, self._exchange = compute, exchange
        self.attention = Part(attention, compute, self)
        self.dispatch = Part(dispatch, exchange, self)
        self.experts = Part(lambda inputs: experts(inputs, weight), compute, self)
        self.combine = Part(combine, exchange, self)
        self.loss = Part(end, compute, self)
        self._gradients: list[torch.Tensor | None] = []

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.attention, self.dispatch, self.experts, self.combine, self.loss)

    def pieces(self) -> Pieces:
        outputs = [part.output for part in self.parts if part.output is not None]
        tensors = [*outputs, *(tensor for part in self.parts for tensor in part.inputs)]
        return Pieces(tuple(output.grad_fn for output in outputs if output.grad_fn is not None), tuple(tensors))

    def begin(self) -> None:
        self.event = self._compute.record_event()

    def end(self) -> None:
        self._compute.wait_event(self.event)

    def forwards(self, received: torch.Tensor) -> Steps:
        """Return the steps of the forward, in order; another micro-batch's steps may run in between."""
        passed: dict[str, torch.Tensor] = {"x": received}

        def combined() -> None:
            hidden = passed.pop("e")
            passed["c"] = self.combine.forward(hidden, received)
            # The exchange's input is no longer needed, because `combine` saves only its output.
            hidden.record_stream(self._exchange)
            hidden.untyped_storage().resize_(0)

        return [
            lambda: passed.update(h=self.attention.forward(passed.pop("x"))),
            lambda: passed.update(d=self.dispatch.forward(passed.pop("h"))),
            lambda: passed.update(e=self.experts.forward(passed.pop("d"))),
            combined,
            lambda: self.loss.forward(passed.pop("c")),
        ]

    def backwards(self, gradient: torch.Tensor | None, leave: Callable[[torch.Tensor], None]) -> Steps:
        """Return the steps of the backward, last part first; `leave` takes the gradient of the stage's input."""
        passed: list[torch.Tensor | None] = [gradient]
        residuals: list[torch.Tensor | None] = []

        def last() -> None:
            output = self.loss.output
            assert output is not None
            (passed[0],) = self.loss.backward(torch.ones_like(output) if passed[0] is None else passed[0])

        def combined() -> None:
            assert passed[0] is not None
            passed[0], residual = self.combine.backward(passed[0])
            residuals.append(residual)

        def of(part: Part) -> Callable[[], None]:
            def step() -> None:
                assert passed[0] is not None
                (passed[0],) = part.backward(passed[0])

            return step

        def first() -> None:
            of(self.attention)()
            gradient, residual = passed[0], residuals.pop()
            if gradient is not None and residual is not None:
                # The residual's gradient was made on the stream of exchanges.
                residual.record_stream(self._compute)
                leave(gradient + residual)

        return [last, combined, of(self.experts), of(self.dispatch), first]


def attention(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).tanh().sin()


def dispatch(h: torch.Tensor) -> torch.Tensor:
    return h.sin().exp().tanh()


def experts(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(hidden.exp() @ weight)


def combine(e: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return e.tanh() + residual


def one_piece(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the output of all parts for a stage's input, as one graph."""
    return combine(experts(dispatch(attention(x)), weight), x)


# Backwards (-1) of loss, combine, experts, dispatch and attention, and forwards (1) in the reverse order.
ORDER = ((-1, 0), (-1, 1), (1, 0), (-1, 2), (1, 1), (-1, 3), (1, 2), (1, 3), (-1, 4), (1, 4))


def run_at_once(backwards: Steps, forwards: Steps) -> None:
    """Run the parts of two micro-batches in turn, in Megatron's order; either may be missing.

    While the backward of a dispatch runs on the exchange stream, the other's experts allocate on the compute stream.
    """
    for direction, number in ORDER:
        steps = forwards if direction > 0 else backwards
        if steps:
            steps[number]()
