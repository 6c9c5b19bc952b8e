"""Write down what a schedule was built from, and read it back.

In: a `ScheduleConfig`. Out: a JSON object, and the same read strictly. Reads no file and builds no schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any

from bpipe.balance.config import BalanceConfig, named_balance
from bpipe.build import ScheduleConfig
from bpipe.record.activation_budget import ActivationBudgetKeys, WindowsKeys
from bpipe.record.keys import Count, Counts, Flag, Rule, Text, values_of, written
from bpipe.schedule.families.family import ALIKE, UnitCosts
from bpipe.schedule.files.text import read_costs, read_share
from bpipe.schedule.hosts import PAIR
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.memory import plain
from bpipe.schedule.program import Exchange
from bpipe.values import a_text

ExchangeName = Annotated[
    Exchange, Rule(lambda value, name: _read_exchange(value, name), lambda exchange: exchange.value)
]
ShareText = Annotated[
    Fraction, Rule(lambda value, name: read_share(a_text(value, name), name), lambda share: str(plain(share)))
]
CostsText = Annotated[
    UnitCosts, Rule(lambda value, name: _read_costs(a_text(value, name), name), lambda costs: _costs_text(costs))
]


def _read_exchange(value: object, name: str) -> Exchange:
    known = {one.value: one for one in Exchange}
    if value not in known:
        raise ValueError(f"{name}: {value!r} is none of {', '.join(known)}")
    return known[str(value)]


def _costs_text(costs: UnitCosts) -> str:
    return ",".join(
        str(Fraction(one)) for one in (costs.forward, costs.backward_input, costs.backward_weight, costs.hop)
    )


def _read_costs(text: str, name: str) -> UnitCosts:
    """Of F, I, W and a hop."""
    try:
        return UnitCosts(*read_costs(text, 4, 4))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


@dataclass(frozen=True, slots=True)
class _ProgramKeys:
    """A program as it stands in a file, under the names that files always had: `num_stages` is p, the number of
    ranks."""

    schedule: Text
    num_stages: Count
    num_microbatches: Count
    num_chunks: Count = 1
    balance: Text = "none"
    bounds: Counts | None = None
    partners: Counts | None = None
    buffers_stay: Flag | None = None
    activation_budget: ActivationBudgetKeys | None = None
    hosts: Text | None = None
    nodes: Counts | None = None
    parts: Counts | None = None
    windows: WindowsKeys | None = None
    group_size: Count | None = None
    exchange: ExchangeName | None = None
    delay: Count | None = None
    after_input: ShareText | None = None
    costs: CostsText | None = None
    vocabulary: Text | None = None
    input_shards: Flag | None = None
    slices: Count | None = None
    written: Text | None = None


def read_program(found: object, name: str = "program") -> ScheduleConfig:
    """Read the configuration of a schedule."""
    keys = _ProgramKeys(**values_of(_ProgramKeys, found, name, f"{name}."))
    how = named_balance(keys.balance, keys.bounds, keys.partners, bool(keys.buffers_stay), keys.hosts)
    how = how and replace(
        how, activation_budget=keys.activation_budget, nodes=keys.nodes, parts=keys.parts or (), windows=keys.windows
    )
    return ScheduleConfig(
        keys.schedule,
        keys.num_stages,
        keys.num_microbatches,
        num_chunks=keys.num_chunks,
        balance=how,
        group_size=keys.group_size,
        delay=keys.delay or 0,
        after_input=Fraction(1) if keys.after_input is None else keys.after_input,
        exchange=keys.exchange,
        costs=ALIKE if keys.costs is None else keys.costs,
        vocabulary=Vocabulary.WHOLE if keys.vocabulary is None else Vocabulary(keys.vocabulary),
        input_shards=bool(keys.input_shards),
        slices=keys.slices or 1,
        written=keys.written,
    )


def write_program(config: ScheduleConfig) -> dict[str, Any]:
    """Return the keys of a configuration without those that are as usual."""
    how = config.balance or BalanceConfig()
    keys = _ProgramKeys(
        schedule=config.schedule,
        num_stages=config.num_ranks,
        num_microbatches=config.num_microbatches,
        num_chunks=config.num_chunks,
        balance=config.balance_name,
        bounds=how.bounds,
        partners=how.partners,
        buffers_stay=how.buffers_stay or None,
        activation_budget=how.activation_budget,
        hosts=None if how.hosts == PAIR else how.hosts,
        nodes=how.nodes,
        parts=how.parts or None,
        windows=how.windows,
        group_size=config.group_size,
        exchange=config.exchange,
        delay=config.delay or None,
        after_input=None if config.after_input == 1 else config.after_input,
        costs=None if config.costs == ALIKE else config.costs,
        vocabulary=None if config.vocabulary is Vocabulary.WHOLE else config.vocabulary.value,
        input_shards=config.input_shards or None,
        slices=None if config.slices == 1 else config.slices,
        written=config.written,
    )
    return {name: value for name, value in written(keys).items() if value is not None}


Program = Annotated[ScheduleConfig, Rule(read_program, write_program)]
