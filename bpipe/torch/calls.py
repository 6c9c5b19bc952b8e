"""Make an engine's calls around what torch's runtime does in one step.

In: the stages, and this rank's list of torch's actions, computations and messages. Out: `begin`, `before`, `after`,
`sent`, `communicated` and `end`, where the engine wants them:

  begin         behind the stages' handshake, which sends messages of its own and runs submodules
  before        as a stage's *_one_chunk is called: its input is here, its parameters are whole
  after         a forward: once the loss hangs on the graph; a backward: as the stage's method returns
  sent          behind the SEND of what it made, or behind the computation where nothing is sent
  communicated  behind the last computation or SEND; what reduces gradients or shards parameters again follows
  end           behind the step

Torch's runtime runs, unchanged. For the time of a step the stages' methods are wrapped, and the list of actions tells
when its next element is asked for.
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
    """A list that calls `behind(index)` when the element behind the index-th is asked for, and at its end."""

    def __init__(self, actions: Sequence[Any], ahead: Callable[[Any], None], behind: Callable[[int], None]) -> None:
        super().__init__(actions)
        self._ahead, self._behind = ahead, behind

    def __iter__(self) -> Iterator[Any]:
        for index, action in enumerate(super().__iter__()):
            self._ahead(action)
            yield action
            self._behind(index)

    def __deepcopy__(self, memo: object) -> list[Any]:
        # Torch copies what it prints with an error.
        return list(super().__iter__())


class StepCalls:
    """The calls of one step.

    `used(action)` is told when a backward is over, `receives(action)` before one of torch's RECVs.
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
        passing = [
            index for index, action in enumerate(actions) if action.is_compute_op or action.computation_type in _SENDS
        ]
        self._last = passing[-1] if passing else -1

    def begin(self) -> None:
        """Begin the step, behind the stages' handshake."""
        self.begun = True
        self._hooks.begin()

    def watched(self) -> WatchedList:
        """Return the list for torch's runtime to run."""
        return WatchedList(self._actions, self._receives, self._behind)

    def _behind(self, index: int) -> None:
        if self._unsent is not None and not self._is_followed_by_send(index):
            self._sent()
        if index == self._last:
            self._hooks.communicated()

    def _is_followed_by_send(self, index: int) -> bool:
        """Whether more of what was computed is to be sent. Torch puts SENDs right behind it, or behind waits for others."""
        later = (self._actions[place].computation_type for place in range(index + 1, len(self._actions)))
        return next((kind for kind in later if kind not in SEND_WAITS), None) in _SENDS

    def _sent(self) -> None:
        assert self._unsent is not None
        action, self._unsent = self._unsent, None
        self._hooks.sent(action)

    def computes(self, action: Action) -> None:
        """Note that a computation is about to run."""
        if self._unsent is not None:
            # The other one of an overlap, whose outputs leave together.
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
        forward, backward, weight = (
            stage.forward_one_chunk,
            stage.backward_one_chunk,
            stage.backward_weight_one_chunk,
        )

        def forward_one_chunk(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            self.computes(Action(index, Kind.FORWARD, fwd_chunk_id))
            return forward(fwd_chunk_id, *args, **kwargs)

        def backward_one_chunk(bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
            kind = Kind.BACKWARD if full_backward else Kind.BACKWARD_INPUT
            action = Action(index, kind, bwd_chunk_id)
            self.computes(action)
            made = backward(bwd_chunk_id, *args, full_backward=full_backward, **kwargs)
            self.backward_ran(action)
            return made

        def backward_weight_one_chunk(bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            action = Action(index, Kind.BACKWARD_WEIGHT, bwd_chunk_id)
            self.computes(action)
            made = weight(bwd_chunk_id, *args, **kwargs)
            self.backward_ran(action)
            return made

        return {
            "forward_one_chunk": forward_one_chunk,
            "backward_one_chunk": backward_one_chunk,
            "backward_weight_one_chunk": backward_weight_one_chunk,
        }


def _replace(holder: Any, name: str, value: object) -> Callable[[], None]:
    """Set an attribute of this object alone; return what sets it back."""
    before = vars(holder).get(name)
    setattr(holder, name, value)

    def back() -> None:
        if before is None:
            delattr(holder, name)
        else:
            setattr(holder, name, before)

    return back
