"""Write programs out for people.

In: every rank's `Program`. Out: text. Knows not how programs are made.

The text has a line an instruction, so that whoever knows where a run hangs finds the other end of what it waits for:

    place slot  does
    0:1   1     send 0F0>1F0 output to rank 1, posted at 1:0

`0:1` is instruction 1 of rank 0. `start` and `end` are the slots of what is done before a rank's first computation and
behind its last: that belongs to no column of the grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bpipe.schedule.files.text import header
from bpipe.schedule.program import Exchange, Instruction, Message, Numbering, Op, Program, Transfer

# What passes: a message by its value, a transfer by its sender, its receiver and how many passed so before it.
_Key = int | tuple[int, int, int]

# A collective names the computations of all ranks: what is longer is not aligned.
_WIDEST = 24


def write_listing(programs: Sequence[Program], exchange: Exchange) -> str:
    """Return all that every rank does, and where the other end of each message and transfer is."""
    keys = [_passing(program) for program in programs]
    begun = _begun(programs, keys)
    rows = [("place", "slot", "does", "")]
    for program, of_rank in zip(programs, keys, strict=True):
        rows.append(("", "", "", ""))
        for index, (instruction, key) in enumerate(zip(program.instructions, of_rank, strict=True)):
            elsewhere = {} if key is None else {rank: at for rank, at in begun[key].items() if rank != program.rank}
            rows.append(
                (
                    f"{program.rank}:{index}",
                    _when(program, index),
                    str(instruction),
                    _explained(program, instruction, elsewhere),
                )
            )
    widths = [max(len(row[column]) for row in rows if len(row[column]) <= _WIDEST) for column in range(3)]
    lines = [
        " ".join([*(f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
        for row in rows
    ]
    return "\n".join((header(programs[0].messages.schedule), f"# exchange={exchange.value}", *lines)) + "\n"


def _begun(programs: Sequence[Program], keys: Sequence[Sequence[_Key | None]]) -> dict[_Key, dict[int, int]]:
    """By what passes and by rank, the instruction that begins it."""
    begun: dict[_Key, dict[int, int]] = {}
    for program, of_rank in zip(programs, keys, strict=True):
        for index, (op, key) in enumerate(zip(program.ops, of_rank, strict=True)):
            if key is not None and op not in (Op.WAIT, Op.FINISH):
                begun.setdefault(key, {})[program.rank] = index
    return begun


def _when(program: Program, index: int) -> str:
    if index < program.starts[1]:
        return "start"
    return "end" if index >= program.starts[-1] else str(program.slot_of(index))


def _passing(program: Program) -> list[_Key | None]:
    """By instruction: what passes in it."""
    passing: list[_Key | None] = []
    halves = Numbering()
    for op, operand in zip(program.ops, program.operands, strict=True):
        if isinstance(operand, Transfer):
            passing.append(halves.start(operand) if op == Op.START else halves.of(operand))
        else:
            passing.append(operand if isinstance(operand, int) else None)
    return passing


def _explained(program: Program, instruction: Instruction, elsewhere: Mapping[int, int]) -> str:
    """What passes, whereto or whence, and where the other ends send or post it."""
    operand = instruction.operand
    if isinstance(operand, Transfer):
        way = "to" if operand.is_outbound else "from"
        if operand.sender == operand.receiver:
            return f"activations {way} its own CPU memory"
        sends, carries = operand.is_outbound, "activations"
    elif isinstance(operand, Message):
        carries, sends = program.messages.dependencies.sort(operand.value), operand.parties[0] == program.rank
        if operand.is_collective:
            return (
                f"{carries} among ranks {_join(sorted(operand.parties))}, begun at "
                f"{_join(f'{rank}:{at}' for rank, at in elsewhere.items())}"
            )
    else:
        return ""
    ((other, at),) = elsewhere.items()
    return (
        f"{carries} to rank {other}, posted at {other}:{at}"
        if sends
        else f"{carries} from rank {other}, sent at {other}:{at}"
    )


def _join(words: Iterable[object]) -> str:
    return ", ".join(map(str, words))
