"""The path of each step of a program, as tokens, and what a correct co-executor must do with each step.

A token has the operation, its settings, and the whole call stack within the step; in a backward also autograd's node,
and the token of the operation whose gradient it computes. This is slow, and shares no code with `terra`.

The first steps warm up. Then steps are traced until one has no new pair of neighbouring tokens (a step's beginning and
end are tokens, too). Later steps are co-executed; a step with a new pair falls back, and the next steps are traced
again. Steps are counted as in Kim et al., Terra, NeurIPS 2021.
"""

import dis
import enum
import functools
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.programs.judge import Build, random_states_kept

# Profiler calls, and constructors from Python's numbers, which compute nothing.
_IGNORED = frozenset({"profiler", "prim"})
_LIFT = "aten.lift_fresh"
# Arguments that belong to the operation; numbers, tensors and generators are fed to it.
_SETTINGS = (str, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def paths(build: Build, steps: int, seed: int = 0) -> list[list[Hashable]]:
    with random_states_kept():
        program = build(seed)
        token_lists = []
        for number in range(steps):
            mode = _Tokens(sys._getframe())
            with mode:
                program.step(number)
            token_lists.append(mode.tokens)
        return token_lists


class _Tokens(TorchDispatchMode):
    def __init__(self, outermost: FrameType) -> None:
        super().__init__()
        self.tokens: list[Hashable] = []
        self._outermost = outermost
        self._by_number: dict[int, Hashable] = {}
        self._last: Hashable = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in _IGNORED and not str(func).startswith(_LIFT):
            self.tokens.append(self._token(func, args, kwargs))
        return func(*args, **kwargs)

    def _token(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        leaves, shape = tree_flatten((args, kwargs))
        settings = tuple(repr(leaf) if isinstance(leaf, _SETTINGS) else type(leaf) for leaf in leaves)
        stack = tuple((frame.f_code, _instruction(frame.f_code, frame.f_lasti)) for frame in self._frames())
        token: Hashable = (func, settings, repr(shape), stack)
        node: Any = torch._C._current_autograd_node()
        if node is None:
            self._by_number.setdefault(torch._C._autograd._get_sequence_nr() - 1, token)
            return token
        # Additions to a leaf have a number of no forward; they belong to the previous node.
        self._last = self._by_number.get(node._sequence_nr(), self._last)
        return token, node.name(), self._last

    def _frames(self) -> list[FrameType]:
        frames = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame is not self._outermost:
            frames.append(frame)
            frame = frame.f_back
        return frames


@functools.cache
def _instruction(code: CodeType, offset: int) -> int:
    """Return the instruction's number: Python records calls at their beginning, after a few runs at their end."""
    return sum(instruction.offset <= offset for instruction in dis.get_instructions(code))


class Counts(NamedTuple):
    """Steps that were traced until the graph covered one, and fallbacks from co-execution to plain execution."""

    traces: int
    fallbacks: int


class Phase(enum.Enum):
    WARM_UP = "warm-up"
    TRACED = "traced"
    CO_EXECUTED = "co-executed"
    FELL_BACK = "fell back"


def phases(paths: Iterable[Sequence[Hashable]], warm_up: int = 1) -> list[Phase]:
    seen: set[tuple[Hashable, Hashable]] = set()
    result: list[Phase] = []
    tracing = True
    for number, path in enumerate(paths):
        if number < warm_up:
            result.append(Phase.WARM_UP)
            continue
        pairs = set(pairwise((_EDGE, *path, _EDGE)))
        is_new = not pairs <= seen
        seen |= pairs
        if tracing:
            result.append(Phase.TRACED)
        else:
            result.append(Phase.FELL_BACK if is_new else Phase.CO_EXECUTED)
        tracing = is_new
    return result


def counts(paths: Iterable[Sequence[Hashable]], warm_up: int = 1) -> Counts:
    result = phases(paths, warm_up)
    return Counts(result.count(Phase.TRACED), result.count(Phase.FELL_BACK))


# A step's beginning and end, equal to no token.
_EDGE = object()
