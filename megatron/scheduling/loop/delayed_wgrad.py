"""Let Transformer Engine's layers put their weights' half off themselves: they can, and are asked for it when they are
built.

In: Megatron's validated arguments before the model is built; later the model. Out: what to replace, and the modules
that keep a W. Knows no schedule. Written from the documented interface (`delay_wgrad_compute`, `backward_dw`); never
run with Transformer Engine itself, which needs a GPU.

Such a module keeps what it puts off first come first served, one entry a pass: so the W of a chunk must come in the
order of its I.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from megatron.core.utils import is_te_min_version

from megatron.scheduling.hooks import patches
from megatron.scheduling.loop.halves import Delaying
from megatron.scheduling.start.refusals import end_where

# From these versions on: any delay, one whose gradients are not added up inside the product, one beside an overlapped
# reduction.
_ANY, _NOT_FUSED, _OVERLAPPED = "2.3.0", "2.7.0", "2.8.0"


def ask(args: Any) -> dict[patches.Patch, patches.Wrap]:
    """Let this run's model delay, if its layers are Transformer Engine's; returns what to replace while it is built.

    Raises ValueError where they cannot. Megatron's own flag asks for another schedule too, so it is set behind
    Megatron's back: for the reduction of gradients in the arguments, for layers in their configuration, which is held
    back from the flag while it judges itself.
    """
    if args.transformer_impl != "transformer_engine":
        return {}
    needed = [
        (_ANY, "", True),
        (_NOT_FUSED, " without --gradient-accumulation-fusion", not args.gradient_accumulation_fusion),
        (_OVERLAPPED, " with --overlap-grad-reduce", args.overlap_grad_reduce),
    ]
    problems = [
        f"Transformer Engine defers weight gradients{when} only from version {version} on; use "
        "--bpipe-keep-weights-halves none"
        for version, when, applies in needed
        if applies and not is_te_min_version(version)
    ]
    if args.overlap_grad_reduce and args.add_bias_linear:
        problems.append(
            "Transformer Engine defers a bias's gradient together with its weight's, and an overlapped reduction "
            "would start too early; use --disable-bias-linear, drop --overlap-grad-reduce, or use "
            "--bpipe-keep-weights-halves none"
        )
    end_where(problems)
    args.delay_wgrad_compute = True
    return {patches.CONFIGURED: _without_judging_the_delay}


def _without_judging_the_delay(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(post_init)
    def run(self: Any) -> None:
        wanted, self.delay_wgrad_compute = self.delay_wgrad_compute, False
        post_init(self)
        self.delay_wgrad_compute = wanted

    return run


def delaying(modules: Iterable[torch.nn.Module]) -> tuple[Delaying, ...]:
    """Return the modules of a chunk that may keep a W: all of Transformer Engine's that know how."""
    return tuple(
        cast(Delaying, module) for module in modules if hasattr(module, "backward_dw") and _is_engines(type(module))
    )


def _is_engines(kind: type) -> bool:
    """Not Megatron's own modules, which pass the call on to those, or do nothing."""
    return any(one.__module__.split(".")[0] == "transformer_engine" for one in kind.__mro__)
