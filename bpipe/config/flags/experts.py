"""Rows of the table of flags: how a model's experts are spread over devices."""

from __future__ import annotations

from bpipe.config.flags.flag import Flag, Group, InLaunch
from bpipe.config.flags.values import factor, positive
from bpipe.predict.layer_variants import DISPATCHERS

EXPERTS = Group(
    "experts",
    (
        Flag(
            "expert",
            "--expert-model-parallel-size --ep",
            "expert-parallel size: number of devices that share a layer's experts (default 1; plan tries all)",
            "N",
            positive,
            launch=InLaunch(default=1),
        ),
        Flag(
            "expert_tensor",
            "--expert-tensor-parallel-size --etp",
            "number of devices that share each expert (default: the tensor-parallel size; in plan 1)",
            "N",
            positive,
            launch=InLaunch(),
        ),
        Flag(
            "dispatcher",
            "--moe-token-dispatcher-type",
            "how tokens reach their experts (default alltoall)",
            choices=DISPATCHERS,
            launch=InLaunch(default="allgather"),
        ),
        Flag(
            "capacity_factor",
            "--moe-expert-capacity-factor",
            "an expert takes at most X times its even share of tokens (default: no limit)",
            "X",
            factor,
            launch=InLaunch(),
        ),
        Flag(
            "pad_to_capacity",
            "--moe-pad-expert-input-to-capacity",
            "with --moe-expert-capacity-factor: pad the tokens of every expert to its capacity",
            launch=InLaunch(),
        ),
    ),
    "for models with experts; tokens are assumed to be spread evenly",
)
