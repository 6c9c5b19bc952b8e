"""Where pairs of ranks lie, as the log says it."""

from __future__ import annotations

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.torch.pipelines import pairs_placed

PAIRS = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))
OWN = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig(hosts="host")))


def test_pairs_on_one_machine_are_counted() -> None:
    pipelines = [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert pairs_placed(PAIRS, pipelines, ["a"] * 4 + ["b"] * 4) == "all 2 pairs of ranks are on one machine each"


def test_pairs_on_two_machines_are_named_with_a_way_out() -> None:
    """A mesh whose pipeline comes first spans machines: ranks 0, 2, 4, 6 are one pipeline."""
    said = pairs_placed(PAIRS, [(0, 2, 4, 6), (1, 3, 5, 7)], ["a"] * 4 + ["b"] * 4)
    assert said.startswith("ranks 0 and 6 move activations between the machines a and b (and 1 more): put")
    assert 'hosts="host"' in said


def test_what_stays_on_its_node_has_no_pairs() -> None:
    assert (
        pairs_placed(OWN, [(0, 1, 2, 3)], ["a", "a", "b", "b"])
        == "evicted activations stay in the CPU memory of a rank's own node"
    )
