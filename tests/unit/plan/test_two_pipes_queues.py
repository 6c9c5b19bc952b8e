"""Bidirectional pipelines in one hardware queue: a plan drops exactly those that the trainer refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bpipe.build import unchecked
from bpipe.plan.space import Space, has_one_queue, stands_still
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layout import Setup
from bpipe.predict.model import gpt
from bpipe.runtime.config import refuse_standstill
from bpipe.schedule.program import Exchange
from bpipe.transport.config import TransferConfig
from tests.support.predicted import every_setup

FAMILIES = ("chimera", "mixpipe", "bitpipe", "bitpipe-early")
# Pipelines of up to 48 ranks with tensor parallelism, on devices before Blackwell.
SPACE = Space(
    gpt("deep", 48, 1024, 16),
    parse_cluster("h100-80g:12x8"),
    96,
    1024,
    recompute=("none",),
    schedules=FAMILIES,
    max_micro_batch=1,
    max_chunks=2,
    vocabulary_parallel=("none",),
)


def is_refused(setup: Setup) -> bool:
    program = replace(setup, balance=None).program()
    try:
        refuse_standstill(unchecked(program), Exchange.POSTED, TransferConfig(), torch.device("cuda"), [])
    except ValueError:
        return True
    return False


def test_the_plan_has_the_bidirectional_pipelines_that_the_trainer_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensor parallelism the trainer refused all that the plan offered. Now both refuse only those that send far
    ahead of their receivers."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    setups = {
        (setup.schedule, setup.pipeline, setup.num_chunks, setup.num_microbatches): setup
        for setup in every_setup(SPACE)
        if has_one_queue(setup) and setup.balance is None
    }
    assert {schedule for schedule, *_ in setups} == set(FAMILIES)
    verdicts = {key: stands_still(setup) for key, setup in setups.items()}
    assert verdicts == {key: is_refused(setup) for key, setup in setups.items()}
    stuck = {key for key, stands in verdicts.items() if stands}
    assert 0 < len(stuck) < len(verdicts) / 8
    assert min(pipeline for _, pipeline, *_ in stuck) == 12
