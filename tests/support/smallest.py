"""The smallest budget that a plan keeps."""

from __future__ import annotations

from dataclasses import replace

from bpipe.plan import budget
from bpipe.plan.budget import Devices


def smallest_bytes(devices: Devices) -> int:
    """Return the smallest budget that a plan keeps, the same for all devices."""
    alone = max(devices.need_bytes(devices.schedule))
    even = replace(devices, budget_bytes=(alone,) * devices.schedule.num_ranks)
    choices = budget._choices(even, even.activation_budget())
    return alone + min(budget._more(even, partners)[0] for partners in choices)
