"""Receive buffers of torch that take memory only from their RECV to their last use.

Torch up to 2.14 makes a buffer for every micro-batch's input and gradient when it first runs and keeps them for ever
(`_setup_forward_recv_info`, `_setup_backward_recv_info`): 2 m tensors of what passes between stages, for each stage.
Later versions make one at each RECV and drop it after its forward (`KEEPS_BUFFERS`). But what the last stage received
stays until the end of the step: losses are kept until then, and their graphs hold it. A buffer may also be held for
longer by a gradient that is a view of it and has not been sent, or by an output that the last stage returns. Such a
buffer stays until the end of the step, and for ever if it is still held then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bpipe.runtime.capture import num_storage_uses
from bpipe.runtime.graph import plain_tensors
from bpipe.schedule.action import Action, Kind
from bpipe.torch.upstream import KEEPS_BUFFERS, Computation, receive_buffers

# By what is received: whether it is a gradient.
_RECEIVES = {Computation.RECV_F: False, Computation.RECV_B: True}
# The buffer's own tensor, and the reference by which uses are counted.
_ONLY_THE_BUFFER = 2

# Stage, whether for gradients, and micro-batch.
Key = tuple[int, bool, int]


class ReceiveBuffers:
    """The buffers of one rank's stages. `is_here`: whether a stage is on this rank, so that it needs no buffer to pass
    tensors to another one here."""

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
