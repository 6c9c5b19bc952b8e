"""Split backwards of a Megatron stage, compared with whole ones, with its own and Transformer Engine's layers.

Needs megatron-core, and for its second part transformer-engine; what is missing is skipped. Reports whether every
gradient has the bits of whole backwards if weight gradients come late and several of them wait, and how many bytes wait
compared with what a forward leaves allocated. The part for Transformer Engine was written from its documentation and
has not run yet.
"""

import importlib.util
from contextlib import ExitStack

import torch

from tests.gpu.accelerators import Accelerator
from tests.gpu.common import FULL, MODERATE, SMALL, Result, say, tidy
from tests.gpu.megatron_stage import COMMON, MegatronStage, StageShape, differing

# The two halves are far apart, with forwards between them.
ORDER = "F0 F1 F2 I0 I1 F3 W0 I2 I3 W1 W2 W3"
LAYERS = {
    "Megatron's layers": (),
    "Transformer Engine's layers": ("--transformer-impl", "transformer_engine", "--disable-bias-linear"),
}


SIZES = {
    FULL: StageShape(2, 4096, 32, 2048),
    MODERATE: StageShape(1, 2048, 16, 1024),
    SMALL: StageShape(1, 32, 2, 16),
}


def run(on: Accelerator, sizes: StageShape, until: float) -> Result:
    if importlib.util.find_spec("megatron.core") is None:
        return Result(skipped="megatron-core is not installed here")
    on.prepare_megatron()
    device, result = on.device, Result()
    for name, flags in LAYERS.items():
        if flags and importlib.util.find_spec("transformer_engine") is None:
            result.row(name, "skipped: transformer-engine is not installed here")
            continue
        say(f"{name}:")
        arguments = [*COMMON, *sizes.flags, *flags]
        expected, _ = _gradients(arguments, device, split=False)
        again, _ = _gradients(arguments, device, split=False)
        gradients, waiting = _gradients(arguments, device, split=True)
        unlike = differing(expected, again)
        result.check(f"{name}: two runs with whole backwards", not unlike, f"{unlike} gradients differ")
        wrong = differing(expected, gradients)
        result.check(f"{name}: backwards in halves", wrong == 0, f"{wrong} of {len(expected)} gradients differ")
        result.facts[name] = {"gradients": len(expected), "wrong": wrong, "waiting_bytes": waiting}
        tidy(device)
    return result


def _gradients(flags: list[str], device: torch.device, split: bool) -> tuple[list[torch.Tensor], int]:
    """Return the gradient of every parameter, and the most bytes stored for one micro-batch's second half."""
    from megatron.core.pipeline_parallel import schedules

    from megatron.scheduling.hooks import patches
    from megatron.scheduling.loop.halves import Halves, ask, delaying
    from megatron.scheduling.record import one_stage

    args = one_stage.parse(flags, lambda parser: parser)
    halves, peak_bytes = Halves(), 0
    with ExitStack() as stack:
        if split:
            installed = patches.install(halves.wraps() | ask(args))
            stack.callback(halves.abandon)
            stack.callback(installed.remove)
        (model,) = stack.enter_context(one_stage.chunks(args, 1))
        stage = MegatronStage(args, model, device)
        config = model.module.config if hasattr(model, "module") else model.config
        stage.start_over()
        halves.begin({1: delaying(model.modules())})
        waiting: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for name in ORDER.split():
            key = 1, int(name[1:])
            if name[0] == "W":
                if split:
                    halves.run(key)
                continue
            with halves.deferring(key) if split else ExitStack():
                if name[0] == "F":
                    received = stage.received(key[1])
                    waiting[key[1]] = received, stage(received)
                else:
                    received, output = waiting.pop(key[1])
                    schedules.backward_step(received, output, torch.ones_like(output), config)
            if split:
                peak_bytes = max(peak_bytes, sum(storage.nbytes() for storage in halves.storages(key)))
        return stage.gradients(), peak_bytes
