"""Read and write the form that torch's pipeline runtime loads: computations with the messages between them.

In: text or a Schedule.

Out: the other, or a `TextError` with the place. A row is a rank's operations in order (`format="compute_comms"` of
torch's `_load_csv`):

    0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,...,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD

Messages follow from the computations: an output or a gradient goes to the neighbouring stage where that is another
rank's. Reading holds the file to that (nothing missing, doubled, unneeded, too early or too late, between two ranks all
in one order, and nobody waits for ever), then drops the messages. Columns of this form say nothing: where a computation
stands on the grid is `lower.align`'s to say. Knows no time and no parameters: where they are gathered, let go and
reduced is only held to its order.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from bpipe.formats.text import NUMBER, TextError, assemble, read_computation, read_rows, slot_of, write_computation
from bpipe.ir.action import SHARDS, Action, Kind
from bpipe.ir.dependencies import NOTHING, Dependencies
from bpipe.ir.hosts import Pair
from bpipe.ir.layout import one_pipe
from bpipe.ir.schedule import Schedule, Slot

_MESSAGE = re.compile(f"{NUMBER}((?:WAIT_)?SEND_[FB]|RECV_[FB]){NUMBER}")
_PARAMETERS = re.compile(f"{NUMBER}(UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD)")
# By the word that ends what a stage's parameters or gradients are in, the word that begins it.
_OPENING = {"RESHARD": "UNSHARD", "WAIT_REDUCE_GRAD": "REDUCE_GRAD"}
_CLOSING = {opening: closing for closing, opening in _OPENING.items()}
# The words of the same stage that may not stand before one.
_AT_MOST_ONCE = {
    "UNSHARD": ("UNSHARD",),
    "RESHARD": (),
    "REDUCE_GRAD": ("REDUCE_GRAD", "WAIT_REDUCE_GRAD"),
    "WAIT_REDUCE_GRAD": ("WAIT_REDUCE_GRAD",),
}
_ANY = re.compile("[0-9](WAIT_|SEND_|RECV_|UNSHARD|RESHARD|REDUCE_GRAD)")


def has_messages(text: str) -> bool:
    """Return whether this CSV is in the runtime's form."""
    return _ANY.search(text) is not None


class _Message(NamedTuple):
    """An output ("F") or gradient ("B") of one micro-batch, named by the stage that makes it."""

    direction: str
    stage: int
    microbatch: int

    @property
    def to_stage(self) -> int:
        return self.stage + (1 if self.direction == "F" else -1)

    @property
    def send(self) -> str:
        return f"{self.stage}SEND_{self.direction}{self.microbatch}"

    @property
    def receive(self) -> str:
        return f"{self.to_stage}RECV_{self.direction}{self.microbatch}"

    @property
    def wait(self) -> str:
        return f"{self.stage}WAIT_SEND_{self.direction}{self.microbatch}"


class _Cell(NamedTuple):
    """One cell: a slot of computations, or a word about a message or a stage's parameters."""

    text: str
    place: str
    slot: Slot | None = None
    word: str = ""
    stage: int = 0
    message: _Message | None = None


def read_runtime(text: str, name: str = "csv") -> Schedule:
    """Read every rank's computations in the file's order, without bubbles: they are not on a grid yet."""
    fields, texts = read_rows(text)
    rows = [[_read_cell(cell.strip(" "), place) for cell, place in row] for row in texts]
    schedule = assemble([[cell.slot for cell in row if cell.slot is not None] for row in rows], fields, name)
    dependencies = Dependencies(schedule.layout, schedule.num_microbatches)
    # Torch's listing of a single stage's schedule names reductions between computations and no message at all.
    passing = any(cell.message is not None for row in rows for cell in row)
    reducing = any(cell.word == "WAIT_REDUCE_GRAD" for row in rows for cell in row)
    for rank, row in enumerate(rows):
        _Walk(schedule, dependencies, rank, passing, reducing).take(row)
    _check_order(schedule, rows)
    _check_progress(rows)
    return schedule


def _read_cell(text: str, place: str) -> _Cell:
    message, parameters = _MESSAGE.fullmatch(text), _PARAMETERS.fullmatch(text)
    if message is not None:
        stage, word, microbatch = int(message[1]), message[2], int(message[3])
        direction = word[-1]
        maker = stage if word[0] != "R" else stage - 1 if direction == "F" else stage + 1
        return _Cell(text, place, None, word[:-2], stage, _Message(direction, maker, microbatch))
    if parameters is not None:
        return _Cell(text, place, None, parameters[2], int(parameters[1]))
    try:
        if not text:
            raise TextError("an empty cell, but in the runtime's form every cell is an operation")
        slot = slot_of([read_computation(text)])
        if slot.transfers:
            raise TextError(f"{text} is not a computation, and torch's runtime cannot move activations")
        return _Cell(text, place, slot)
    except TextError as error:
        raise TextError(f"{place}: {error}") from None


@dataclass(slots=True)
class _Walk:
    """One rank's row, cell by cell: what has been computed, sent and received so far."""

    schedule: Schedule
    dependencies: Dependencies
    rank: int
    # Whether the file has messages at all, and whether it waits for reductions: torch before 2.15 has no word for that.
    passing: bool
    reducing: bool
    # What is still to be sent: the place of the computation that made it.
    unsent: dict[_Message, _Cell] = field(default_factory=dict)
    sent: dict[_Message, _Cell] = field(default_factory=dict)
    received: dict[_Message, _Cell] = field(default_factory=dict)
    waited: set[_Message] = field(default_factory=set)
    consumed: set[_Message] = field(default_factory=set)
    computed: set[int] = field(default_factory=set)
    words: dict[tuple[str, int], str] = field(default_factory=dict)

    def take(self, row: Sequence[_Cell]) -> None:
        """Raises TextError at the first cell that cannot stand where it stands, and for what is missing at the end."""
        for cell in row:
            if cell.slot is not None:
                self._compute(cell, cell.slot)
            elif cell.message is not None:
                self._pass(cell, cell.message)
            else:
                self._parameters(cell)
        self._check_passed()
        self._check_closed()

    def _check_passed(self) -> None:
        """Raises TextError for a message that never leaves, that nothing needs, or whose sending nobody waits for."""
        for message, maker in self.unsent.items():
            raise TextError(
                f"{maker.place}: the result of {maker.text} is never sent: {message.send} is missing after it"
            )
        for message, cell in self.received.items():
            if message not in self.consumed:
                raise TextError(f"{cell.place}: nothing after it needs what {cell.text} receives")
        for message, cell in self.sent.items() if self.waited else ():
            if message not in self.waited:
                raise TextError(f"{cell.place}: nothing waits for {cell.text}: {message.wait} is missing after it")

    def _check_closed(self) -> None:
        """Raises TextError for parameters that are not let go, or not reduced, at the end."""
        for (word, stage), place in self.words.items():
            if word == "UNSHARD" or (word == "REDUCE_GRAD" and self.reducing):
                raise TextError(f"{place}: {stage}{word} has no {stage}{_CLOSING[word]} after it")

    def _compute(self, cell: _Cell, slot: Slot) -> None:
        for action in slot.computations:
            if (
                action.stage >= self.dependencies.num_stages
                or action.microbatch >= self.dependencies.num_microbatches
                or action.kind in SHARDS
            ):
                there = (
                    f"stages 0 to {self.dependencies.num_stages - 1}, micro-batches 0 to "
                    f"{self.dependencies.num_microbatches - 1}"
                )
                raise TextError(f"{cell.place}: {action} cannot be placed: there are only {there}, and no shards")
            needed = self._carrier(self.dependencies.operand_of(action))
            if needed is not None:
                if needed not in self.received:
                    raise TextError(
                        f"{cell.place}: {action} needs a message from another rank: {needed.receive} is missing "
                        f"before it"
                    )
                self.consumed.add(needed)
            self._check_parameters(cell, action)
        for action in slot.computations:
            self.computed.add(action.stage)
            made = self._carrier(self.dependencies.value_of(action))
            if made is not None:
                self.unsent[made] = cell

    def _carrier(self, value: int) -> _Message | None:
        """Return the message that carries a value, where the file has messages at all."""
        return _message(self.dependencies, value) if self.passing else None

    def _check_parameters(self, cell: _Cell, action: Action) -> None:
        """A stage computes while its parameters are there, and before its gradients are reduced."""
        stage, words = action.stage, self.words
        if ("RESHARD", stage) in words and ("UNSHARD", stage) not in words:
            raise TextError(f"{cell.place}: {action} computes with parameters that {stage}RESHARD has freed")
        if ("WAIT_REDUCE_GRAD", stage) in words or ("REDUCE_GRAD", stage) in words:
            raise TextError(
                f"{cell.place}: {action} comes after {stage}REDUCE_GRAD, so what it adds would not be reduced"
            )

    def _pass(self, cell: _Cell, message: _Message) -> None:
        owner = self.schedule.layout.only_placement
        if not 0 <= cell.stage < len(owner) or owner[cell.stage] != self.rank:
            raise TextError(
                f"{cell.place}: {cell.text} is of stage {cell.stage}, which rank {self.rank} does not compute"
            )
        ends = (message.stage, message.to_stage)
        if not all(0 <= stage < len(owner) for stage in ends) or owner[ends[0]] == owner[ends[1]]:
            raise TextError(f"{cell.place}: {cell.text} passes nothing: there is no other rank on that side")
        taken = {"SEND": self.sent, "RECV": self.received, "WAIT_SEND": self.waited}[cell.word]
        if message in taken:
            raise TextError(f"{cell.place}: {cell.text} appears twice")
        if cell.word == "SEND":
            if message not in self.unsent:
                raise TextError(
                    f"{cell.place}: {cell.text} comes before what it sends is computed, or nothing computes it"
                )
            del self.unsent[message]
            self.sent[message] = cell
        elif cell.word == "RECV":
            self.received[message] = cell
        else:
            if message not in self.sent:
                raise TextError(f"{cell.place}: {cell.text} waits for something that is not sent before it")
            self.waited.add(message)

    def _parameters(self, cell: _Cell) -> None:
        """UNSHARD and RESHARD in turn, REDUCE_GRAD once and then its wait."""
        owner, stage = self.schedule.layout.only_placement, cell.stage
        if not 0 <= stage < len(owner) or owner[stage] != self.rank:
            raise TextError(f"{cell.place}: {cell.text} is of a stage that rank {self.rank} does not compute")
        if any((word, stage) in self.words for word in _AT_MOST_ONCE[cell.word]):
            raise TextError(f"{cell.place}: {cell.text} appears twice")
        opening = _OPENING.get(cell.word)
        if opening is not None and self.words.pop((opening, stage), None) is None:
            raise TextError(f"{cell.place}: {cell.text} has no {stage}{opening} before it")
        if cell.word == "UNSHARD" and stage in self.computed and ("RESHARD", stage) not in self.words:
            raise TextError(f"{cell.place}: {cell.text} comes after a computation of its stage")
        if cell.word == "REDUCE_GRAD" and self.reducing:
            self._check_alone(cell)
        self.words[cell.word, stage] = cell.place

    def _check_alone(self, cell: _Cell) -> None:
        """Only one stage's gradients are reduced at a time."""
        for word, other in self.words:
            if word == "REDUCE_GRAD":
                raise TextError(
                    f"{cell.place}: {cell.text} starts while stage {other} is still being reduced: "
                    f"{other}WAIT_REDUCE_GRAD "
                    f"is missing"
                )


def _message(dependencies: Dependencies, value: int) -> _Message | None:
    """Return the message that carries a value. None: there is no value, or nobody on another rank needs it."""
    if value == NOTHING or not dependencies.route(value).takers or len(dependencies.route(value).parties) == 1:
        return None
    group, microbatch = divmod(value, dependencies.num_microbatches)
    return (
        _Message("F", group, microbatch)
        if group < dependencies.num_stages
        else _Message("B", group - dependencies.num_stages, microbatch)
    )


def _check_order(schedule: Schedule, rows: Sequence[Sequence[_Cell]]) -> None:
    """What one rank sends another is received in the order in which it was sent: the messages carry no names that
    could tell them apart."""
    owner = schedule.layout.only_placement
    sent: dict[Pair, deque[_Message]] = {}
    for _, message in _passed(rows, "SEND"):
        sent.setdefault((owner[message.stage], owner[message.to_stage]), deque()).append(message)
    for cell, message in _passed(rows, "RECV"):
        sender = owner[message.stage]
        queue = sent.get((sender, owner[message.to_stage]))
        if not queue or queue[0] != message:
            found = f"{queue[0].send} comes next" if queue else f"{message.send} is missing"
            raise TextError(f"{cell.place}: {cell.text} is out of order: from rank {sender}, {found}")
        queue.popleft()
    for message in chain.from_iterable(sent.values()):
        raise TextError(
            f"rank {owner[message.to_stage]} never receives what {message.send} sends: {message.receive} is missing"
        )


def _passed(rows: Sequence[Sequence[_Cell]], word: str) -> Iterator[tuple[_Cell, _Message]]:
    """Return the cells of this word, with their messages."""
    return ((cell, cell.message) for row in rows for cell in row if cell.message is not None and cell.word == word)


def _check_progress(rows: Sequence[Sequence[_Cell]]) -> None:
    """Every rank reaches its end where a receive waits for its send, and a wait for the receive."""
    over: set[tuple[str, _Message]] = set()
    positions = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while positions[rank] < len(row):
                cell = row[positions[rank]]
                if cell.message is not None:
                    waits_for = {"RECV": "SEND", "WAIT_SEND": "RECV"}.get(cell.word)
                    if waits_for is not None and (waits_for, cell.message) not in over:
                        break
                    over.add((cell.word, cell.message))
                positions[rank] += 1
                moved = True
    for row, position in zip(rows, positions, strict=True):
        if position < len(row):
            cell = row[position]
            assert cell.message is not None
            other = cell.message.send if cell.word == "RECV" else cell.message.receive
            raise TextError(
                f"{cell.place}: {cell.text} waits for ever: {other} is missing, or waits for this rank in turn"
            )


def write_runtime(schedule: Schedule) -> str:
    """Return the computations with the messages that they make necessary, as torch's runtime takes them from 2.15 on.

    A message leaves right behind its computation and is received before its receiver's next one; a forward's is waited
    for behind the same micro-batch's backward, the others' at the end. A stage's parameters are there from before its
    first computation to the end.
    """
    _check_known(schedule)
    writing = _Writing(schedule)
    for column in zip(*schedule.ranks, strict=True):
        for rank, slot in enumerate(column):
            if slot.compute is not None:
                writing.compute(rank, slot)
    writing.end()
    return "".join(",".join(row) + "\n" for row in writing.rows)


def _check_known(schedule: Schedule) -> None:
    """Raises ValueError for what torch's runtime does not know."""
    moving = next((slot.transfers[0] for row in schedule.ranks for slot in row if slot.transfers), None)
    if moving is not None:
        raise ValueError(
            f"{moving} moves activations, for which torch's runtime has no operation: write csv, or do not balance"
        )
    if schedule.layout != one_pipe(schedule.layout.placements[0]):
        raise ValueError("torch's runtime supports one pipe, and no shards of the vocabulary: write csv")


class _Writing:
    """Every rank's row, as far as it is written."""

    def __init__(self, schedule: Schedule) -> None:
        self.owner, self.dependencies = (
            schedule.layout.only_placement,
            Dependencies(schedule.layout, schedule.num_microbatches),
        )
        self.rows: list[list[str]] = [[] for _ in schedule.ranks]
        # By rank, the messages whose sending is not waited for yet; by stage, how many forwards and full backwards or W
        # are to come.
        self.pending: list[dict[_Message, None]] = [{} for _ in schedule.ranks]
        self.left = [2 * schedule.num_microbatches] * schedule.num_stages
        self.seen: set[int] = set()

    def compute(self, rank: int, slot: Slot) -> None:
        """Write a slot's computations, what they send, and what is over with them."""
        row, pending = self.rows[rank], self.pending[rank]
        for action in slot.computations:
            if action.stage not in self.seen:
                self.seen.add(action.stage)
                row.append(f"{action.stage}UNSHARD")
        row.append(write_computation(slot))
        for action in slot.computations:
            message = _message(self.dependencies, self.dependencies.value_of(action))
            if message is not None:
                row.append(message.send)
                pending[message] = None
                self.rows[self.owner[message.to_stage]].append(message.receive)
        for action in slot.computations:
            row += _closed(action, pending, self.left)

    def end(self) -> None:
        """Write the waits that are left, then let go of the parameters."""
        for row, pending in zip(self.rows, self.pending, strict=True):
            row += [message.wait for message in pending]
        for stage, rank in enumerate(self.owner):
            if stage in self.seen:
                self.rows[rank].append(f"{stage}RESHARD")


def _closed(action: Action, pending: dict[_Message, None], left: list[int]) -> Iterator[str]:
    """What is over with a computation: the send of the forward of the same micro-batch, and after a stage's last one
    its gradients."""
    sent = _Message("F", action.stage, action.microbatch)
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and sent in pending:
        del pending[sent]
        yield sent.wait
    left[action.stage] -= action.kind is not Kind.BACKWARD_INPUT
    if left[action.stage] == 0:
        yield f"{action.stage}REDUCE_GRAD"
        yield f"{action.stage}WAIT_REDUCE_GRAD"
