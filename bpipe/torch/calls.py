"""Make an engine's calls around what torch's runtime does in one step:

  begin         after the stages' handshake, which sends messages of its own and runs submodules
  before        when a stage's *_one_chunk is called: its input is here, its parameters are unsharded
  after         a forward: once the loss is part of the graph; a backward: when the stage's method returns
  sent          after the SEND of the outputs, or after the computation if nothing is sent
  communicated  after the last computation or SEND; what reduces gradients or shards parameters again follows
  end           after the step

Torch's runtime is unchanged. During a step the stages' methods are wrapped, and the list of actions calls back when its
next element is taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bpipe.runtime.executor import ComputationHooks
from bpipe.schedule.action import Action, Kind
from bpipe.torch.upstream import SEND_WAITS, Computation

_SENDS = (Computation.SEND_F, Computation.SEND_B)


class WatchedList(list[Any]):
    """A list that calls `before(action)` when an action is taken, and `after(index)` when the next one is, or the end."""

    def __init__(self, actions: Sequence[Any], before: Callable[[Any], None], after: Callable[[int], None]) -> None:
        super().__init__(actions)
        self._before, self._after = before, after

    def __iter__(self) -> Iterator[Any]:
        for index, action in enumerate(super().__iter__()):
            self._before(action)
            yield action
            self._after(index)

    def __deepcopy__(self, memo: object) -> list[Any]:
        # Torch copies what it prints with an error.
        return list(super().__iter__())


class StepCalls:
    """The calls of one step.

    Args:
        hooks: The engine.
        actions: This rank's list of torch's actions.
        receives: Called before each of torch's actions.
        used: Called after each backward.
    """

    def __init__(
        self,
        hooks: ComputationHooks,
        actions: Sequence[Any],
        receives: Callable[[Any], None] = lambda action: None,
        used: Callable[[Action], None] = lambda action: None,
    ) -> None:
        self._hooks, self._actions = hooks, actions
        self._receives, self._used = receives, used
        self._running: Action | None = None
        self._unsent: Action | None = None
        self.begun = False
        # The last action that computes or sends.
        self._last = max(
            (
                index
                for index, action in enumerate(actions)
                if action.is_compute_op or action.computation_type in _SENDS
            ),
            default=-1,
        )

    def begin(self) -> None:
        """Begin the step, after the stages' handshake."""
        self.begun = True
        self._hooks.begin()

    def watched(self) -> WatchedList:
        """Return the list for torch's runtime to run."""
        return WatchedList(self._actions, self._receives, self._after)

    def _after(self, index: int) -> None:
        if self._unsent is not None and not self._is_followed_by_send(index):
            self._sent()
        if index == self._last:
            self._hooks.communicated()

    def _is_followed_by_send(self, index: int) -> bool:
        """Whether more outputs of the computation will be sent. Torch puts SENDs right after it, or after waits."""
        later = (self._actions[place].computation_type for place in range(index + 1, len(self._actions)))
        return next((kind for kind in later if kind not in SEND_WAITS), None) in _SENDS

    def _sent(self) -> None:
        assert self._unsent is not None
        action, self._unsent = self._unsent, None
        self._hooks.sent(action)

    def computes(self, action: Action) -> None:
        """Note that a computation is about to run."""
        if self._unsent is not None:
            # The second computation of an overlap: the outputs of both are sent together.
            self._sent()
        self._hooks.before(action)
        self._running = action

    def forward_ran(self, outputs: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor | None]) -> None:
        """Note that a forward has run: `outputs` are the roots of its graph, `inputs` what the stage received."""
        action, self._running = self._running, None
        assert action is not None, "no forward is running"
        assert action.kind is Kind.FORWARD, f"{action} is no forward"
        self._hooks.after(action, outputs, inputs)
        self._unsent = action

    def backward_ran(self, action: Action) -> None:
        """Note that a backward, or half of one, has run."""
        self._running = None
        self._used(action)
        self._hooks.after(action)
        self._unsent = action

    @contextlib.contextmanager
    def around(self, stages: Sequence[Any]) -> Iterator[None]:
        """Wrap the stages' methods."""
        with contextlib.ExitStack() as undo:
            for stage in stages:
                for name, wrapper in self._wrappers(stage).items():
                    undo.callback(_replace(stage, name, wrapper))
            yield

    def _wrappers(self, stage: Any) -> dict[str, Callable[..., Any]]:
        index = int(stage.stage_index)
        forward, backward, weight = stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk

        def forward_one_chunk(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            self.computes(Action(index, Kind.FORWARD, fwd_chunk_id))
            return forward(fwd_chunk_id, *args, **kwargs)

        def watched(action: Action, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.computes(action)
            outputs = backward(*args, **kwargs)
            self.backward_ran(action)
            return outputs

        def backward_one_chunk(bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
            kind = Kind.BACKWARD if full_backward else Kind.BACKWARD_INPUT
            action = Action(index, kind, bwd_chunk_id)
            return watched(action, backward, bwd_chunk_id, *args, full_backward=full_backward, **kwargs)

        def backward_weight_one_chunk(bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            return watched(Action(index, Kind.BACKWARD_WEIGHT, bwd_chunk_id), weight, bwd_chunk_id, *args, **kwargs)

        return {
            "forward_one_chunk": forward_one_chunk,
            "backward_one_chunk": backward_one_chunk,
            "backward_weight_one_chunk": backward_weight_one_chunk,
        }


def _replace(holder: Any, name: str, value: object) -> Callable[[], None]:
    """Set an attribute of this object only, and return a function that restores it."""
    before = vars(holder).get(name)
    setattr(holder, name, value)

    def restore() -> None:
        if before is None:
            delattr(holder, name)
        else:
            setattr(holder, name, before)

    return restore
