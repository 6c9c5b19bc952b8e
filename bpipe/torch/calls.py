"""Make an engine's calls around what torch's runtime does in one step, and give its buffers memory while they are used.

  begin         after the stages' handshake, which sends messages of its own and runs submodules
  before        when a stage's *_one_chunk is called: its input is here, its parameters are unsharded
  after         a forward: once the loss is part of the graph; a backward: when the stage's method returns
  sent          after the SEND of the outputs, or after the computation if nothing is sent
  communicated  after the last computation or SEND; what reduces gradients or shards parameters again follows
  end           after the step

Torch's runtime is unchanged. During a step the stages' methods are wrapped, and the list of actions calls back when its
next element is taken.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch

from bpipe.runtime.capture import num_storage_uses
from bpipe.runtime.executor import ComputationHooks
from bpipe.runtime.graph import plain_tensors
from bpipe.schedule.action import Action, Kind
from bpipe.torch.upstream import KEEPS_BUFFERS, SEND_WAITS, Computation, receive_buffers

_SENDS = (Computation.SEND_F, Computation.SEND_B)
# By what is received: whether it is a gradient.
_RECEIVES = {Computation.RECV_F: False, Computation.RECV_B: True}
# The buffer's own tensor, and the reference by which uses are counted.
_ONLY_THE_BUFFER = 2

# Stage, whether for gradients, and micro-batch.
Key = tuple[int, bool, int]


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
                    undo.enter_context(patch.object(stage, name, wrapper))
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


class ReceiveBuffers:
    """Gives the buffers into which torch receives memory only from their RECV to their last use.

    Torch up to 2.14 makes a buffer for every micro-batch's input and gradient when it first runs and keeps them for
    ever (`_setup_forward_recv_info`, `_setup_backward_recv_info`): 2 m tensors of what passes between stages, for each
    stage. Later versions make one at each RECV and drop it after its forward (`KEEPS_BUFFERS`). But what the last stage
    received stays until the end of the step: losses are kept until then, and their graphs hold it. A buffer may also be
    held for longer by a gradient that is a view of it and has not been sent, or by an output that the last stage
    returns. Such a buffer stays until the end of the step, and for ever if it is still held then.

    Args:
        stages: Of one rank.
        is_here: Whether a stage is on this rank, so that it needs no buffer to pass tensors to another one here.
    """

    def __init__(self, stages: Sequence[Any], is_here: Callable[[int], bool]) -> None:
        self._stages = {int(stage.stage_index): stage for stage in stages}
        self._is_here = is_here
        self._full_bytes: dict[Key, list[int]] = {}
        self._taken: dict[Key, list[torch.Tensor]] = {}

    def begin(self) -> None:
        """Empty all buffers before anything is received."""
        # A failed step leaves some.
        self._taken = {}
        for key in self._keys():
            buffers = self._buffers(key)
            # Torch makes new ones after an evaluation; others are as empty as the last step left them.
            before = self._full_bytes.get(key, [0] * len(buffers))
            now = [buffer.untyped_storage().nbytes() for buffer in buffers]
            self._full_bytes[key] = [full or last for full, last in zip(now, before, strict=True)]
        self.end()

    def end(self) -> None:
        """Empty all buffers that nothing else holds."""
        for key in self._keys():
            self._empty(key)

    def receives(self, action: Any) -> None:
        """Allocate the buffers of a RECV; other actions have none."""
        if action.computation_type in _RECEIVES:
            key = action.stage_index, _RECEIVES[action.computation_type], action.microbatch_index
            for buffer, nbytes in zip(self._buffers(key), self._full_bytes[key], strict=True):
                buffer.untyped_storage().resize_(nbytes)

    def took(self, stage: int, microbatch: int, received: Sequence[torch.Tensor]) -> None:
        """Note what a stage received for a forward that has run."""
        if not KEEPS_BUFFERS:
            self._taken[stage, False, microbatch] = list(plain_tensors(received))

    def used(self, backward: Action) -> None:
        """Empty the buffers of a micro-batch whose last backward has run. Torch's dgrad may leave everything to wgrad."""
        if backward.kind is not Kind.BACKWARD_INPUT:
            for of_gradients in (False, True):
                key = backward.stage, of_gradients, backward.microbatch
                self._empty(key)
                self._taken.pop(key, None)

    @property
    def nbytes(self) -> int:
        """Bytes that the buffers hold now."""
        return sum(buffer.untyped_storage().nbytes() for key in self._keys() for buffer in self._buffers(key))

    def _keys(self) -> Iterator[Key]:
        for index, stage in self._stages.items():
            for of_gradients, infos in ((False, stage.args_recv_info), (True, stage.grad_recv_info)):
                yield from ((index, of_gradients, microbatch) for microbatch in infos)

    def _buffers(self, key: Key) -> list[torch.Tensor]:
        index, of_gradients, microbatch = key
        if self._is_here(index + (1 if of_gradients else -1)):
            return []
        stage = self._stages[index]
        infos = (stage.grad_recv_info if of_gradients else stage.args_recv_info).get(microbatch, ())
        return [*receive_buffers(infos), *self._taken.get(key, ())]

    def _empty(self, key: Key) -> None:
        for buffer in self._buffers(key):
            storage = buffer.untyped_storage()
            if storage.nbytes() and storage.resizable() and num_storage_uses(storage) == _ONLY_THE_BUFFER:
                storage.resize_(0)
