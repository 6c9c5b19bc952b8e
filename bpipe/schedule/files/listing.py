"""Listings: programs written for people, one line per instruction.

They show where the other end of each message and transfer is, to explain where a run hangs:

    place slot  does
    0:1   1     send 0F0>1F0 output to rank 1, posted at 1:0

`0:1` is instruction 1 of rank 0. `start` and `end` are the slots of what is done before a rank's first computation and
after its last, which belongs to no column of the grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bpipe.schedule.files.text import header
from bpipe.schedule.program import Exchange, Instruction, Message, Numbering, Op, Program, Transfer

# A message's value, or a transfer's sender, receiver and how many passed between them before it.
_Key = int | tuple[int, int, int]

# Longer cells are not aligned: a collective names the computations of all ranks.
_WIDEST = 24


def write_listing(programs: Sequence[Program], exchange: Exchange) -> str:
    """Return everything that each rank does, and where the other end of each message and transfer is."""
    keys = [_passing(program) for program in programs]
    begun = _begun(programs, keys)
    rows = [("place", "slot", "does", "")]
    for program, of_rank in zip(programs, keys, strict=True):
        rows.append(("", "", "", ""))
        for index, (instruction, key) in enumerate(zip(program.instructions, of_rank, strict=True)):
            ends = {} if key is None else begun[key]
            others = {rank: begin for rank, begin in ends.items() if rank != program.rank}
            place, explanation = f"{program.rank}:{index}", _explained(program, instruction, others)
            rows.append((place, _when(program, index), str(instruction), explanation))
    widths = [max(len(row[column]) for row in rows if len(row[column]) <= _WIDEST) for column in range(3)]
    lines = [
        " ".join([*(f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
        for row in rows
    ]
    return "\n".join((header(programs[0].messages.schedule), f"# exchange={exchange.value}", *lines)) + "\n"


def _begun(programs: Sequence[Program], keys: Sequence[Sequence[_Key | None]]) -> dict[_Key, dict[int, int]]:
    """Return the instruction that begins each message and transfer, by rank."""
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
    """Return what passes in each instruction."""
    passing: list[_Key | None] = []
    halves = Numbering()
    for op, operand in zip(program.ops, program.operands, strict=True):
        if isinstance(operand, Transfer):
            passing.append(halves.start(operand) if op == Op.START else halves.of(operand))
        else:
            passing.append(operand if isinstance(operand, int) else None)
    return passing


def _explained(program: Program, instruction: Instruction, others: Mapping[int, int]) -> str:
    """Return what passes, to or from which rank, and where the other ends send or post it."""
    operand = instruction.operand
    if isinstance(operand, Transfer):
        way = "to" if operand.is_outbound else "from"
        if operand.sender == operand.receiver:
            return f"activations {way} its own CPU memory"
        sends, carries = operand.is_outbound, "activations"
    elif isinstance(operand, Message):
        carries, sends = program.messages.dependencies.sort(operand.value), operand.parties[0] == program.rank
        if operand.is_collective:
            begun = _join(f"{rank}:{place}" for rank, place in others.items())
            return f"{carries} among ranks {_join(sorted(operand.parties))}, begun at {begun}"
    else:
        return ""
    ((other, place),) = others.items()
    way, done = ("to", "posted") if sends else ("from", "sent")
    return f"{carries} {way} rank {other}, {done} at {other}:{place}"


def _join(words: Iterable[object]) -> str:
    return ", ".join(map(str, words))
