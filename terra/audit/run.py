"""Run a step a few times and audit it. In: a function, or a script that trains. Out: an `Audit`.

In a script a step ends where its first optimizer has stepped: what lies between two of these is one.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from terra.audit.compare import Audit, compare
from terra.audit.record import Recorder

# Optimizers make their state in the first step, and libraries their caches.
WARM_UP = 1
STEPS = 3
# Packages whose kernels are called from C++ or compiled by themselves: what these do, no dispatcher of torch has seen.
_BESIDE_THE_DISPATCHER = ("transformer_engine", "apex", "flash_attn", "triton", "cupy", "numba", "numpy")


def audit(step: Callable[[], Any], num_steps: int = STEPS, warm_up: int = WARM_UP) -> Audit:
    """Call `step` `warm_up` times, then `num_steps` times while looking on. It computes what it would.

    Raises ValueError for fewer than two steps, and whatever `step` raises.
    """
    if num_steps < 2 or warm_up < 0:
        raise ValueError(
            f"{num_steps} steps after {warm_up} of warm-up: finding what changes from step to step needs 2 or more, "
            "after 0 or more"
        )
    for _ in range(warm_up):
        step()
    recorder = Recorder()
    with recorder.running():
        for number in range(num_steps):
            with recorder.step(number):
                step()
    return compare(list(recorder.steps.values()), unseen())


class _Steps:
    """A script's steps, each ended by its first optimizer."""

    def __init__(self) -> None:
        self._first: torch.optim.Optimizer | None = None
        self.num_ended = 0

    def end(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note that this optimizer has stepped, and return whether a step is over."""
        if self._first is None:
            self._first = optimizer
        over = optimizer is self._first
        self.num_ended += over
        return over


class _Enough(BaseException):
    """The script has done as many steps as were asked for. No error, so that no script takes it for one."""


def audit_script(script: Path, arguments: Sequence[str] = (), num_steps: int = STEPS, warm_up: int = WARM_UP) -> Audit:
    """Run a script as `python script arguments...` would, until its first optimizer has done these steps.

    What lies before its first step is no step, so the warm-up has at least one. Raises ValueError where it ends before
    two steps, and whatever the script raises.
    """
    recorder, steps, warm_up = Recorder(), _Steps(), max(1, warm_up)

    def ended(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not steps.end(optimizer):
            return
        number = steps.num_ended - warm_up
        if number == num_steps:
            raise _Enough
        if number >= 0:
            recorder.begin(number)

    hook = register_optimizer_step_post_hook(ended)
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.resolve().parent)
    try:
        with recorder.running():
            runpy.run_path(str(script), run_name="__main__")
        # Its last part lies behind its last step.
        recorder.steps.pop(steps.num_ended - warm_up, None)
    except _Enough:
        pass
    finally:
        recorder.pause()
        hook.remove()
        sys.argv, sys.path[:] = before
    if not steps.num_ended:
        raise ValueError(
            f"{script}: no torch.optim optimizer stepped in it; call terra.audit(step) with your own step function"
        )
    if len(recorder.steps) < 2:
        raise ValueError(
            f"{script}: its first optimizer stepped {steps.num_ended} times, but finding what changes from step to "
            "step needs "
            f"{warm_up + 2} or "
            "more; let it train longer"
        )
    return compare(list(recorder.steps.values()), unseen())


def unseen() -> tuple[str, ...]:
    """Return what an audit cannot look at in this process."""
    loaded = [name for name in _BESIDE_THE_DISPATCHER if name in sys.modules]
    beside = f" (loaded here: {', '.join(loaded)})" if loaded else ""
    return (
        f"kernels that do not pass torch's dispatcher{beside}",
        "what Python does outside torch, and numbers that it writes into a tensor's memory through an array",
        "states of random generators that the program sets by methods of the generator itself",
    )
