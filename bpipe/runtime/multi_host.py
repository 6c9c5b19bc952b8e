"""Do one role of a rank for several ranks: evict to several hosts, or host for several guests, each over a transport of
its own.

In: an evictor a host, or an acceptor a guest, and which micro-batch goes where. Out: the same calls, passed on to whom
they concern. Knows no transport and no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bpipe.runtime.acceptor import Acceptor
from bpipe.runtime.evictor import Evictor
from bpipe.runtime.sizing import Sizing, Unmoved, together
from bpipe.schedule.action import Action, Key


class SeveralHosts:
    """The evictors of one rank. They share what says which storages are a micro-batch's own: storages know no host."""

    def __init__(self, evictors: Mapping[int, Evictor], host_of: Mapping[Key, int]) -> None:
        """`host_of`: by stage and micro-batch, for all that leave."""
        self._evictors = dict(evictors)
        self._host_of = host_of
        self._passed = Unmoved()

    @property
    def sizing(self) -> Sizing:
        """Sizes of all evictors together, as they are now. Each has buffers of its own with its host."""
        return together((evictor.sizing for evictor in self._evictors.values()), self._passed)

    def begin(self) -> None:
        self._passed = Unmoved()
        for evictor in self._evictors.values():
            evictor.begin()

    def computes(self) -> None:
        """Note that what stayed because of one host is here beside what stayed because of another."""
        self._passed = self._passed.with_here(
            [size for evictor in self._evictors.values() for size in evictor.sizing.at_home]
        )

    def remember(
        self,
        forward: Action,
        roots: Sequence[Any],
        inputs: Sequence[torch.Tensor | None],
        outputs: Sequence[torch.Tensor | None] = (),
        held: Sequence[torch.Tensor] = (),
    ) -> None:
        for host, evictor in self._evictors.items():
            if evictor.unmeasured(forward.stage) or self._goes_to(host, forward):
                evictor.remember(forward, roots, inputs, outputs, held)

    def forget(self, forward: Action) -> None:
        """Do nothing: whoever only measured it has forgotten it."""

    def unmeasured(self, stage: int) -> bool:
        return any(evictor.unmeasured(stage) for evictor in self._evictors.values())

    def measure(self, forward: Action) -> None:
        """Tell each host the sizes of the stages that come to it, and of no other: it listens for no more."""
        for host, evictor in self._evictors.items():
            if evictor.unmeasured(forward.stage):
                evictor.measure(forward)
                if not self._goes_to(host, forward):
                    evictor.forget(forward)

    def evict(self, action: Action, host_buffer: int) -> None:
        self._to(action).evict(action, host_buffer)

    def load(self, action: Action, host_buffer: int) -> None:
        self._to(action).load(action, host_buffer)

    def finish_evictions(self) -> None:
        for evictor in self._evictors.values():
            evictor.finish_evictions()

    def finish_all(self) -> None:
        for evictor in self._evictors.values():
            evictor.finish_all()

    def finish_load(self, backward: Action) -> None:
        for evictor in self._evictors.values():
            evictor.finish_load(backward)

    def end(self) -> None:
        for evictor in self._evictors.values():
            evictor.end()

    def _goes_to(self, host: int, action: Action) -> bool:
        return self._host_of.get(action.key) == host

    def _to(self, action: Action) -> Evictor:
        return self._evictors[self._host_of[action.stage, action.microbatch]]


class SeveralGuests:
    """The acceptors of one rank. Each has host buffers of its own, which have numbers that no other's have."""

    def __init__(self, acceptors: Mapping[int, Acceptor], guest_of: Callable[[int, int], int]) -> None:
        """`guest_of(stage, microbatch)`: the rank that a micro-batch comes from."""
        self._acceptors = dict(acceptors)
        self._guest_of = guest_of

    @property
    def num_host_buffers(self) -> int:
        return sum(acceptor.num_host_buffers for acceptor in self._acceptors.values())

    @property
    def host_buffer_bytes(self) -> int:
        return sum(acceptor.host_buffer_bytes for acceptor in self._acceptors.values())

    @property
    def moved_bytes(self) -> dict[int, int]:
        return {stage: size for acceptor in self._acceptors.values() for stage, size in acceptor.moved_bytes.items()}

    def hear(self, action: Action, num_stages: int) -> None:
        self._from(action).hear(action, num_stages)

    def host(self, action: Action, host_buffer: int) -> None:
        self._from(action).host(action, host_buffer)

    def give_back(self, action: Action, host_buffer: int) -> None:
        self._from(action).give_back(action, host_buffer)

    def end(self) -> None:
        for acceptor in self._acceptors.values():
            acceptor.end()

    def _from(self, action: Action) -> Acceptor:
        return self._acceptors[self._guest_of(action.stage, action.microbatch)]
