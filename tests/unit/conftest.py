"""Tests of commands judge launches by our own tables alone: asking Megatron takes seconds each time.

What Megatron says is tested in tests/unit/config/launch/test_validation.py.
"""

import pytest

from bpipe.commands import launch
from bpipe.config.launch.megatron_settings import unknown_flags
from bpipe.config.launch.validation import Judgement


@pytest.fixture(autouse=True)
def _not_asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("asks_megatron") is None:

        def judge(flags: tuple[str, ...], *_: object) -> Judgement:
            return Judgement(
                "judged by the parser and validation of megatron-core 0.19.2", unknown=tuple(unknown_flags(flags))
            )

        monkeypatch.setattr(launch, "judge", judge)
