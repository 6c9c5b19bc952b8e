"""Make Transformer Engine's layers defer their weights' half themselves, which they do if they are built for it.

Written from the documented interface (`delay_wgrad_compute`, `backward_dw`); never run with Transformer Engine itself,
which needs a GPU. Such a module is a queue with one entry per pass, so the W of a chunk must come in the order of its I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from megatron.core.utils import is_te_min_version

from megatron.scheduling.hooks import patches
from megatron.scheduling.loop.halves import Delaying
from megatron.scheduling.start.refusals import end_where

# Versions from which on gradients can be deferred: at all, without being added up inside the product, and together with
# an overlapped reduction.
_ANY, _NOT_FUSED, _OVERLAPPED = "2.3.0", "2.7.0", "2.8.0"


def ask(args: Any) -> dict[patches.Patch, patches.Wrap]:
    """Let the layers of this run's model defer, if they are Transformer Engine's, and raise ValueError if they cannot.

    Megatron's own flag asks for another schedule too. So it is set only in the arguments, for the reduction of gradients,
    and in the configuration of layers, from which it is hidden while the configuration checks itself.

    Returns:
        Patches that must be in place while the model is built.
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
    return {patches.CONFIGURED: patches.replaced_by(_check_without_delay)}


def _check_without_delay(post_init: Callable[[Any], None], config: Any) -> None:
    delay, config.delay_wgrad_compute = config.delay_wgrad_compute, False
    post_init(config)
    config.delay_wgrad_compute = delay


def delaying(modules: Iterable[torch.nn.Module]) -> tuple[Delaying, ...]:
    """Return the modules of a chunk that may keep a W: not Megatron's own, which pass the call on or do nothing."""
    return tuple(
        cast(Delaying, module)
        for module in modules
        if hasattr(module, "backward_dw")
        and any(base.__module__.split(".")[0] == "transformer_engine" for base in type(module).__mro__)
    )
