"""Say in flags what launches a row of a plan: what differs from a launch, or all that the search chose.

In: a Setup. Out: flags.

What the search decides stands in one table, `CHOSEN`; all else is the model's and the user's, and the same in every
row. Predicts nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

from bpipe.config.flags.launches import READ
from bpipe.config.launch.hybrid_flags import OLD_PATTERN, PATTERN
from bpipe.config.launch.megatron_command import Reading
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.predict.layout import Setup
from bpipe.predict.training import StateTypes, flag_of

_SPLIT = (
    *(
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--pipeline-model-parallel-layout",
    ),
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers", PATTERN, OLD_PATTERN),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
)
_RECOMPUTED = (
    *(
        "--recompute-granularity",
        "--recompute-method",
        "--recompute-num-layers",
        "--recompute-modules",
        "--recompute-activations",
    ),
)
# Of these a row that does not have them says nothing: they are the user's as well.
_KEPT = ("--bpipe-min-bytes", "--bpipe-differing-sizes", "--make-vocab-size-divisible-by")
CHOSEN = frozenset(
    (
        *(
            "--tensor-model-parallel-size",
            "--context-parallel-size",
            "--cp-comm-type",
            "--pipeline-model-parallel-size",
        ),
        *("--micro-batch-size", "--sequence-parallel", "--expert-model-parallel-size", "--expert-tensor-parallel-size"),
        *("--overlap-grad-reduce", "--overlap-param-gather", "--no-overlap-p2p-communication"),
        *("--tp-comm-overlap", "--make-vocab-size-divisible-by", *_SPLIT, *_RECOMPUTED),
        *(flag for flag in READ if flag.startswith("--bpipe")),
    )
)

# What a change of a launch may say besides (`bpipe fit`); the search leaves it as it is.
_CHANGED = CHOSEN | {
    *("--use-distributed-optimizer", "--grad-reduce-in-bf16", "--fp8-param-gather"),
    *(flag_of(each.name) for each in fields(StateTypes)),
}

# A flag with its values.
Group = tuple[str, tuple[str, ...]]


class LaunchDifference(NamedTuple):
    """Difference of a launch and a row: flags to give in place of its own, and flags of its own to leave out."""

    given: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def text(self) -> str:
        parts = [
            f"{word} {shlex.join(flags)}" for word, flags in (("with", self.given), ("without", self.left_out)) if flags
        ]
        return f"the launch {' and '.join(parts) or 'as it is'}"


def groups(flags: Sequence[str]) -> list[Group]:
    """Return each flag with the words behind it."""
    found: list[tuple[str, list[str]]] = []
    for word in flags:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found.append((flag, [value] if equals else []))
        elif found:
            found[-1][1].append(word)
    return [(flag, tuple(values)) for flag, values in found]


def _joined(parts: Sequence[Group]) -> tuple[str, ...]:
    return tuple(word for flag, values in parts for word in (flag, *values))


def chosen_flags(setup: Setup) -> tuple[str, ...]:
    """Return all flags of a row that the search chose."""
    return _joined([one for one in groups(megatron_flags(setup)) if one[0] in CHOSEN])


def common_flags(setup: Setup) -> tuple[str, ...]:
    """Return the rest, which is the same in every row."""
    return _joined([one for one in groups(megatron_flags(setup)) if one[0] not in CHOSEN])


def difference(setup: Setup, reading: Reading) -> LaunchDifference:
    """Return what to change of a launch."""
    same = _said_alike(setup, reading)
    before = {flag: values for flag, values in groups(reading.flags) if flag in _CHANGED and flag not in same}
    after = {flag: values for flag, values in groups(megatron_flags(setup)) if flag in _CHANGED and flag not in same}
    given = [(flag, values) for flag, values in after.items() if not _means(before.get(flag, _default(flag)), values)]
    kept = (*_KEPT, *(("--bpipe-cluster",) if "--bpipe-memory" in after else ()))
    left_out = [flag for flag in before if flag not in after and flag not in kept]
    return LaunchDifference(_joined(given), tuple(left_out))


def _means(said: tuple[str, ...] | None, values: tuple[str, ...]) -> bool:
    """Return whether words say these values: 70 is 70.0."""
    try:
        return said == values or [float(word) for word in said or ()] == [float(value) for value in values] != []
    except ValueError:
        return False


def _said_alike(setup: Setup, reading: Reading) -> frozenset[str]:
    """Return the flags of parts that the launch has as the row does, whichever way it says them."""
    said = reading.options
    is_cut_so = (said.get("pipeline"), said.get("layers")) == (setup.pipeline, setup.layers)
    # Chunks that nobody but the launch's own schedule says go with it.
    is_cut_so &= (
        setup.num_chunks == 1
        or said.get("schedule") == setup.schedule
        or any(flag in _SPLIT for flag, _ in groups(reading.flags))
    )
    return frozenset(
        (*(_SPLIT if is_cut_so else ()), *(_RECOMPUTED if said.get("recompute") == setup.recompute else ()))
    )


def _default(flag: str) -> tuple[str, ...] | None:
    """What is meant where a launch does not have it; None where it has to be said."""
    row = READ.get(flag)
    if row is None or row.is_switch or row.default is None:
        return None
    return tuple(row.default) if isinstance(row.default, list) else (str(row.default),)
