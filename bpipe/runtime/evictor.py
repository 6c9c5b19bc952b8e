"""The evictor's role of a rank: send micro-batches' activations away and bring them back, in place. The other role is
`partners`.

    HERE --evict--> LEAVING --sent--> AWAY --load--> COMING --received--> HERE

The numbers are those of the order in which compute, copies and memory wait for one another:
  [1] a put waits for the forward that wrote what it reads            (streams.outbound)
  [2] the put
  [3] compute waits for the put, then the storages are emptied        whatever reuses the memory comes after [2]
  [4] the storages get memory again, allocated by compute             (so compute's own allocator orders them)
  [5] a get waits for what compute did before with that memory        (streams.inbound)
  [6] the get
  [7] the backward waits for the get                                  and every reference of ours is dropped

If all micro-batches of a stage have one size, their room in host buffers is that of the first. If they differ, it is the most
that was seen and a reserve, and a micro-batch that is larger stays at home: its eviction and its load move nothing. The next
iteration has room for it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress
from typing import Any, cast

import torch

from bpipe.runtime import RuntimeFault
from bpipe.runtime.capture import Claims, Retrace, SavedStorage, find
from bpipe.runtime.checksums import Verifier
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.graph import Pieces, hiding, plain_tensors
from bpipe.runtime.retention import Kept
from bpipe.schedule.action import Action, Key
from bpipe.schedule.memory import RESERVE
from bpipe.transport.memory import BufferLayout, aligned, allocated_bytes
from bpipe.transport.one_sided import Transport
from bpipe.transport.streams import Done, Pending, Streams, used_here, used_on

# Waits for a transfer of an action; the text is its state, for errors.
Wait = Callable[[Pending, Action, str], None]
# What freed and refilled memory is filled with when poisoning is on: a NaN in every floating type, an absurd index in
# every integer type.
POISON = 0xFF


class ActivationsState(enum.Enum):
    """States in their order; after the last one comes the first."""

    HERE = "here"
    LEAVING = "leaving"
    AWAY = "away"
    COMING = "coming"


@dataclass
class _Host:
    """One of those that keep what leaves: another rank, or this rank's own node's memory."""

    transport: Transport
    layout: BufferLayout

    stages: frozenset[int]
    """Stages of this rank that it hosts."""

    link: str
    """How activations travel, for the verifier's errors."""


@dataclass
class Activations:
    """The saved activations of one forward. `graph` and `inputs` are dropped once its storages are known.

    `host` keeps them; None if they never leave and only show how large they are. `outputs` are the addresses of the
    stage's outputs after the forward. What autograd saved of these stays: how long whoever sends them, or the next stage,
    holds them too differs between micro-batches, and all of a stage's have to be of one size.
    """

    forward: Action
    host: _Host | None
    graph: Pieces
    inputs: Sequence[torch.Tensor | None]
    outputs: frozenset[int]
    state: ActivationsState = ActivationsState.HERE
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    lengths: tuple[int, ...] = ()
    pending: Pending | None = None
    action: Action | None = None

    def move(self, state: ActivationsState, action: Action) -> None:
        """Go to `state` because of `action`. Raises RuntimeFault for any but the next state of the diagram."""
        states = list(ActivationsState)
        following = states[(states.index(self.state) + 1) % len(states)]
        if following is not state:
            raise RuntimeFault(
                f"activations of {self.forward}: {self.state.name} -> {state.name} on {action}, but only "
                f"{following.name} may follow {self.state.name}; is a wait missing?"
            )
        self.state, self.action = state, action


class Evictor:
    """The evictor's half of all transfers of a rank.

    `host_of` has the rank that hosts each micro-batch that leaves. `wait` waits for a transfer and names it in errors;
    `kept` collects what stays.
    """

    def __init__(
        self, host_of: Mapping[Key, int], streams: Streams | None, config: EngineConfig, wait: Wait, kept: Kept
    ) -> None:
        self._host_of, self._streams, self._config = host_of, streams, config
        self._wait, self._kept, self._claims = wait, kept, Claims()
        # By rank; its own node's memory is under this rank's own.
        self._hosts: dict[int, _Host] = {}
        # By stage, descriptions of the storages that leave, for the verifier's errors.
        self._described: dict[int, Sequence[str]] = {}
        self._known: dict[Key, Activations] = {}
        self._announcements: list[tuple[Action, Pending]] = []
        self._measured_kinds: dict[int, Counter[str]] = {}
        # By stage, from its first eviction on; None if every micro-batch needs the whole walk.
        self._retraces: dict[int, Retrace | None] = {}
        self.sizing = Sizing(config.transfers.differing)

    def add_host(self, rank: int, stages_in_buffers: Sequence[frozenset[int]], transport: Transport, link: str) -> None:
        """Add one that hosts; `stages_in_buffers` are, for each of its buffers, the stages of this rank in it."""
        layout = BufferLayout(stages_in_buffers)
        if transport.one_sided:
            transport.reach(layout)
        self._hosts[rank] = _Host(transport, layout, frozenset().union(*stages_in_buffers), link)

    def begin(self) -> None:
        """Begin an iteration: nothing may be left of the last one."""
        if self._known:
            left = ", ".join(str(activations.forward) for activations in self._known.values())
            raise RuntimeFault(f"activations of {left} are left over from the last iteration: did a backward not run?")
        self._claims.clear()
        self.sizing.begin()

    def tell_growth(self, rank: int, grown: Mapping[int, tuple[int, ...]], by: Action) -> bool:
        """Tell a host between two iterations which of its buffers have to grow, if sizes differ; return whether any has.

        It listens at the beginning of every iteration but the first, in which it learns sizes as they are measured.
        `by`: named in errors.
        """
        host = self._hosts[rank]
        if host.stages.isdisjoint(self.sizing.announced):
            return False
        rooms = {stage: lengths for stage, lengths in grown.items() if stage in host.stages}
        self._announcements.append((by, host.transport.announce(rooms)))
        return bool(rooms)

    def remember(
        self,
        forward: Action,
        graph: Pieces,
        inputs: Sequence[torch.Tensor | None],
        outputs: Sequence[torch.Tensor | None],
    ) -> None:
        """Remember a finished forward if its activations will leave, or show how large they are."""
        rank = self._host_of.get(forward.key)
        if rank is None and not self._unmeasured(forward.stage):
            return
        # Whatever the graph holds existed together with the outputs, so none of it reuses their addresses.
        addresses = frozenset(output.untyped_storage()._cdata for output in plain_tensors(outputs))
        host = None if rank is None else self._hosts[rank]
        self._known[forward.key] = Activations(forward, host, graph, inputs, addresses)

    def _unmeasured(self, stage: int) -> list[_Host]:
        """Return those that will host this stage, if its size is not known yet."""
        if stage in self.sizing.announced:
            return []
        return [host for host in self._hosts.values() if stage in host.stages]

    def measure(self, forward: Action) -> None:
        """Measure the first forward of a stage, and announce its storages' lengths to all that host the stage.

        Called at once after it: a host may wait for that, and this rank then for the host. A host listens no earlier
        than at a HOST, so this does not wait for it, and for no stage that does not come to it. If there are no
        storages, both ends know that nothing of this stage travels, and its transfers are empty, until its room grows.
        """
        hosts = self._unmeasured(forward.stage)
        if not hosts:
            return
        movable = self._movable(forward.stage, self._own(self._known[forward.key]))
        self._measured_kinds[forward.stage] = _by_kind(movable)
        room = self.sizing.first(forward.stage, tuple(item.nbytes for item in movable))
        self._announcements += [(forward, host.transport.announce({forward.stage: room})) for host in hosts]
        if self._known[forward.key].host is None:
            # So that its backward can free it as it goes.
            del self._known[forward.key]

    def _own(self, activations: Activations) -> tuple[SavedStorage, ...]:
        """Return what this micro-batch saved and no other did."""
        graph = activations.graph
        saved = find(graph.roots, activations.inputs, self._config.device, graph.held)
        saved = tuple(
            item._replace(alone=False) if item.storage._cdata in activations.outputs else item for item in saved
        )
        return tuple(compress(saved, self._claims.claim([item.storage for item in saved], activations.forward.key)))

    def _movable(self, stage: int, own: Sequence[SavedStorage]) -> tuple[SavedStorage, ...]:
        """Return the storages to evict: all movable ones, or, if the stage has a part, the last ones that hold it.

        At the end of the walk the storages of layers follow one another, and those of what comes after the layers are
        at its beginning. So a part whose bytes are those of whole layers is whole layers.
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
        activations, host = self._moving(action, ActivationsState.LEAVING)
        storages = self._again(activations) or self._anew(action, activations)
        lengths = _lengths_of(storages)
        if not self.sizing.leaves(*action.key, lengths):
            storages, lengths = [], ()
        activations.storages, activations.lengths = storages, lengths
        activations.graph, activations.inputs = Pieces(()), ()
        host.layout.make_room(host_buffer, action.stage, self.sizing.announced)
        if host.transport.one_sided:
            host.transport.grow()
        assert self._streams is not None
        with self._streams.outbound():  # [1]
            sent = _bytes_of(activations.storages)
            if self._checks is not None:
                self._checks.leaves(action, host.link, sent, self._described.get(action.stage, ()))
            activations.pending = (
                host.transport.put(host_buffer, sent) if self._travels(activations, host) else Done()
            )  # [2]

    def _moving(self, action: Action, state: ActivationsState) -> tuple[Activations, _Host]:
        """Return the activations that a transfer moves, now in this state, and their host."""
        activations = self._known[action.key]
        activations.move(state, action)
        assert activations.host is not None
        return activations, activations.host

    @property
    def _checks(self) -> Verifier | None:
        """The verifier, if it checks this iteration."""
        verifier = self._config.verifier
        return verifier if verifier is not None and verifier.on else None

    @property
    def _poisons(self) -> bool:
        """Whether memory is filled with NaN before it is freed or filled, so that whoever reads it too early or too late
        does not find what it expects by chance."""
        return self._config.transfers.poison or self._checks is not None

    def _check(self, activations: Activations) -> None:
        if self._checks is not None:
            self._checks.is_here(activations.forward, _bytes_of(activations.storages))

    def _again(self, activations: Activations) -> list[torch.UntypedStorage]:
        """Return the storages to evict from where an earlier micro-batch of the stage saved them; none if that is not
        known, or if they are not there."""
        stage, key = activations.forward.stage, activations.forward.key
        retrace = self._retraces.get(stage)
        if retrace is None or self._kept.asks(*key):
            return []
        storages = retrace.find(activations.graph.roots, activations.inputs, activations.graph.held) or []
        if _lengths_of(storages) != self.sizing.announced.get(stage):
            return []
        addresses = frozenset(storage._cdata for storage in storages)
        own = addresses.isdisjoint(activations.outputs) and self._claims.hold(addresses, key)
        return storages if own else []

    def _anew(self, action: Action, activations: Activations) -> list[torch.UntypedStorage]:
        """Return the storages to evict of all that was saved, and remember where they were.

        Raises RuntimeFault if they are not what was announced.
        """
        stage, own = action.stage, self._own(activations)
        movable = self._movable(stage, own)
        storages = [item.storage for item in movable]
        if not self.sizing.differing and _lengths_of(storages) != self.sizing.announced.get(stage, ()):
            raise self._other_sizes(action, movable, activations.graph.roots)
        if self._checks is not None:
            self._described[stage] = [str(item) for item in movable]
        if self._kept.asks(*action.key):
            self._kept.saw(stage, own, hiding(activations.graph.roots), sum(item.nbytes for item in movable))
        if stage not in self._retraces and not self.sizing.differing:
            # If sizes differ, a micro-batch may have saved more, in the same nodes.
            self._retraces[stage] = Retrace.of(activations.graph.roots, storages)
        return storages

    def _travels(self, activations: Activations, host: _Host) -> bool:
        """Whether a transfer takes place: also for an empty micro-batch if its lengths go in front."""
        headed = self.sizing.differing and not host.transport.one_sided
        return bool(activations.storages) or (headed and bool(self.sizing.announced[activations.forward.stage]))

    def _other_sizes(self, action: Action, movable: Sequence[SavedStorage], roots: Sequence[Any]) -> RuntimeFault:
        """Return the error for storages other than those announced, with the kinds of nodes that differ or hide what
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
                    # Some of it was made on another stream, whose allocator does not know who read it since.
                    used_here(*_bytes_of(activations.storages))
                for storage in activations.storages:
                    if self._poisons:
                        _poison(storage)
                    storage.resize_(0)

    def finish_all(self) -> None:
        """Wait for everything under way, for synchronous transfers."""
        self.finish_evictions()
        for activations in self._known.values():
            if activations.state is ActivationsState.COMING:
                self._finish(activations, ActivationsState.HERE)

    def load(self, action: Action, host_buffer: int) -> None:
        """Start bringing a micro-batch's storages back. Its backward calls `finish_load`."""
        activations, host = self._moving(action, ActivationsState.COMING)
        self.sizing.back(*action.key)
        for storage, nbytes in zip(activations.storages, activations.lengths, strict=True):
            storage.resize_(nbytes)  # [4]
            if self._poisons:
                _poison(storage)
        if beside := self._config.beside():
            # It was allocated by compute, and nodes on other streams read it.
            used_on(beside, _bytes_of(activations.storages))
        assert self._streams is not None
        with self._streams.inbound():  # [5]
            activations.pending = (
                host.transport.get(host_buffer, _bytes_of(activations.storages))
                if self._travels(activations, host)
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

    def host_buffers(self, rank: int) -> tuple[int, int]:
        """Return the number of buffers that a rank has for this one, and their bytes."""
        host = self._hosts.get(rank)
        return (0, 0) if host is None else (host.layout.num_buffers, host.layout.nbytes)

    def is_scattered(self, rank: int) -> bool:
        """Whether a host's buffers are in several pieces of memory."""
        return len(self._hosts[rank].layout.pieces) > 1

    def end(self) -> None:
        """End the iteration: all hosts have learned everything, at the latest with their last HOST."""
        for forward, announcement in self._announcements:
            self._wait(announcement, forward, "telling its sizes")
        self._announcements.clear()

    def let_go(self, rank: int) -> None:
        """Note that a host frees its buffers. It remembers the sizes."""
        self._hosts[rank].layout.clear()

    def release(self) -> None:
        """Note that all hosts free their buffers and forget the sizes, which are announced anew."""
        for host in self._hosts.values():
            host.layout.clear()
        self._retraces.clear()
        self.sizing.release()

    def abandon(self) -> None:
        """Drop everything after an error; the run is over."""
        self._known.clear()


def _by_kind(movable: Sequence[SavedStorage]) -> Counter[str]:
    """Return the bytes by the kind of node that saved them."""
    kinds: Counter[str] = Counter()
    for item in movable:
        kinds[item.kind] += item.nbytes
    return kinds


def _lengths_of(storages: Sequence[torch.UntypedStorage]) -> tuple[int, ...]:
    return tuple(storage.nbytes() for storage in storages)


def _poison(storage: torch.UntypedStorage) -> None:
    cast(Any, storage).fill_(POISON)


def _bytes_of(storages: Sequence[torch.UntypedStorage]) -> list[torch.Tensor]:
    """Return each storage as one flat uint8 tensor."""
    if not storages:
        return []
    # There may be hundreds, and `data` takes less time than making or detaching a tensor.
    empty = torch.empty(0, dtype=torch.uint8, device=storages[0].device)
    return [empty.data.set_(storage) for storage in storages]


# Number of parts of a micro-batch that a plan can choose from.
STEPS = 8


def parts_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes that could leave of storages of these lengths, ascending; the last is all.

    An evictor takes them from the end of the walk.
    """
    sums = list(accumulate(reversed(lengths)))
    minima = (sums[-1] * step // STEPS for step in range(1, STEPS)) if sums else ()
    smaller = {next(nbytes for nbytes in sums if nbytes >= least) for least in minima} - set(sums[-1:])
    return *sorted(smaller), *sums[-1:]


@dataclass(frozen=True)
class Unmoved:
    """Micro-batches of one iteration that should have left and had too little room."""

    microbatches: int = 0

    nbytes: int = 0
    """Bytes that would have moved."""

    passed_microbatches: int = 0
    """The most by which the schedule's bound was exceeded at once."""

    passed_bytes: int = 0
    """The same in bytes."""


class Sizing:
    """Sizes of what leaves one rank; every host of a stage has the same room for its micro-batches."""

    def __init__(self, differing: bool) -> None:
        self.differing = differing
        # By stage: the lengths announced, and the most bytes that one micro-batch moves.
        self.announced: dict[int, tuple[int, ...]] = {}
        self.moved_bytes: dict[int, int] = {}
        # The most that one micro-batch would take, whether it had room or not; and how often rooms were made larger.
        self.most_bytes: dict[int, int] = {}
        self.num_grown = 0
        # Of this iteration: the bytes of each micro-batch that moved, 0 for one that stayed.
        self.moved_each: dict[Key, int] = {}
        self.stayed = Unmoved()
        # Micro-batches without room: during their eviction, and while they should be away.
        self._staying: dict[Hashable, int] = {}
        self._at_home: dict[Hashable, int] = {}

    def begin(self) -> None:
        """Begin an iteration."""
        self.stayed = Unmoved()
        self.moved_each.clear()
        self._at_home.clear()

    def first(self, stage: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths to announce for a stage whose first micro-batch has storages of these lengths."""
        self._saw(stage, lengths)
        self.moved_bytes[stage] = sum(lengths)
        self.announced[stage] = self._room(stage) if self.differing else lengths
        return self.announced[stage]

    def leaves(self, stage: int, microbatch: int, lengths: tuple[int, ...]) -> bool:
        """Return whether a micro-batch with these storages leaves now. If not, it stays."""
        self._saw(stage, lengths)
        if allocated_bytes(lengths) <= allocated_bytes(self.announced.get(stage, ())):
            self.moved_bytes[stage] = max(self.moved_bytes.get(stage, 0), sum(lengths))
            self.moved_each[stage, microbatch] = sum(lengths)
            return True
        self.moved_each[stage, microbatch] = 0
        self._staying[stage, microbatch] = sum(lengths)
        self.stayed = replace(
            self.stayed, microbatches=self.stayed.microbatches + 1, nbytes=self.stayed.nbytes + sum(lengths)
        )
        return False

    def away(self, stage: int, microbatch: int) -> None:
        """Note that a micro-batch should be away from now on."""
        if (stage, microbatch) in self._staying:
            self._at_home[stage, microbatch] = self._staying.pop((stage, microbatch))

    def computes(self) -> None:
        """Note that a computation begins next to the micro-batches that should be away and are here."""
        sizes = self._at_home.values()
        passed = max(self.stayed.passed_microbatches, len(sizes)), max(self.stayed.passed_bytes, sum(sizes))
        self.stayed = replace(self.stayed, passed_microbatches=passed[0], passed_bytes=passed[1])

    def back(self, stage: int, microbatch: int) -> None:
        """Note that a micro-batch should be here again."""
        self._at_home.pop((stage, microbatch), None)

    def grow(self) -> dict[int, tuple[int, ...]]:
        """Return, between two iterations, the buffers that have to grow, by stage."""
        lacking = [stage for stage, room in self.announced.items() if self.most_bytes[stage] > allocated_bytes(room)]
        grown = {stage: self._room(stage) for stage in lacking}
        self.announced |= grown
        self.num_grown += bool(grown)
        return grown

    def parts(self) -> dict[int, tuple[int, ...]]:
        """Return by stage the bytes that could leave of a micro-batch instead of all, ascending; the last is all.

        If sizes differ, there are none.
        """
        return {stage: parts_of(lengths) for stage, lengths in ({} if self.differing else self.announced).items()}

    def release(self) -> None:
        """Drop announced sizes, so that they are announced anew. The most that was seen stays known."""
        self.announced.clear()
        self.moved_bytes.clear()

    def _room(self, stage: int) -> tuple[int, ...]:
        nbytes = self.most_bytes[stage]
        return (aligned(int(nbytes * (1 + RESERVE))),) if nbytes else ()

    def _saw(self, stage: int, lengths: tuple[int, ...]) -> None:
        self.most_bytes[stage] = max(self.most_bytes.get(stage, 0), allocated_bytes(lengths))
