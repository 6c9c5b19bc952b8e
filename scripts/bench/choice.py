"""Measure what it costs to choose an order of grouped interleaving for a bound. In: nothing. Out: a table on stdout.

Processor time of `program.build`: the choice, balancing and both checks. The second figure is that of the choice alone.
"""

from __future__ import annotations

import sys
import time
from fractions import Fraction

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.generate.families import FAMILIES
from bpipe.generate.family import UnitCosts

SIZES = ((4, 16, 4, 12), (8, 32, 4, 20), (8, 32, 8, 40), (16, 64, 4, 40))
COSTS = {
    "1:1:1": UnitCosts(),
    "1:1.2:.8": UnitCosts(1, Fraction(6, 5), Fraction(4, 5)),
    "hop .05": UnitCosts(hop=Fraction(1, 20)),
}
NAME = "grouped-interleaved"


def main() -> int:
    for p, m, v, bound in SIZES:
        for name, costs in COSTS.items():
            config = ScheduleConfig(NAME, p, m, num_chunks=v, balance=BalanceConfig((bound,)), costs=costs)
            start = time.process_time()
            next(iter(FAMILIES[NAME].generate_within(p, m, v, config.family_options)))
            chosen = time.process_time()
            build(config)
            built = time.process_time()
            print(
                f"p={p:<3} m={m:<3} v={v} bound {bound:<3} {name:<9} build {built - chosen:5.2f} s, choice "
                f"{chosen - start:5.2f} s"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
