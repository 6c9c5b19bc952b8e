"""Types of what Adam keeps: bytes as Megatron's and Transformer Engine's optimizers have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layout import Setup
from bpipe.predict.model import PRESETS
from bpipe.predict.states import parameter_bytes
from bpipe.predict.training import Fp8, StateTypes, Switches

SETUP = Setup(PRESETS["llama3-70b"], parse_cluster("h100-80g:8x8"), 8, 4, 1, 64, 8192, (20,) * 4, recompute="none")
SHORT = StateTypes(True, "bf16", "fp32", "bf16", "bf16")


# Weight, gradient, state, and a copy of gradients while weights are updated.
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (2, 4, 12, 0)),
        ({"switches": Switches(grad_reduce_in_bf16=True)}, (2, 2, 12, 4)),
        ({"precision": "fp16"}, (2, 2, 12, 4)),
        ({"precision": "fp16", "switches": Switches(accumulate_allreduce_grads_in_fp32=True)}, (2, 4, 12, 0)),
        ({"precision": "fp32"}, (4, 4, 8, 0)),
        # Of main weights the 16 bits that bf16 lacks.
        ({"state_types": StateTypes(True)}, (2, 4, 10, 0)),
        ({"state_types": StateTypes(True), "precision": "fp16"}, (2, 2, 12, 0)),
        ({"state_types": SHORT}, (2, 2, 6, 0)),
        ({"state_types": replace(SHORT, exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8")}, (2, 2, 4, 0)),
        ({"state_types": replace(SHORT, main_params_dtype="fp16")}, (2, 2, 6, 0)),
        # Gradients are read as they are kept.
        ({"state_types": StateTypes(True), "switches": Switches(grad_reduce_in_bf16=True)}, (2, 2, 10, 0)),
        # Megatron keeps main weights of 8-bit ones itself, and gives Adam gradients in 32 bit.
        ({"state_types": SHORT, "fp8": Fp8(recipe="tensorwise")}, (2, 2, 8, 4)),
        ({"state_types": SHORT, "fp8": Fp8(recipe="delayed")}, (2, 2, 6, 0)),
        ({"state_types": replace(SHORT, main_params_dtype="fp16"), "fp8": Fp8(recipe="tensorwise")}, (2, 2, 6, 0)),
    ],
)
def test_bytes_a_parameter(changes: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert parameter_bytes(replace(SETUP, **changes)) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_types": SHORT, "distributed_optimizer": False}, "give --use-distributed-optimizer"),
        ({"state_types": SHORT, "precision": "fp32"}, "is for bf16 and fp16"),
        (
            {"state_types": SHORT, "switches": Switches(accumulate_allreduce_grads_in_fp32=True)},
            "--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32",
        ),
    ],
)
def test_what_megatron_refuses_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SETUP, **changes)


def test_types_are_of_the_precision_aware_optimizer_alone() -> None:
    with pytest.raises(ValueError, match="--exp-avg-dtype fp8 needs --use-precision-aware-optimizer"):
        StateTypes(exp_avg_dtype="fp8")
    with pytest.raises(ValueError, match="--main-grads-dtype fp16 is unknown: choose from fp32, bf16"):
        StateTypes(True, main_grads_dtype="fp16")
