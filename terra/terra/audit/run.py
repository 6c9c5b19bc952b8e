"""Run a step function, or a script that trains, a few times and audit it.

A step of a script ends when its first optimizer has stepped.
"""

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
# Packages whose kernels are called from C++ or compiled by themselves, without torch's dispatcher.
_BESIDE_THE_DISPATCHER = ("transformer_engine", "apex", "flash_attn", "triton", "cupy", "numba", "numpy")


def audit(step: Callable[[], Any], num_steps: int = STEPS, warm_up: int = WARM_UP) -> Audit:
    """Audit `num_steps` calls of a step function, after `warm_up` calls. It computes what it would without.

    Args:
        step: The function to call.
        num_steps: Calls to compare.
        warm_up: Calls before these.

    Returns:
        What differed between the steps.

    Raises:
        ValueError: fewer than two steps are to be compared.
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


class _Enough(BaseException):
    """The script has done all steps. Not an Exception, so that no script handles it."""


def audit_script(script: Path, arguments: Sequence[str] = (), num_steps: int = STEPS, warm_up: int = WARM_UP) -> Audit:
    """Run a script as `python script arguments...` would, and audit the steps of its first optimizer.

    What precedes its first step is no step, so the warm-up has at least one.

    Args:
        script: The script to run.
        arguments: Its arguments.
        num_steps: Steps to compare.
        warm_up: Steps before these.

    Returns:
        What differed between the steps.

    Raises:
        ValueError: the script ended before two steps could be compared.
    """
    recorder, warm_up = Recorder(), max(1, warm_up)
    first: list[torch.optim.Optimizer] = []
    num_ended = 0

    def ended(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal num_ended
        if not first:
            first.append(optimizer)
        if optimizer is not first[0]:
            return
        num_ended += 1
        if num_ended - warm_up == num_steps:
            raise _Enough
        if num_ended >= warm_up:
            recorder.begin(num_ended - warm_up)

    hook = register_optimizer_step_post_hook(ended)
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.resolve().parent)
    try:
        with recorder.running():
            runpy.run_path(str(script), run_name="__main__")
        # What follows its last step is no step.
        recorder.steps.pop(num_ended - warm_up, None)
    except _Enough:
        pass
    finally:
        recorder.pause()
        hook.remove()
        sys.argv, sys.path[:] = before
    if not num_ended:
        raise ValueError(
            f"{script}: no torch.optim optimizer stepped in it; call terra.audit(step) with your own step function"
        )
    if len(recorder.steps) < 2:
        raise ValueError(
            f"{script}: its first optimizer stepped {num_ended} times, but finding what changes from step to step needs "
            f"{warm_up + 2} or more; let it train longer"
        )
    return compare(list(recorder.steps.values()), unseen())


def unseen() -> tuple[str, ...]:
    """Return what an audit cannot see in this process."""
    loaded = [name for name in _BESIDE_THE_DISPATCHER if name in sys.modules]
    beside = f" (loaded here: {', '.join(loaded)})" if loaded else ""
    return (
        f"kernels that do not pass torch's dispatcher{beside}",
        "what Python does outside torch, and numbers that it writes into a tensor's memory through an array",
        "states of random generators that the program sets by methods of the generator itself",
    )
