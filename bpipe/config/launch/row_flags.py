"""Write the flags that launch a row of a plan: changes of a launch, or all that the search chose.

The search chooses the flags in `CHOSEN`; all others are the model's and the user's, and the same in every row.
"""

import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

from bpipe.config.flags.launches import READ
from bpipe.config.launch.layer_flags import OLD_PATTERN, PATTERN
from bpipe.config.launch.layer_split import CHUNKS, COUNT_EMBEDDING, COUNT_LOSS, FIRST, LAST, LAYERS_OF_A_CHUNK, LAYOUT
from bpipe.config.launch.megatron_command import Reading
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.predict.layout import Setup
from bpipe.predict.training import StateTypes, flag_of

_SPLIT = (LAYERS_OF_A_CHUNK, CHUNKS, LAYOUT, FIRST, LAST, PATTERN, OLD_PATTERN, COUNT_EMBEDDING, COUNT_LOSS)
_RECOMPUTED = (
    *("--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--recompute-modules"),
    "--recompute-activations",
)
# A row without these leaves the launch's own: they are the user's as well.
_KEPT = ("--bpipe-min-bytes", "--bpipe-differing-sizes", "--make-vocab-size-divisible-by")
CHOSEN = frozenset(
    (
        *("--tensor-model-parallel-size", "--context-parallel-size", "--cp-comm-type", "--micro-batch-size"),
        *("--pipeline-model-parallel-size", "--sequence-parallel", "--expert-model-parallel-size"),
        *(
            "--expert-tensor-parallel-size",
            "--overlap-grad-reduce",
            "--overlap-param-gather",
            "--no-overlap-p2p-communication",
        ),
        *("--tp-comm-overlap", "--make-vocab-size-divisible-by", *_SPLIT, *_RECOMPUTED),
        *(flag for flag in READ if flag.startswith("--bpipe")),
    )
)

# Further flags that a change of a launch may have (`bpipe fit`); the search leaves them as they are.
_CHANGED = CHOSEN | {
    *("--use-distributed-optimizer", "--grad-reduce-in-bf16", "--fp8-param-gather"),
    *(flag_of(each.name) for each in fields(StateTypes)),
}

# A flag with its values.
Group = tuple[str, tuple[str, ...]]


class LaunchDifference(NamedTuple):
    """Difference of a launch and a row: flags that replace its own, and flags to leave out."""

    given: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def text(self) -> str:
        parts = [
            f"{word} {shlex.join(flags)}" for word, flags in (("with", self.given), ("without", self.left_out)) if flags
        ]
        return f"the launch {' and '.join(parts) or 'as it is'}"


def groups(flags: Sequence[str]) -> list[Group]:
    """Return each flag with its values."""
    parts: list[tuple[str, list[str]]] = []
    for word in flags:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            parts.append((flag, [value] if equals else []))
        elif parts:
            parts[-1][1].append(word)
    return [(flag, tuple(values)) for flag, values in parts]


def _joined(parts: Sequence[Group]) -> tuple[str, ...]:
    return tuple(word for flag, values in parts for word in (flag, *values))


def chosen_flags(setup: Setup) -> tuple[str, ...]:
    """Return all flags of a row that the search chose."""
    return _joined([part for part in groups(megatron_flags(setup)) if part[0] in CHOSEN])


def common_flags(setup: Setup) -> tuple[str, ...]:
    """Return the flags that all rows of a plan have in common."""
    return _joined([part for part in groups(megatron_flags(setup)) if part[0] not in CHOSEN])


def difference(setup: Setup, reading: Reading) -> LaunchDifference:
    """Return the changes of a launch that give this setup."""
    same = _equal_parts(setup, reading)
    before = {flag: values for flag, values in groups(reading.flags) if flag in _CHANGED and flag not in same}
    after = {flag: values for flag, values in groups(megatron_flags(setup)) if flag in _CHANGED and flag not in same}
    replaced = [
        (flag, values) for flag, values in after.items() if not _means(before.get(flag, _default(flag)), values)
    ]
    kept = (*_KEPT, *(("--bpipe-cluster",) if "--bpipe-memory" in after else ()))
    left_out = [flag for flag in before if flag not in after and flag not in kept]
    return LaunchDifference(_joined(replaced), tuple(left_out))


def _means(words: tuple[str, ...] | None, values: tuple[str, ...]) -> bool:
    """Whether words mean these values: 70 is 70.0."""
    try:
        return words == values or [float(word) for word in words or ()] == [float(value) for value in values] != []
    except ValueError:
        return False


def _equal_parts(setup: Setup, reading: Reading) -> frozenset[str]:
    """Return the flags of layers and recomputation, if launch and row have the same, however they are written."""
    options = reading.options
    cut = (options.get("pipeline"), options.get("layers")) == (setup.pipeline, setup.layers)
    # Chunks that follow only from the launch's schedule change with it.
    stays = setup.num_chunks == 1 or options.get("schedule") == setup.schedule
    cut &= stays or any(flag in _SPLIT for flag, _ in groups(reading.flags))
    recomputed = options.get("recompute") == setup.recompute
    return frozenset((*(_SPLIT if cut else ()), *(_RECOMPUTED if recomputed else ())))


def _default(flag: str) -> tuple[str, ...] | None:
    """Return the values that a launch has without the flag; None if there is no default."""
    row = READ.get(flag)
    if row is None or row.is_switch or row.default is None:
        return None
    return tuple(row.default) if isinstance(row.default, list) else (str(row.default),)
