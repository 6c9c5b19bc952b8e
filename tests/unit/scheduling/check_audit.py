"""The audit of a stage with micro-batches under way as in 1F1B, by steps that are called as Megatron's."""

import contextlib
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.autograd import Variable

from megatron.scheduling import cpu as cpu_runtime
from megatron.scheduling.record import audit
from megatron.scheduling.record.audit import StageAudit
from terra import Recorder


class Stage:
    """One chunk's weight and Megatron's three functions; `scale(n)` is a number of Python in its n-th forward."""

    def __init__(self, scale: Callable[[int], float] = lambda number: 0.5) -> None:
        self.weight = torch.randn(4, 4, requires_grad=True)
        # As with main_grad: the first micro-batch adds to it like any other.
        self.weight.grad = torch.zeros(4, 4)
        self._scale, self._num_forwards = scale, 0
        self.model = SimpleNamespace(training=True)

    def forward_step(
        self,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        input_tensor: Any,
        **more: Any,
    ) -> Any:
        self._num_forwards += 1
        hidden = input_tensor @ self.weight
        return hidden.sin() * self._scale(self._num_forwards), torch.zeros(())

    def backward_step(self, input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any) -> Any:
        # As Megatron does behind sending: the engine is called directly, for the sizes no longer agree.
        output_tensor.data = torch.empty(1)
        Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
            tensors=(output_tensor,),
            grad_tensors=(output_tensor_grad,),
            keep_graph=False,
            create_graph=False,
            inputs=(),
            allow_unreachable=True,
            accumulate_grad=True,
        )
        return input_tensor.grad


def said_of(stage: Stage, num_microbatches: int, looking: StageAudit, iterations: int = 2) -> str:
    """What the log has after training."""
    wraps = {patch.name: wrap for patch, wrap in looking.wraps().items()}

    def forward_step(
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        num_microbatches: Any,
        input_tensor: Any,
        vp_stage: Any = None,
    ) -> Any:
        return stage.forward_step(forward_step_func, data_iterator, model, num_microbatches, input_tensor)

    forward, backward = wraps["forward_step"](forward_step), wraps["backward_step"](stage.backward_step)

    def iteration() -> None:
        under_way = []
        for number in range(num_microbatches + 2):
            if number < num_microbatches:
                tensor = torch.randn(3, 4, requires_grad=True)
                under_way.append((tensor, forward(None, None, stage.model, num_microbatches, input_tensor=tensor)[0]))
            if number >= 2:
                tensor, output = under_way.pop(0)
                backward(tensor, output, torch.randn(3, 4), None)

    step = wraps["train_step"](iteration)
    with contextlib.redirect_stdout(io.StringIO()) as log, mock.patch.object(audit.dist, "get_rank", return_value=0):
        for _ in range(iterations):
            step()
        looking.finish()
    return log.getvalue()


def check_what_comes_from_neighbours_is_no_finding() -> None:
    report = said_of(Stage(), 5, StageAudit(4))
    assert report.startswith(
        "bpipe: terra: rank 0, chunk 0: 4 micro-batches of 14 operations: nothing found that a CUDA graph would"
    ), report


def check_a_number_of_the_forward_is_found_there_and_in_its_backward() -> None:
    report = said_of(Stage(lambda number: 1 / number), 5, StageAudit(3))
    assert "/check_audit.py:" in report
    assert "scalar changes: mul: other is 0.166667 then 0.142857 then 0.125\n" in report
    assert "scalar changes: mul: other is 0.166667 then 0.142857 then 0.125 (backward, MulBackward0)\n" in report


def check_a_training_too_short_says_so() -> None:
    report = said_of(Stage(), 3, StageAudit(4))
    assert (
        report
        == "bpipe: terra: rank 0, chunk 0: 3 micro-batches were trained after the first iteration, too few to compare\n"
    )
    report = said_of(Stage(), 3, StageAudit(4), iterations=1)
    assert report == "bpipe: --terra-audit compares micro-batches of the second iteration, but there was none\n"


def check_what_stands_in_for_a_gpu_is_looked_at_unchanged() -> None:
    """A torch mode finds a replaced method by the plain name: a type was once called torch.cuda.cuda."""
    with Recorder().running():
        assert torch.ones(2).type() == "torch.cuda.FloatTensor"
    # Known by its path: where there is a GPU, importing it would say that there is none.
    assert cpu_runtime.__file__ == audit._STAND_IN
    assert "cpu" not in vars(audit)
