"""Give Megatron's TensorBoard and Weights & Biases writers what balancing did, under names in Megatron's style.

In: what each stage measured in an iteration. Out: scalars, where Megatron has writers (the last rank of the world).

    bpipe-activation-bytes/stage-0     the most bytes of saved activations the stage held, host buffers included
    bpipe-exposed-transfer-ms/stage-0  how long the stage's computation stood still for transfers
    bpipe-mfu                          model FLOPs of the iteration over what all devices could do; only where the peak is known
"""

from __future__ import annotations

from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from megatron.scheduling.loop.directory import gathered
from megatron.scheduling.placement.positions import Positions
from megatron.scheduling.report.guard import Guard


def write(
    guard: Guard, positions: Positions, iteration: int, peak_bytes: int, exposed_s: float, mfu: float | None
) -> None:
    """Write the metrics of an iteration.

    Collective as `gathered`: every rank gives its own numbers; the one with the writers writes.
    """
    scalars: dict[str, float] = {}
    for stage, (held, waited_s) in enumerate(gathered(positions, (peak_bytes, exposed_s))):
        scalars[f"bpipe-activation-bytes/stage-{stage}"] = float(held)
        scalars[f"bpipe-exposed-transfer-ms/stage-{stage}"] = 1e3 * waited_s
    if mfu is not None:
        scalars["bpipe-mfu"] = mfu
    guard.run(lambda: _tell(scalars, iteration), "Megatron's writers")


def _tell(scalars: dict[str, float], iteration: int) -> None:
    board, wandb = get_tensorboard_writer(), get_wandb_writer()
    if board:
        for name, value in scalars.items():
            board.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(scalars, iteration)
