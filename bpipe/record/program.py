"""The configuration of a schedule as a JSON object, with the budgets and durations that it was balanced for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from fractions import Fraction
from itertools import starmap
from typing import Annotated, Any, get_args, get_type_hints

from bpipe.balance.budget import ActivationBudget
from bpipe.balance.config import BalanceConfig, name_of, named_balance
from bpipe.balance.deadlines import Windows
from bpipe.build import ScheduleConfig
from bpipe.record.keys import Flag, Key, Rule, by_name, each, number, read_keys, values_of, whole, written
from bpipe.schedule.action import Kind
from bpipe.schedule.families.family import UnitCosts
from bpipe.schedule.files.text import read_costs, read_share
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.memory import KeptMemory, memory_of, plain
from bpipe.schedule.program import Exchange
from bpipe.values import LARGEST, a_flag, a_text, an_object

_Sizes = Annotated[tuple[int, ...], each(whole())]
_Seconds = Annotated[tuple[float, ...], each(number())]


@dataclass(frozen=True, slots=True)
class _BudgetKeys:
    """Keys of an `ActivationBudget`, in bytes of one micro-batch or, with `slices`, of one slice."""

    room_bytes: _Sizes  # by rank
    saved_bytes: _Sizes  # by stage, the slices of a stage next to each other; so are the next two
    moved_bytes: _Sizes
    after_input_bytes: _Sizes
    shard_bytes: Annotated[int, whole()] = 0  # of a shard of the vocabulary
    reserved: Flag = False  # whether host buffers have a reserve
    slices: Annotated[int, whole(1)] = 1
    keys_bytes: _Sizes = ()  # keys and values that are kept, by stage
    gradients_bytes: _Sizes = ()  # their gradients


def _read_budget(value: object, name: str) -> ActivationBudget:
    keys = _BudgetKeys(**values_of(_BudgetKeys, value, name, f"{name}."))
    memory = memory_of(keys.saved_bytes, keys.moved_bytes, keys.after_input_bytes, keys.shard_bytes)
    kept = tuple(starmap(KeptMemory, zip(keys.keys_bytes, keys.gradients_bytes, strict=True)))
    return ActivationBudget(keys.room_bytes, replace(memory, reserved=keys.reserved, slices=keys.slices, kept=kept))


def _write_budget(budget: ActivationBudget) -> dict[str, Any]:
    memory = budget.memory
    return written(
        _BudgetKeys(
            room_bytes=budget.room_bytes,
            saved_bytes=tuple(size.saved_bytes for size in memory.stages),
            moved_bytes=tuple(size.moved_bytes for size in memory.stages),
            after_input_bytes=tuple(size.after_input_bytes for size in memory.stages),
            shard_bytes=memory.shard_bytes,
            reserved=memory.reserved,
            slices=memory.slices,
            keys_bytes=tuple(kept.keys_bytes for kept in memory.kept),
            gradients_bytes=tuple(kept.gradients_bytes for kept in memory.kept),
        )
    )


@dataclass(frozen=True, slots=True)
class _WindowsKeys:
    """Keys of `Windows`, in seconds."""

    lasts_s: Annotated[
        Mapping[str, tuple[float, ...]], by_name(each(number()), "{key} of what lasts")
    ]  # by kind, stage
    hop_s: Annotated[float, number()]  # of a message
    inside_s: _Seconds  # of a stage's transfer in a node, then between nodes
    between_s: _Seconds
    nodes: _Sizes = ()
    own_s: _Seconds = ()  # of a stage's transfer to its node's memory
    slices: Annotated[int, whole(1)] = 1


def _read_windows(value: object, name: str) -> Windows:
    keys = values_of(_WindowsKeys, value, name, f"{name}.")
    lasts = tuple((Kind(kind), seconds) for kind, seconds in keys.pop("lasts_s").items())
    return Windows(lasts, **keys)


def _write_windows(windows: Windows) -> dict[str, Any]:
    lasts = {kind.value: tuple(map(float, seconds)) for kind, seconds in windows.lasts_s}
    inside, between, own = (
        tuple(map(float, seconds)) for seconds in (windows.inside_s, windows.between_s, windows.own_s)
    )
    return written(_WindowsKeys(lasts, float(windows.hop_s), inside, between, windows.nodes, own, windows.slices))


def _one_of(kind: type[Enum]) -> Rule:
    def read(value: object, name: str) -> Enum:
        members = {member.value: member for member in kind}
        if value not in members:
            raise ValueError(f"{name}: {value!r} is none of {', '.join(members)}")
        return members[str(value)]

    return Rule(read, lambda member: member.value)


def _read_costs(value: object, name: str) -> UnitCosts:
    try:
        return UnitCosts(*read_costs(a_text(value, name), 4, 4))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _write_costs(costs: UnitCosts) -> str:
    return ",".join(str(Fraction(getattr(costs, field.name))) for field in fields(UnitCosts))


# The rule of a field, by its type.
_RULES: dict[Any, Rule] = {
    str: Rule(a_text),
    bool: Rule(a_flag),
    int: whole(1, LARGEST),
    tuple[int, ...]: each(whole(0, LARGEST)),
    Fraction: Rule(lambda value, name: read_share(a_text(value, name), name), lambda share: str(plain(share))),
    UnitCosts: Rule(_read_costs, _write_costs),
    Exchange: _one_of(Exchange),
    Vocabulary: _one_of(Vocabulary),
    ActivationBudget: Rule(_read_budget, _write_budget),
    Windows: Rule(_read_windows, _write_windows),
}
# Keys whose field has another name: in files the number of ranks was always called that of stages.
_FIELDS = {"num_stages": "num_ranks"}
# Written even if they are the default.
_ALWAYS = ("schedule", "num_stages", "num_microbatches", "num_chunks")
_BALANCE = Key("balance", Rule(a_text), False, name_of(None))


def _keys_of(kind: type) -> list[Key]:
    """Return a key for each field that is no configuration itself."""
    names, hints = {field: key for key, field in _FIELDS.items()}, get_type_hints(kind)
    keys = []
    for field in fields(kind):
        hint = hints[field.name]
        rule = next((_RULES[part] for part in (hint, *get_args(hint)) if part in _RULES), None)
        if rule is not None:
            keys.append(Key(names.get(field.name, field.name), rule, field.default is MISSING, field.default))
    return keys


_OF_SCHEDULE, _OF_BALANCE = _keys_of(ScheduleConfig), _keys_of(BalanceConfig)


def read_program(value: object, name: str = "program") -> ScheduleConfig:
    """Read the configuration of a schedule."""
    entries, prefix = an_object(value, name), f"{name}."
    schedule = {_FIELDS.get(key, key): field for key, field in read_keys(_OF_SCHEDULE, entries, prefix).items()}
    balancing = read_keys(_OF_BALANCE, entries, prefix)
    balance_name = read_keys([_BALANCE], entries, prefix).get(_BALANCE.name, _BALANCE.default)
    balance = named_balance(
        balance_name, balancing.get("bounds"), balancing.get("partners"), hosts=balancing.get("hosts")
    )
    return ScheduleConfig(**schedule, balance=None if balance is None else BalanceConfig(**balancing))


def write_program(config: ScheduleConfig) -> dict[str, Any]:
    """Return the keys of a configuration without defaults."""
    schedule = _written(_OF_SCHEDULE, config)
    always = {name: schedule.pop(name) for name in _ALWAYS}
    balancing = {} if config.balance is None else _written(_OF_BALANCE, config.balance)
    return {**always, _BALANCE.name: config.balance_name, **balancing, **schedule}


def _written(keys: Iterable[Key], config: object) -> dict[str, Any]:
    values = [(key, getattr(config, _FIELDS.get(key.name, key.name))) for key in keys]
    return {key.name: key.rule.write(value) for key, value in values if key.name in _ALWAYS or value != key.default}


Program = Annotated[ScheduleConfig, Rule(read_program, write_program)]
