"""V-Half: two chunks per rank in a V that hold half of what 1F1B does.

No rank holds more than (p + 2) // 2 micro-batches of its share, and all hold alike: balancing moves nothing. With F, I
and W of equal length every rank computes without a pause once the pipeline is full: in slots of half a micro-batch an
iteration takes 6 m and, from p = 3 on, 3 p - 7 more for even p, 3 p - 4 for odd p. At other costs the order is the
shortest that `shift` finds. Source of the building block: Qi et al., "Pipeline Parallelism with Controllable Memory",
2024.
"""

from __future__ import annotations

from bpipe.schedule.families.v_shape import family_within, half

FAMILY = family_within("v-half", half, most=lambda num_ranks: 2 * ((num_ranks + 2) // 2))
