"""Sizes as people type them: another unit is refused, never misread."""

from __future__ import annotations

import pytest

from bpipe.config.flags.values import read_gib


@pytest.mark.parametrize("text", ["70MB", "70 GiB", "GB", "70GBB", "-1GB", "70,,70", "1e2"])
def test_another_unit_of_a_budget_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number of GiB above 0"):
        read_gib(text)
