"""Write down what a schedule was built from, and read it back.

In: a `ScheduleConfig`. Out: a JSON object, and the same read strictly. Reads no file and builds no schedule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields
from enum import Enum
from fractions import Fraction
from typing import Annotated, Any, get_args, get_type_hints

from bpipe.balance.budget import ActivationBudget
from bpipe.balance.config import BalanceConfig, name_of, named_balance
from bpipe.balance.deadlines import Windows
from bpipe.build import ScheduleConfig
from bpipe.record.activation_budget import ACTIVATION_BUDGET, WINDOWS
from bpipe.record.keys import Key, Rule, each, read_keys, whole
from bpipe.schedule.families.family import UnitCosts
from bpipe.schedule.files.text import read_costs, read_share
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.memory import plain
from bpipe.schedule.program import Exchange
from bpipe.values import LARGEST, a_flag, a_text, an_object


def _one_of(kind: type[Enum]) -> Rule:
    def read(value: object, name: str) -> Enum:
        known = {member.value: member for member in kind}
        if value not in known:
            raise ValueError(f"{name}: {value!r} is none of {', '.join(known)}")
        return known[str(value)]

    return Rule(read, lambda member: member.value)


def _read_costs(value: object, name: str) -> UnitCosts:
    try:
        return UnitCosts(*read_costs(a_text(value, name), 4, 4))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _write_costs(costs: UnitCosts) -> str:
    return ",".join(str(Fraction(getattr(costs, field.name))) for field in fields(UnitCosts))


# How a file has what a field holds.
_RULES: dict[Any, Rule] = {
    str: Rule(a_text),
    bool: Rule(a_flag),
    int: whole(1, LARGEST),
    tuple[int, ...]: each(whole(0, LARGEST)),
    Fraction: Rule(lambda value, name: read_share(a_text(value, name), name), lambda share: str(plain(share))),
    UnitCosts: Rule(_read_costs, _write_costs),
    Exchange: _one_of(Exchange),
    Vocabulary: _one_of(Vocabulary),
    ActivationBudget: ACTIVATION_BUDGET,
    Windows: WINDOWS,
}
# By key, the field that has another name: files always called the number of ranks that of stages.
_FIELDS = {"num_stages": "num_ranks"}
# Written even if they are as usual.
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


def read_program(found: object, name: str = "program") -> ScheduleConfig:
    """Read the configuration of a schedule."""
    held, prefix = an_object(found, name), f"{name}."
    schedule = {_FIELDS.get(key, key): value for key, value in read_keys(_OF_SCHEDULE, held, prefix).items()}
    how = read_keys(_OF_BALANCE, held, prefix)
    named = read_keys([_BALANCE], held, prefix).get(_BALANCE.name, _BALANCE.default)
    balance = named_balance(named, how.get("bounds"), how.get("partners"), hosts=how.get("hosts"))
    return ScheduleConfig(**schedule, balance=None if balance is None else BalanceConfig(**how))


def write_program(config: ScheduleConfig) -> dict[str, Any]:
    """Return the keys of a configuration without those that are as usual."""
    schedule = _written(_OF_SCHEDULE, config)
    always = {name: schedule.pop(name) for name in _ALWAYS}
    how = {} if config.balance is None else _written(_OF_BALANCE, config.balance)
    return {**always, _BALANCE.name: config.balance_name, **how, **schedule}


def _written(keys: Iterable[Key], config: object) -> dict[str, Any]:
    values = [(key, getattr(config, _FIELDS.get(key.name, key.name))) for key in keys]
    return {key.name: key.rule.write(value) for key, value in values if key.name in _ALWAYS or value != key.default}


Program = Annotated[ScheduleConfig, Rule(read_program, write_program)]
