"""The slices of one training: their lengths, whether a model can be cut, and what is kept of them."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bpipe.config.features.table import Settings
from bpipe.predict import slices as sequences
from bpipe.predict.slices import equal_bounds, even_bounds, listed_bounds, work_of
from bpipe.schedule.layout import EVEN, SliceLengths
from megatron.scheduling.hooks import patches
from megatron.scheduling.slices import attention, mtp
from megatron.scheduling.slices.cuts import Cutting
from megatron.scheduling.slices.experts import ExpertLosses
from megatron.scheduling.slices.key_value_cache import KeptKeys

_WAY_OUT = "train without --bpipe-slices"


class Slicing:
    """Slices of one training: `number` slices per micro-batch, of these `lengths`."""

    def __init__(self, number: int, lengths: SliceLengths = EVEN) -> None:
        self.number, self._lengths = number, lengths
        self.cutting = Cutting(())
        self.kept = KeptKeys(self.cutting)
        self._losses = ExpertLosses(self.cutting)
        self._judged = False

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        return {**attention.wraps(self.kept), **self._losses.wraps(), **mtp.wraps(self.cutting)}

    def judge(self, models: Sequence[torch.nn.Module]) -> None:
        """Raise ValueError if these models cannot be cut; they are the same in every call."""
        if not self._judged:
            judge(models)
            self._judged = True

    def begin(self, length: int, config: object) -> None:
        """Set the length of the sequences. `config` is Megatron's, of the model.

        Raises ValueError if they have no slices of the requested lengths, with whole parts on all tensor-parallel ranks.
        """
        settings = Settings(config)
        unit = settings.tensor_model_parallel_size if settings.sequence_parallel else 1
        try:
            self.cutting.bounds = bounds_of(self._lengths, length, self.number, unit, config)
        except ValueError as error:
            named = self._lengths if isinstance(self._lengths, str) else ",".join(map(str, self._lengths))
            raise ValueError(f"--bpipe-slices {self.number} --bpipe-slice-lengths {named}: {error}") from None

    def free(self, stage: int, microbatch: int) -> None:
        """Free what is kept of a micro-batch in a stage: nothing reads it any more."""
        self.kept.free(stage, microbatch)
        self._losses.free(stage, microbatch)

    def clear(self) -> None:
        """Drop what another call of the loop kept."""
        self.kept.clear()
        self._losses.clear()


def bounds_of(lengths: SliceLengths, length: int, slices: int, unit: int, config: Any) -> tuple[int, ...]:
    """Return where each slice begins, and the last ends, as predictions assume it.

    Each length is a multiple of `unit`. Raises ValueError if the sequence has no such slices.
    """
    if isinstance(lengths, tuple):
        return listed_bounds(lengths, length, slices, unit)
    if lengths == EVEN:
        return even_bounds(length, slices, unit)
    return equal_bounds(length, slices, unit, work_of(attention_share(length, config)))


def attention_share(length: int, config: Any) -> float:
    """Return the share of attention to `length` tokens in a layer's forward FLOPs."""
    experts = config.moe_router_topk if config.num_moe_experts else 1
    ffn = (config.moe_ffn_hidden_size if config.num_moe_experts else None) or config.ffn_hidden_size
    return sequences.attention_share(
        length,
        config.hidden_size,
        config.num_attention_heads * config.kv_channels,
        config.num_query_groups * config.kv_channels,
        experts * ffn,
        3 if config.gated_linear_unit else 2,
    )


def judge(models: Sequence[torch.nn.Module]) -> None:
    """Raise ValueError, with a line for every kind of layer that would see only its own slice.

    Arguments do not say all: a script may build its own layers, which would see one slice and train on.
    """
    problems = dict.fromkeys(problem for model in models for problem in _problems(model))
    if problems:
        raise ValueError("\n  ".join(["--bpipe-slices: this model cannot be cut:", *problems]))


def _problems(model: torch.nn.Module) -> Iterator[str]:
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for module in model.modules():
        name = type(module).__name__
        if isinstance(module, TransformerLayer):
            if not isinstance(module.self_attention, (Attention, IdentityOp)):
                yield (
                    f"{type(module.self_attention).__name__} is not one of Megatron's attention classes and sees "
                    f"only its own slice: {_WAY_OUT}"
                )
            if not isinstance(module.cross_attention, IdentityOp):
                yield f"{name} attends to another sequence, which has no slices: {_WAY_OUT}"
        if isinstance(module, Attention):
            if not attention.sees_slices(module.core_attention):
                yield (
                    f"{type(module.core_attention).__name__} sees only the keys of its own slice: use Megatron's core "
                    f"attention, or {_WAY_OUT}"
                )
            elif module.attn_mask_type is not AttnMaskType.causal:
                yield (
                    f"{name} has the mask {module.attn_mask_type.name}, but earlier slices cannot see later ones: "
                    f"{_WAY_OUT}"
                )
        if type(module).__module__.startswith("megatron.core.ssm."):
            yield f"{name} carries a state from token to token, but slices do not pass it on: {_WAY_OUT}"
