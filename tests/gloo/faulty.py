"""One rank of a run that breaks: this process stops or dies after a given operation of a given iteration.

FAULT="<rank> <operation> <signal> [iteration, 2]" names the fault; it applies only before torchrun's first restart.
MEMORY instead of a signal: the operation, a forward, raises torch's out-of-memory error. FLIP: the operation is a
transport, and one bit in its host buffer changes. With CASES, a list of argument lists that must each be refused,
the refusals are printed one after another.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Any

# Megatron writes checkpoints with processes that import this file again, so slow imports are local.


def break_after(operation: str, number: signal.Signals, iteration: int) -> None:
    """Send this process a signal after the operation has run in this iteration."""
    from bpipe.runtime.engine import Engine

    after = Engine.after
    runs = 0

    def broken(self: Engine, op: Any, *args: Any) -> None:
        nonlocal runs
        after(self, op, *args)
        runs += str(op) == operation
        if runs == iteration:
            os.kill(os.getpid(), number)

    Engine.after = broken  # type: ignore[method-assign]


def run_out_of_memory(operation: str, iteration: int) -> None:
    """Raise an out-of-memory error in this stage's forward of a micro-batch in this iteration."""
    import torch
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    forward_step = pretrain_gpt.forward_step
    runs = 0

    def short(*args: Any) -> Any:
        nonlocal runs
        runs += 1
        microbatch, per_iteration = int(operation.partition("F")[2]), get_num_microbatches()
        if runs == (iteration - 1) * per_iteration + microbatch + 1:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of 79.10 GiB"
            )
        return forward_step(*args)

    pretrain_gpt.forward_step = short


def flip_a_bit(transport: str) -> None:
    """Flip a bit of the second micro-batch in a host buffer of this rank's transport."""
    from bpipe.transport.distributed import Distributed
    from bpipe.transport.memory import TensorRegion

    calls = 0

    def damaged(place: Any, count: int) -> None:
        nonlocal calls
        calls += 1
        if calls == count:
            place[37] ^= 16

    if transport == "gloo":
        give_back = Distributed.give_back

        def giving(self: Distributed, host_buffer: int, tensors: Any) -> Any:
            # A link is measured with one tensor.
            if len(tensors) > 1:
                damaged(tensors[-1], 2)
            return give_back(self, host_buffer, tensors)

        Distributed.give_back = giving  # type: ignore[method-assign]
        return
    read = TensorRegion.read

    def reading(self: TensorRegion, pieces: Any) -> None:
        for offset, target in pieces:
            if offset:
                damaged(self._tensor[offset:], 10)
            read(self, [(offset, target)])

    TensorRegion.read = reading  # type: ignore[method-assign]


def refuse(cases: list[list[str]]) -> None:
    """Try to train with each of the argument lists, and print the error as Python would."""
    from megatron.training import training

    for arguments in cases:
        sys.argv[1:] = arguments
        try:
            pretrain_gpt.main()
        except SystemExit as end:
            print(f"ended with status {end.code}", file=sys.stderr)
        except Exception:
            traceback.print_exc()
        print("=== refused", file=sys.stderr, flush=True)
        training.destroy_global_state()


if __name__ == "__main__":
    import pretrain_gpt

    if "CASES" in os.environ:
        refuse(json.loads(os.environ["CASES"]))
        sys.exit()
    if "FAULT" in os.environ:
        rank, operation, name, *iteration = os.environ["FAULT"].split()
        if os.environ["RANK"] == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            if name == "FLIP":
                flip_a_bit(operation)
            elif name == "MEMORY":
                run_out_of_memory(operation, int(*iteration or [2]))
            else:
                break_after(operation, signal.Signals[name], int(*iteration or [2]))
    pretrain_gpt.main()
