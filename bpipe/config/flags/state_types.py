"""Rows of the table of flags: types of what Adam keeps. Their values are those of `predict.training`."""

from __future__ import annotations

from bpipe.config.flags.flag import Flag, InLaunch
from bpipe.predict.training import STATE_CHOICES, WHOLE, flag_of

_TYPED = {
    "main_grads_dtype": "gradients",
    "main_params_dtype": "main weights; fp32 is stored as the 16 bits that bf16 weights lack",
    "exp_avg_dtype": "Adam's first moment",
    "exp_avg_sq_dtype": "Adam's second moment",
}
STATE_TYPES = (
    Flag(
        "use_precision_aware_optimizer",
        flag_of("use_precision_aware_optimizer"),
        "let Transformer Engine's Adam keep each part of its state in a type of its own",
        launch=InLaunch(),
    ),
    *(
        Flag(
            field,
            flag_of(field),
            f"with --use-precision-aware-optimizer: type of {_TYPED[field]} (default {WHOLE})",
            choices=choices,
            launch=InLaunch(default=WHOLE),
        )
        for field, choices in STATE_CHOICES.items()
    ),
)
