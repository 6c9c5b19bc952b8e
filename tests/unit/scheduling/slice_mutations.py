"""Mistakes in what slices do, one line each, that have to be noticed; without Megatron.

In: nothing. Out: by name, where a line stands, what it says instead, and which model shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

USUAL = "rotary positions, groups of heads, gated"
LEARNED = "learned positions, every head its keys, biases"
EXPERTS, Z_LOSS, FURTHER = "experts, both balancing losses", "experts, z loss", "two further tokens"


@dataclass(frozen=True)
class Mutation:
    """A line of a module in `megatron/scheduling/slices`, which stands there once."""

    module: str
    line: str
    instead: str
    case: str = USUAL


MUTATIONS: dict[str, Mutation] = {
    "accumulated gradient: of earlier keys left out": Mutation(
        "kept", "kept.gradient[:end] += gradient", "kept.gradient[begin:end] += gradient[begin:end]"
    ),
    "accumulated gradient: all but the last slice's left out": Mutation(
        "kept", "kept.gradient[:end] += gradient", "pass"
    ),
    "accumulated gradient: of later slices left out": Mutation(
        "kept",
        "return kept.gradient[begin:end].to(gradient.dtype, copy=True)",
        "return gradient[begin:end].clone()",
    ),
    "keys: only the first slice's are kept": Mutation(
        "kept",
        "kept.whole.data[begin:end] = own.detach()",
        "kept.whole.data[begin:end] = own.detach() if not number else 0",
    ),
    "keys: one token off": Mutation(
        "kept",
        "kept.whole.data[begin:end] = own.detach()",
        "kept.whole.data[max(0, begin - 1) : end - (begin > 0)] = own.detach()",
    ),
    "keys: another number in the seventh digit": Mutation(
        "kept", "return kept.whole.data[:end]", "return kept.whole.data[:end] * 1.0000001"
    ),
    # Where heads share keys, Megatron's own core attention saves copies of them.
    "kept tensor: freed behind the last slice but one": Mutation(
        "kept",
        "kept.gradient[:end] += gradient",
        "kept.gradient[:end] += gradient; kept.whole.untyped_storage().resize_(0)",
        LEARNED,
    ),
    "kept tensor: gradients freed behind the last slice but one": Mutation(
        "kept",
        "kept.gradient[begin:end].to(gradient.dtype, copy=True)",
        "(kept.gradient[begin:end].to(gradient.dtype, copy=True), setattr(kept, 'gradient', None))[0]",
    ),
    "mask: a token does not see itself": Mutation("kept", ".triu(1)", ".triu(0)"),
    "mask: a token sees the next one": Mutation("kept", ".triu(1)", ".triu(2)"),
    "mask: the first slice's in every slice": Mutation(
        "kept", "self._mask[..., begin:end, :end]", "self._mask[..., : end - begin, :end]"
    ),
    "offset: positions begin anew in every slice": Mutation(
        "attention", "else made[begin:end]", "else made[: end - begin]"
    ),
    "offset: losses one token off": Mutation(
        "cutting", "(begin, self.length - end)", "(begin + 1, self.length - end - 1)"
    ),
    "offset: rows one token off": Mutation(
        "cutting", "value[:, begin:end].contiguous()", "value[:, max(0, begin - 1) : end - (begin > 0)].contiguous()"
    ),
    "offset: learned positions begin anew": Mutation(
        "cutting",
        "value[:, begin:end].contiguous()",
        "(value[:, : end - begin] if (value[:, 1:] > value[:, :-1]).all() else value[:, begin:end]).contiguous()",
        LEARNED,
    ),
    "further tokens: behind a slice's end is nothing": Mutation(
        "further",
        "roll(cutting.row_of(tensor), *args, **kwargs)",
        "roll(tensor, *args, **kwargs); return rolled, total",
        FURTHER,
    ),
    "further tokens: labels of another slice": Mutation(
        "further",
        "labels = cutting.row_of(labels)",
        "labels = cutting.row_of(labels).roll(cutting.span[0], -1)",
        FURTHER,
    ),
    "further tokens: the loss mask is left out": Mutation(
        "further", "loss_mask = None if loss_mask is None else cutting.row_of(loss_mask)", "loss_mask = None", FURTHER
    ),
    "experts: the z loss of a slice counts as the whole's": Mutation(
        "experts", "return found * ((end - begin) / self._cutting.length)", "return found", Z_LOSS
    ),
    "experts: tokens of the slices so far": Mutation(
        "experts",
        "ctx.so_far, ctx.factor, ctx.shape = so_far, factor",
        "ctx.so_far, ctx.factor, ctx.shape = _SoFar(so_far.counts + counts, so_far.probabilities, so_far.loss), factor",
        EXPERTS,
    ),
}
# Of 4 slices, forwards and then backwards, in another order.
ORDERS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "order: backwards from the first slice on": ((0, 1, 2, 3), (0, 1, 2, 3)),
    "order: backwards of two slices changed": ((0, 1, 2, 3), (3, 1, 2, 0)),
    "order: the first two backwards changed": ((0, 1, 2, 3), (2, 3, 1, 0)),
    "order: forwards of two slices changed": ((0, 2, 1, 3), (3, 2, 1, 0)),
    "order: the first two forwards changed": ((1, 0, 2, 3), (3, 2, 1, 0)),
}
