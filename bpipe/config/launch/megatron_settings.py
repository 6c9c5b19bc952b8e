"""Settings of a Megatron training, as far as predictions depend on them, from its flags or its parsed arguments.

Reads what the table `config.flags.launches.READ` covers and what `megatron_names` refuses. Imports no Megatron; a test holds
the names of arguments to the installed parser.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from bpipe.config.flags.budgets import MemoryBudget
from bpipe.config.flags.flag import Flag, Options
from bpipe.config.flags.launches import READ, SWITCHED_OFF, argument_of
from bpipe.config.flags.parser import parser_of_launch
from bpipe.config.launch.megatron_names import GROUP, REFUSED

# Types of the optimizer's state, which Megatron's validation makes types of torch.
_TYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}


@dataclass(frozen=True)
class MegatronSettings:
    """Settings of one training.

    Attributes:
        values: By the names of Megatron's parser, the values of the flags in `READ`.
        others: Further flags, each with its first value or "".
    """

    values: Options
    others: tuple[tuple[str, str], ...]

    def __hash__(self) -> int:
        return hash((repr(self.values), self.others))

    @classmethod
    def from_flags(cls, flags: Sequence[str]) -> MegatronSettings:
        """Parse a command line's flags. Raises ValueError for what Megatron's parser would refuse."""
        values, rest = parser_of_launch(READ.values()).parse_known_args(flags, Options())
        others: list[tuple[str, str]] = []
        for word in rest:
            if word.startswith("--"):
                flag, _, value = word.partition("=")
                others.append((flag, value))
            elif not others:
                raise ValueError(f"{word!r} comes before any flag")
            elif not others[-1][1]:
                others[-1] = (others[-1][0], word)
        return cls(values, tuple(others))

    @classmethod
    def from_args(cls, args: object) -> MegatronSettings:
        """Read Megatron's arguments, validated or not. Those that are missing have Megatron's defaults."""
        values = Options(**{flag.field: _value(flag, args) for flag in READ.values()})
        others = {flag: getattr(args, argument_of(flag), None) for flag in REFUSED if flag not in SWITCHED_OFF}
        for flag, size in _sizes_by_default(values):
            if others[flag] == size:
                others[flag] = None
        others |= {flag: True for flag in REFUSED if _is_switched_off(flag, args)}
        _undo_validation(values, args)
        texts = {flag: "" if value is True else _text(value) for flag, value in others.items() if value}
        return cls(values, tuple(texts.items()))

    def without(self, flags: Collection[str]) -> MegatronSettings:
        """Return the settings without some of the `others`."""
        return MegatronSettings(self.values, tuple(entry for entry in self.others if entry[0] not in flags))


def _sizes_by_default(values: Options) -> tuple[tuple[str, int], ...]:
    """Return refused flags that Megatron's validation sets to a parallel size, and that size."""
    tensor = values.tensor_model_parallel_size
    return (
        (GROUP, values.pipeline_model_parallel_size),
        ("--tensor-parallel-num-weight-shards", tensor),
        ("--expert-tensor-parallel-num-weight-shards", values.expert_tensor_parallel_size or tensor),
    )


def _is_switched_off(flag: str, args: object) -> bool:
    return flag in SWITCHED_OFF and getattr(args, SWITCHED_OFF[flag], True) is False


def _text(value: object) -> str:
    """Write a value as its flag has it: an enumeration's `AttnBackend.flash` by its name."""
    text = str(value)
    return _TYPES.get(text) or re.sub(r"^[A-Z]\w*\.", "", text)


def _value(flag: Flag, args: object) -> Any:
    """Return the value of a flag as our parser of launches would read it."""
    if flag.names in SWITCHED_OFF:
        return _is_switched_off(flag.names, args)
    value = getattr(args, argument_of(flag.names), None)
    value = flag.default if value is None else value
    if flag.is_switch:
        return bool(value)
    if value is None or isinstance(value, MemoryBudget):
        return value
    if flag.count is not None:
        return [str(word) for word in value] if isinstance(value, (list, tuple)) else [str(value)]
    text = ",".join(map(str, value)) if isinstance(value, tuple) else _text(value)
    if flag.choices is not None and text not in flag.choices:
        raise ValueError(f"{flag.names} {text[:40]}: choose from {', '.join(flag.choices)}")
    return text if flag.read is None else flag.read(text)


def _undo_validation(values: Options, args: object) -> None:
    """Set back what validation derives from the flags and would be read as another one."""
    pipes = getattr(args, "bpipe_num_pipes", 1)
    pipes = pipes if isinstance(pipes, int) and pipes > 0 else 1
    values.pipeline_model_parallel_size *= pipes
    if values.num_virtual_stages_per_pipeline_rank is not None:
        values.num_virtual_stages_per_pipeline_rank //= pipes
    if values.bf16:
        # Implied, and without an effect on predictions.
        values.accumulate_allreduce_grads_in_fp32 = False
    if not values.disable_bias_linear:
        # All linear layers have biases.
        values.add_qkv_bias = False
    if values.hybrid_layer_pattern is not None:
        values.hybrid_override_pattern = None
    if getattr(args, "virtual_pipeline_model_parallel_size", None) is None:
        # Megatron itself switches the overlap off.
        values.no_overlap_p2p_communication = False
