"""Describe the types of what Adam keeps: Megatron's `--use-precision-aware-optimizer`.

In: Megatron's words for it. Out: a frozen `StateTypes`, bytes per parameter. Knows no model.

Without that flag all is in 32 bit. With it Transformer Engine's Adam keeps every part in a type of its own. Main weights
of 32 bit are then 16 bits that, put behind the weight's own 16 in bf16, give them (`store_param_remainders`), but not
where weights are in 8 bit: there Megatron keeps them itself, whole, unless scales are delayed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from bpipe.predict.fp8 import Fp8

TYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
WHOLE = "fp32"
# By field, Megatron's choices; the flag is the field with dashes.
CHOICES = {
    "main_grads_dtype": (WHOLE, "bf16"),
    "main_params_dtype": (WHOLE, "fp16"),
    "exp_avg_dtype": (WHOLE, "fp16", "bf16", "fp8"),
    "exp_avg_sq_dtype": (WHOLE, "fp16", "bf16", "fp8"),
}
_REMAINDER_BYTES = 2


@dataclass(frozen=True, slots=True)
class StateTypes:
    """Types of gradients, main weights and Adam's two moments. Without `use_precision_aware_optimizer` all are fp32."""

    use_precision_aware_optimizer: bool = False
    main_grads_dtype: str = WHOLE
    main_params_dtype: str = WHOLE
    exp_avg_dtype: str = WHOLE
    exp_avg_sq_dtype: str = WHOLE

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"--{name.replace('_', '-')} {value} is unknown: choose from {', '.join(choices)}")
            if value != WHOLE and not self.use_precision_aware_optimizer:
                raise ValueError(
                    f"--{name.replace('_', '-')} {value} needs --use-precision-aware-optimizer: give that, too, or "
                    "leave the type out"
                )

    def check(self, precision: str, *, distributed_optimizer: bool, accumulates_in_fp32: bool) -> None:
        """Raise ValueError for a training that Megatron refuses."""
        if not self.use_precision_aware_optimizer:
            return
        if not distributed_optimizer:
            raise ValueError(
                "--use-precision-aware-optimizer needs the distributed optimizer: give --use-distributed-optimizer, "
                "or leave it out"
            )
        if precision == "fp32":
            raise ValueError("--use-precision-aware-optimizer is for bf16 and fp16: give another precision")
        if accumulates_in_fp32 and self.main_grads_dtype != WHOLE:
            raise ValueError(
                f"--main-grads-dtype {self.main_grads_dtype} and --accumulate-allreduce-grads-in-fp32 exclude each "
                f"other: leave one of them out"
            )

    def gradient_copy_bytes(self, fp8: Fp8 | None) -> int:
        """Return bytes a parameter of a 32-bit copy of 16-bit gradients while weights are updated."""
        return 0 if self._keeps_all(fp8) else TYPE_BYTES[WHOLE]

    def state_bytes(self, precision: str, fp8: Fp8 | None) -> tuple[int, int, int]:
        """Return bytes a parameter of main weights and each moment."""
        moments = TYPE_BYTES[self.exp_avg_dtype], TYPE_BYTES[self.exp_avg_sq_dtype]
        remains = precision == "bf16" and self.main_params_dtype == WHOLE and self._keeps_all(fp8)
        return _REMAINDER_BYTES if remains else TYPE_BYTES[self.main_params_dtype], *moments

    def _keeps_all(self, fp8: Fp8 | None) -> bool:
        """Return whether Adam itself keeps main weights, and reads gradients as they are."""
        scaled = fp8 is not None and fp8.recipe != "delayed"
        return self.use_precision_aware_optimizer and (not scaled or self.main_params_dtype != WHOLE)


FIELDS = tuple(one.name for one in fields(StateTypes))
