"""How torch's own runtime passes messages: lowered as torch lowers it, and judged with one queue for each two ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.deadlock import WaitLevel, blocked_ranks
from bpipe.schedule.dependencies import NOTHING
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.lowering.lower import lower, lower_received
from bpipe.schedule.memory import moves_anything, peak_counts
from bpipe.schedule.program import Exchange, MessageTable, Op, Program
from bpipe.schedule.schedule import Schedule
from bpipe.torch import checks
from bpipe.torch.checks import received_in
from bpipe.torch.orders import schedule_of_class, torch_orders
from bpipe.torch.upstream import Computation
from tests.support.levels import STOOD
from tests.unit.torch.test_orders import stages_on

ONE_PIPE = [name for name, family in FAMILIES.items() if family.num_pipes == 1]


def plain_schedules() -> Iterator[Schedule]:
    for name, p, rounds in itertools.product(ONE_PIPE, (2, 3, 4, 6), (1, 2, 3)):
        family = FAMILIES[name]
        for chunks in {max(1, family.min_chunks), min(3, family.max_chunks or 3)}:
            yield build(ScheduleConfig(name, p, p * rounds, num_chunks=chunks))


def torchs(schedule: Schedule, defer: bool = False) -> dict[int, list[Any]]:
    """Torch's own lists, messages among the computations."""
    order = {rank: list(row) for rank, row in torch_orders(schedule).items()}
    owner = schedule.layout.placements[0].__getitem__
    listed = schedules._add_send_recv(order, owner, schedule.num_stages)
    return schedules._defer_recv_ops(listed, owner) if defer else listed


def messages_of(program: Program) -> list[str]:
    """A program without waits and transfers, as torch writes it."""
    words = []
    names = {Op.SEND: ("SEND_F", "SEND_B"), Op.POST: ("RECV_F", "RECV_B")}
    for op, operand in program.instructions:
        if op is Op.RUN:
            words.append(str(operand))
        elif op in names:
            made, needed = operand.made_by[0], operand.needed_by[0]  # type: ignore[union-attr]
            word = names[op][made.kind is not Kind.FORWARD]
            words.append(f"{(made if op is Op.SEND else needed).stage}{word}{made.microbatch}")
    return words


@pytest.mark.timeout(120)
def test_receives_stand_where_torch_lists_them() -> None:
    count = 0
    for schedule in plain_schedules():
        theirs = torchs(schedule)
        for program in lower(schedule, Exchange.TORCH):
            flat = [str(one) for action in theirs[program.rank] for one in action.sub_actions or (action,)]
            assert messages_of(program) == flat, schedule.name
            count += 1
    assert count > 400


def test_what_overlaps_is_lowered_as_torch_does() -> None:
    schedule = schedule_of_class(schedules.ScheduleDualPipeV, stages_on(0, 2, True), 8)
    theirs = torchs(schedule)
    for program in lower(schedule, Exchange.TORCH):
        flat = [str(one) for action in theirs[program.rank] for one in action.sub_actions or (action,)]
        assert messages_of(program) == flat
    assert not blocked_ranks(schedule, exchange=Exchange.TORCH)


def balanced_schedules(seed: int, count: int) -> Iterator[Schedule]:
    """Families, sizes, bounds, partners and pools at random, of which something moves."""
    rnd = random.Random(seed)
    made = 0
    while made < count:
        name, p = rnd.choice(ONE_PIPE), rnd.choice((2, 3, 4, 5, 6, 8))
        family = FAMILIES[name]
        chunks = rnd.randint(family.min_chunks, family.max_chunks or 3)
        m = p * rnd.choice((1, 2, 3))
        plain = build(ScheduleConfig(name, p, m, num_chunks=chunks))
        peaks = [float(peak) for peak in peak_counts(plain)]
        bound = (rnd.randint(max(2, int(sum(peaks) / p)), max(3, int(max(peaks)))),)
        how = rnd.choice([BalanceConfig(), BalanceConfig(bounds=bound), BalanceConfig(bounds=bound, hosts="pool")])
        try:
            schedule = build(ScheduleConfig(name, p, m, num_chunks=chunks, balance=how, exchange=Exchange.TORCH))
        except ValueError:
            continue
        if moves_anything(schedule):
            made += 1
            yield schedule


LEVELS = [(waits, births) for waits in STOOD for births in (False, True)]


@pytest.mark.timeout(300)
def test_no_balanced_schedule_stands_still() -> None:
    """In every level of waiting, communicators made on the way or there before."""
    for schedule in balanced_schedules(1, 30):
        for waits, births in LEVELS:
            stuck = blocked_ranks(schedule, waits, Exchange.TORCH, births)
            assert not stuck, (schedule.name, schedule.num_ranks, schedule.num_microbatches, waits, births, stuck)


def as_listed(schedule: Schedule, order: dict[int, list[Any]]) -> tuple[Program, ...]:
    """Torch's lists word by word, wherever they have their messages; nothing moves."""
    messages, programs = MessageTable(schedule), []
    dependencies = messages.dependencies
    kinds = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT}
    for rank, row in order.items():
        ops, operands, sent, starts = [], [], [], []
        for action in row:
            word = action.computation_type.value
            if action.is_compute_op:
                ours = Action(action.stage_index, kinds[word], action.microbatch_index)
                value = dependencies.operand_of(ours)
                starts.append(len(ops))
                if value != NOTHING and len(dependencies.route(value).parties) == 2:
                    ops.append(Op.WAIT)
                    operands.append(value)
                ops.append(Op.RUN)
                operands.append(ours)
            else:
                ours = Action(action.stage_index, kinds[word[-1]], action.microbatch_index)
                is_send = word.startswith("SEND")
                ops.append(Op.SEND if is_send else Op.POST)
                operands.append(dependencies.value_of(ours) if is_send else dependencies.operand_of(ours))
                sent += operands[-1:] if is_send else []
        ops += [Op.WAIT] * len(sent)
        operands += sent
        programs.append(Program(rank, bytes(ops), operands, starts, range(len(starts)), messages))
    return tuple(programs)


defers = pytest.mark.skipif(not hasattr(schedules, "_defer_recv_ops"), reason="torch before 2.13 defers no receives")


@defers
def test_receives_that_are_deferred_stand_still() -> None:
    """Torch's `defer_pp_recv` alone, with nothing that moves: what refuses it."""
    stuck = 0
    some = [
        schedule for schedule in plain_schedules() if schedule.num_ranks > 2 and not FAMILIES[schedule.name].overlaps
    ]
    for schedule in some:
        programs = as_listed(schedule, torchs(schedule))
        assert not blocked_ranks(schedule, exchange=Exchange.TORCH, programs=programs)
        programs = as_listed(schedule, torchs(schedule, defer=True))
        stuck += bool(blocked_ranks(schedule, exchange=Exchange.TORCH, programs=programs))
        # Without a queue for each two ranks nothing would be seen of it.
        assert not blocked_ranks(schedule, exchange=Exchange.POSTED, programs=programs)
    assert stuck > len(some) // 2, f"{stuck} of {len(some)}"


def test_waits_for_sends_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.15 lists them between a backward and its SEND_B, and every schedule was refused."""
    schedule = build(ScheduleConfig("interleaved-1f1b", 3, 3, num_chunks=2))
    listed = torchs(schedule)
    # Before 2.15 there is no such word.
    waiting = {
        rank: [
            one
            for action in row
            for one in (action, action._replace(computation_type=Computation.UNSHARD))
            if one is action or action.computation_type is Computation.FULL_BACKWARD
        ]
        for rank, row in listed.items()
    }
    with pytest.raises(ValueError, match="after the action"):
        received_in(waiting, schedule)
    monkeypatch.setattr(checks, "SEND_WAITS", (Computation.UNSHARD,))
    assert received_in(waiting, schedule) == received_in(listed, schedule)


@defers
def test_lists_that_send_elsewhere_are_refused() -> None:
    """The engine's `sent` comes behind the last SEND of a computation, and a receive before it would be behind it."""
    schedule = build(ScheduleConfig("interleaved-1f1b", 3, 3, num_chunks=2))
    received_in(torchs(schedule), schedule)
    with pytest.raises(ValueError, match=r"torch 2\.\S+ lists \dSEND_[FB]\d on rank \d after \dRECV_[FB]\d, not after"):
        received_in(torchs(schedule, defer=True), schedule)


def test_one_queue_of_two_ranks_is_judged() -> None:
    """Each of two ranks receives before it sends: in one queue both wait for ever, and with a queue a direction not."""
    schedule = build(ScheduleConfig("interleaved-1f1b", 2, 4, num_chunks=2))
    programs = lower_received(schedule)
    assert not blocked_ranks(schedule, exchange=Exchange.TORCH, programs=programs)
    rows = [list(row) for row in received_of(programs)]
    # On rank 0 what comes first is received one cell earlier than torch does: before it has sent what that needs.
    first = next(index for index, values in enumerate(rows[0]) if values)
    rows[0][0].append(rows[0][first].pop(0))
    moved = lower_received(schedule, rows)
    assert {one.rank for one in blocked_ranks(schedule, exchange=Exchange.TORCH, programs=moved)} == {0, 1}
    assert not blocked_ranks(schedule, exchange=Exchange.POSTED, programs=moved)


def received_of(programs: tuple[Program, ...]) -> list[list[list[int]]]:
    found = []
    for program in programs:
        rows: list[list[int]] = [[]]
        for op, operand in zip(program.ops, program.operands, strict=True):
            if op == Op.RUN:
                rows.append([])
            elif op == Op.POST:
                assert isinstance(operand, int)
                rows[-1].append(operand)
        found.append(rows)
    return found


@pytest.mark.parametrize(("late", "least"), [(2, 2), (8, 8)])
def test_a_host_that_comes_late_is_missed(late: int, least: int) -> None:
    """The teeth: what is received for others so many computations late leaves somebody waiting."""
    stuck = 0
    for schedule in itertools.islice(balanced_schedules(7, 16), 16):
        stuck += bool(blocked_ranks(_hosting_late(schedule, late), WaitLevel.IN_EVERY_OPERATION, Exchange.TORCH))
    assert stuck >= least, stuck


def _hosting_late(schedule: Schedule, late: int) -> Schedule:
    """Every HOST, and the RETURN behind it, so many slots later."""
    ranks = []
    for row in schedule.ranks:
        moved: list[list[Action]] = [[] for _ in row]
        for number, slot in enumerate(row):
            for action in slot.transfers:
                hosts = action.kind in (Kind.HOST, Kind.RETURN)
                moved[min(len(row) - 1, number + late * hosts)].append(action)
        ranks.append(tuple(replace(slot, transfers=tuple(actions)) for slot, actions in zip(row, moved, strict=True)))
    return replace(schedule, ranks=tuple(ranks))
