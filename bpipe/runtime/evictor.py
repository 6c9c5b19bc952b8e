"""Send micro-batches' activations away and bring them back, in place.

One of the two roles of a rank; the other is `acceptor`.

In: EVICT and LOAD actions with their host buffer, and the graphs of finished forwards. Out: storages emptied and
refilled. Knows the transport's protocol, not which transport it is; knows no schedule, only what it is told to move.

    HERE --evict--> LEAVING --sent--> AWAY --load--> COMING --received--> HERE

The numbers are those of the order in which compute, copies and memory wait for one another:
  [1] a put waits for the forward that wrote what it reads            (streams.outbound)
  [2] the put
  [3] compute waits for the put, then the storages are emptied        whatever reuses the memory is ordered behind [2]
  [4] the storages are filled again, allocated by compute             (so compute's own allocator orders them)
  [5] a get waits for what compute did before with that memory        (streams.inbound)
  [6] the get
  [7] the backward waits for the get                                  and every reference of ours is dropped
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, cast

import torch

from bpipe.runtime.activations import POISON, Activations, ActivationsState
from bpipe.runtime.capture import Claims, SavedStorage, find
from bpipe.runtime.checksums import Verifier
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.errors import RuntimeFault
from bpipe.runtime.graph import hiding, plain_tensors
from bpipe.runtime.retention import Kept
from bpipe.runtime.retrace import Retrace
from bpipe.runtime.sizing import Sizing
from bpipe.runtime.streams import Streams, used_here, used_on
from bpipe.schedule.action import Action, Key
from bpipe.transport.base import Done, Pending, Transport
from bpipe.transport.layout import BufferLayout

Wait = Callable[[Pending, Action, str], None]


class Evictor:
    """The evictor's half of every transfer of one rank."""

    def __init__(
        self,
        stages_in_buffers: Sequence[frozenset[int]],
        transport: Transport,
        streams: Streams,
        config: EngineConfig,
        *,
        wait: Wait,
        kept: Kept,
        claims: Claims,
        link: str,
    ) -> None:
        """`stages_in_buffers` are the partner's host buffers: which of this rank's stages each of them holds.

        `wait` waits for a transfer and names it in errors. `claims` are shared by all evictors of a rank. `link` says
        in the verifier's errors how activations travel.
        """
        self._stages: frozenset[int] = frozenset().union(*stages_in_buffers)
        self._layout = BufferLayout(stages_in_buffers)
        self._transport = transport
        if transport.one_sided:
            transport.reach(self._layout)
        self._streams, self._config = streams, config
        self._wait, self._kept, self._claims, self._link = wait, kept, claims, link
        # By stage, what leaves last was looked at as a whole: for a check to name.
        self._described: dict[int, Sequence[str]] = {}
        self._known: dict[Key, Activations] = {}
        self._announcements: list[tuple[Action, Pending]] = []
        self._measured_kinds: dict[int, Counter[str]] = {}
        # By stage, from its first eviction on; None where each has to be looked at as a whole.
        self._retraces: dict[int, Retrace | None] = {}
        self.sizing = Sizing(config.transfers.differing)

    def begin(self) -> None:
        """Begin an iteration: nothing may be left of the last one."""
        if self._known:
            left = ", ".join(str(activations.forward) for activations in self._known.values())
            raise RuntimeFault(f"activations of {left} are left over from the last iteration: did a backward not run?")
        self._claims.clear()
        self.sizing.begin()

    def computes(self) -> None:
        """Note that a computation begins."""
        self.sizing.computes()

    def tell_growth(self, by: Action) -> bool:
        """Tell the partner between two iterations which buffers have to grow, where sizes differ.

        Return whether any has.

        The partner listens at the beginning of every iteration but the first, in which it hears sizes as they are
        measured. `by`: named in errors.
        """
        if not self.sizing.announced:
            return False
        grown = self.sizing.grow()
        self._announcements.append((by, self._transport.announce(grown)))
        return bool(grown)

    def remember(
        self,
        forward: Action,
        roots: Sequence[Any],
        inputs: Sequence[torch.Tensor | None],
        outputs: Sequence[torch.Tensor | None] = (),
        held: Sequence[torch.Tensor] = (),
    ) -> None:
        """Remember a finished forward whose activations will leave, or tell how large they are. `held` as in
        `capture.find`."""
        # Whatever the graph holds was there when the outputs were: nothing of it can be where one of them was.
        places = frozenset(output.untyped_storage()._cdata for output in plain_tensors(outputs))
        self._known[forward.key] = Activations(forward, roots, inputs, places, held)

    def forget(self, forward: Action) -> None:
        """Forget activations that never leave, or their backward could not free them as it goes."""
        del self._known[forward.key]

    def unmeasured(self, stage: int) -> bool:
        """Return whether activations of this stage will leave and nobody knows yet how large they are."""
        return stage in self._stages and stage not in self.sizing.announced

    def measure(self, forward: Action) -> None:
        """Learn from a remembered forward how long its stage's storages are, and tell the partner.

        The partner listens no earlier than at a HOST, so this does not wait for it. Where there are none, both ends
        know that nothing of this stage travels, and its transfers are empty, until its room grows.
        """
        movable = self._movable(forward.stage, self._own(self._known[forward.key]))
        self._measured_kinds[forward.stage] = _by_kind(movable)
        room = self.sizing.first(forward.stage, tuple(found.nbytes for found in movable))
        self._announcements.append((forward, self._transport.announce({forward.stage: room})))

    def _own(self, activations: Activations) -> tuple[SavedStorage, ...]:
        """What this micro-batch saved and no other did."""
        found = find(activations.roots, activations.inputs, self._config.device, activations.held)
        found = tuple(
            item._replace(alone=False) if item.storage._cdata in activations.outputs else item for item in found
        )
        mine = self._claims.claim([item.storage for item in found], activations.forward.key)
        return tuple(compress(found, mine))

    def _movable(self, stage: int, own: Sequence[SavedStorage]) -> tuple[SavedStorage, ...]:
        """What leaves of a micro-batch of a stage: all that may, or, from the end of the walk, as many as hold the
        stage's part of it.

        There the storages of layers follow one another, and what a stage has behind its layers stands at the other end:
        the part is whole layers' wherever its bytes are theirs.
        """
        movable = tuple(item for item in own if item.alone and item.nbytes >= self._config.transfers.minimum_bytes)
        if stage not in self._config.parts:
            return movable
        left, part = self._config.parts[stage], []
        for item in reversed(movable):
            if left <= 0:
                break
            part.append(item)
            left -= item.nbytes
        return tuple(part)

    def evict(self, action: Action, host_buffer: int) -> None:
        """Start sending a finished micro-batch's storages. They are emptied by `finish_evictions`."""
        activations = self._known[action.key]
        activations.move(ActivationsState.LEAVING, action)
        storages = self._again(activations) or self._anew(action, activations)
        lengths = _lengths_of(storages)
        if not self.sizing.leaves(*action.key, lengths):
            storages, lengths = [], ()
        activations.storages, activations.lengths = storages, lengths
        activations.roots, activations.inputs, activations.held = (), (), ()
        self._layout.make_room(host_buffer, action.stage, self.sizing.announced)
        if self._transport.one_sided:
            self._transport.grow()
        with self._streams.outbound():  # [1]
            sent = _bytes_of(activations.storages)
            if self._checks is not None:
                self._checks.leaves(action, self._link, sent, self._described.get(action.stage, ()))
            activations.pending = (
                self._transport.put(host_buffer, sent) if self._travels(activations) else Done()
            )  # [2]

    @property
    def _checks(self) -> Verifier | None:
        """What checks this iteration, if anything does."""
        verifier = self._config.verifier
        return verifier if verifier is not None and verifier.on else None

    @property
    def _poisons(self) -> bool:
        """Whether memory is made useless before it is freed or filled: whoever reads it too early or too late, and would
        mostly find what it expects, finds NaN."""
        return self._config.transfers.poison or self._checks is not None

    def _check(self, activations: Activations) -> None:
        if self._checks is not None:
            self._checks.is_here(activations.forward, _bytes_of(activations.storages))

    def _again(self, activations: Activations) -> list[torch.UntypedStorage]:
        """Return what leaves where an earlier micro-batch of the stage saved it; nothing where that is not known, or
        is not there."""
        stage, key = activations.forward.stage, activations.forward.key
        retrace = self._retraces.get(stage)
        if retrace is None or self._kept.asks(*key):
            return []
        found = retrace.find(activations.roots, activations.inputs, activations.held) or []
        if _lengths_of(found) != self.sizing.announced.get(stage):
            return []
        addresses = frozenset(storage._cdata for storage in found)
        own = addresses.isdisjoint(activations.outputs) and self._claims.hold(addresses, key)
        return found if own else []

    def _anew(self, action: Action, activations: Activations) -> list[torch.UntypedStorage]:
        """Return what leaves of all that was saved, and remember where that was.

        Raises RuntimeFault where it is not what was announced.
        """
        stage, own = action.stage, self._own(activations)
        movable = self._movable(stage, own)
        storages = [item.storage for item in movable]
        if not self.sizing.differing and _lengths_of(storages) != self.sizing.announced.get(stage, ()):
            raise self._other_sizes(action, movable, activations.roots)
        if self._checks is not None:
            self._described[stage] = [str(item) for item in movable]
        if self._kept.asks(*action.key):
            self._kept.saw(stage, own, hiding(activations.roots), sum(item.nbytes for item in movable))
        if stage not in self._retraces and not self.sizing.differing:
            # Where sizes differ a micro-batch may have saved more, in the same nodes.
            self._retraces[stage] = Retrace.of(activations.roots, storages)
        return storages

    def _travels(self, activations: Activations) -> bool:
        """Return whether anything of a micro-batch leaves."""
        told = self.sizing.differing and not self._transport.one_sided
        return bool(activations.storages) or (told and bool(self.sizing.announced[activations.forward.stage]))

    def _other_sizes(self, action: Action, movable: Sequence[SavedStorage], roots: Sequence[Any]) -> RuntimeFault:
        """Return the error for storages other than those announced: which kinds of nodes differ, or may hide what
        they saved."""
        announced = self.sizing.announced.get(action.stage, ())
        before, now = self._measured_kinds.get(action.stage, Counter()), _by_kind(movable)
        differing = sorted(before | now, key=lambda kind: -abs(now[kind] - before[kind]))[:3]
        why = ", ".join(
            f"{kind} {now[kind]} bytes instead of {before[kind]}" for kind in differing if now[kind] != before[kind]
        )
        hidden = ", ".join(f"{kind} ({number})" for kind, number in hiding(roots).items())
        if hidden:
            why += (
                f"; tensors saved by {hidden} are hidden, as TorchScript's functions hide theirs from the second "
                "call on"
            )
        return RuntimeFault(
            f"{action}: this micro-batch saved {len(movable)} movable storages ({sum(now.values())} bytes), but the "
            f"partner's host buffers were sized for {len(announced)} ({sum(announced)} bytes): "
            f"{why or 'in a different order'}. If micro-batches are meant to differ in size, use "
            "--bpipe-differing-sizes"
        )

    def finish_evictions(self) -> None:
        """Empty the storages that have been sent.

        Called as late as the schedule allows: when the slot of the eviction ends.
        """
        for activations in self._known.values():
            if activations.state is ActivationsState.LEAVING:
                self._finish(activations, ActivationsState.AWAY)  # [3]
                self.sizing.away(*activations.forward.key)
                self._check(activations)
                if self._config.beside():
                    # Some of it was made on another stream, whose allocator does not know who read it meanwhile.
                    used_here(*_bytes_of(activations.storages))
                for storage in activations.storages:
                    if self._poisons:
                        _poison(storage)
                    storage.resize_(0)

    def finish_all(self) -> None:
        """Wait for everything under way, here and now: what synchronous transfers are."""
        self.finish_evictions()
        for activations in self._known.values():
            if activations.state is ActivationsState.COMING:
                self._finish(activations, ActivationsState.HERE)

    def load(self, action: Action, host_buffer: int) -> None:
        """Start bringing a micro-batch's storages back. Its backward calls `finish_load`."""
        activations = self._known[action.key]
        activations.move(ActivationsState.COMING, action)
        self.sizing.back(*action.key)
        for storage, nbytes in zip(activations.storages, activations.lengths, strict=True):
            storage.resize_(nbytes)  # [4]
            if self._poisons:
                _poison(storage)
        if beside := self._config.beside():
            # Now it is compute's, and nodes of other streams read it.
            used_on(beside, _bytes_of(activations.storages))
        with self._streams.inbound():  # [5]
            activations.pending = (
                self._transport.get(host_buffer, _bytes_of(activations.storages))
                if self._travels(activations)
                else Done()
            )  # [6]

    def finish_load(self, backward: Action) -> None:
        """Wait until the activations of a backward are here."""
        activations = self._known.get(backward.key)
        if activations is None:
            return
        if activations.state is ActivationsState.COMING:
            self._finish(activations, ActivationsState.HERE)  # [7]
        elif activations.state is not ActivationsState.HERE:
            raise RuntimeFault(
                f"{backward} is about to run but its activations are {activations.state.value}: the program has no "
                f"LOAD for it"
            )
        self._check(activations)
        del self._known[backward.key]
        self._claims.release(backward.key)

    def _finish(self, activations: Activations, state: ActivationsState) -> None:
        """Wait for what is pending.

        A micro-batch that may leave again keeps its storages; its LOAD's backward drops them.
        """
        assert activations.pending is not None
        assert activations.action is not None
        self._wait(activations.pending, activations.action, activations.state.value)
        activations.pending = None
        activations.move(state, activations.action)

    @property
    def host_buffers(self) -> tuple[int, int]:
        """How many the partner has for this rank, and their bytes."""
        return self._layout.num_buffers, self._layout.nbytes

    @property
    def is_scattered(self) -> bool:
        """Whether the partner's host buffers are in several pieces of memory."""
        return len(self._layout.pieces) > 1

    def end(self) -> None:
        """End the iteration: the partner has heard everything, at the latest with its last HOST."""
        for forward, announcement in self._announcements:
            self._wait(announcement, forward, "telling its sizes")
        self._announcements.clear()

    def let_go(self) -> None:
        """Note that the partner gives its host buffers back; it remembers the sizes."""
        self._layout.clear()

    def release(self) -> None:
        """Forget the rooms too: the partner does and has to be told again."""
        self.let_go()
        self._retraces.clear()
        self.sizing.release()

    def abandon(self) -> None:
        """Drop everything after an error; the run is over."""
        self._known.clear()


def _by_kind(movable: Sequence[SavedStorage]) -> Counter[str]:
    """Return the bytes by the kind of node that saved them."""
    kinds: Counter[str] = Counter()
    for found in movable:
        kinds[found.kind] += found.nbytes
    return kinds


def _lengths_of(storages: Sequence[torch.UntypedStorage]) -> tuple[int, ...]:
    return tuple(storage.nbytes() for storage in storages)


def _poison(storage: torch.UntypedStorage) -> None:
    cast(Any, storage).fill_(POISON)


def _bytes_of(storages: Sequence[torch.UntypedStorage]) -> list[torch.Tensor]:
    """Return each storage as one flat uint8 tensor: strided views share storages, so nothing is made twice."""
    if not storages:
        return []
    # By `data` of one, because making a tensor takes longer, and so does `detach`; there may be hundreds.
    empty = torch.empty(0, dtype=torch.uint8, device=storages[0].device)
    return [empty.data.set_(storage) for storage in storages]
