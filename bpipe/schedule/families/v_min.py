"""V-Min: two chunks per rank in a V that hold a third of what 1F1B does.

No rank holds more than (p + 4) // 3 micro-batches of its share, the least with which a V of F, I and W of equal length
runs at its full rate. Filling and emptying cost most here: in slots of half a micro-batch an iteration takes 6 m and
4 p - 5, 4 p - 9 or 4 p - 7 more, from p = 4 on, for p % 3 of 1, 2 and 0. There is no room for durations that differ: at
other costs, and over slow hops, ranks wait in every interval. The order is the shortest that `shift` finds. Source of
the building block: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024.
"""

from __future__ import annotations

from bpipe.schedule.families.v_shape import family_within, third

FAMILY = family_within(
    "v-min", third, most=lambda num_ranks: 2 * ((num_ranks + 4) // 3), least=lambda num_ranks: 2 * num_ranks // 3
)
