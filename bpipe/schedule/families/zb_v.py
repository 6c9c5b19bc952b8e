"""ZB-V: two chunks per rank in a V that hold what 1F1B does, as short as can be.

Every rank holds at most p micro-batches of its share, as 1F1B's first does. With F, I and W of equal length the last
rank never waits between its first computation and its last, so no order is shorter: in slots of half a micro-batch an
iteration takes 6 m and the p - 1 until the last rank begins. Earlier ranks begin before it, and wait at most as long in
between. At other costs the order is the shortest that `shift` finds. It starts from V-Half's building block: more room
is all that ZB-V has. Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2024; the block is that of "Pipeline
Parallelism with Controllable Memory", 2024.
"""

from __future__ import annotations

from bpipe.schedule.families.v_shape import family_within, half

FAMILY = family_within("zb-v", half, most=lambda num_ranks: 2 * num_ranks)
