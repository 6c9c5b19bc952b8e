"""What the guide says of two pipes beside one is what is simulated."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bpipe.models.cluster import parse_cluster
from bpipe.models.layout import Setup
from bpipe.models.memory import predict_memory
from bpipe.models.model import PRESETS
from bpipe.models.on_nodes import rank_nodes, replicas_share_nodes
from bpipe.models.switches import Switches
from bpipe.plan.predict import simulation_of
from scripts.validation import pipes_ablations

PAGE = (Path(__file__).parents[2] / "docs/bidirectional.md").read_text()


def test_the_table_of_ablations_is_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes_ablations, "MICROBATCHES", (8,))
    for line in pipes_ablations.table():
        assert line in PAGE


def test_what_is_taken_away_costs_what_it_should() -> None:
    """No V: messages from the last rank to the first, four nodes on.

    Lazily: every chunk's reduction, where eagerly it is one.
    """
    schedule = pipes_ablations.without_the_v(16)
    placement = schedule.layout.placements[0]
    assert (placement[7], placement[8]) == (7, 0)
    setup = pipes_ablations.setup_of(8)
    assert replicas_share_nodes(setup)
    assert len(set(rank_nodes(setup))) == 4
    unmapped = pipes_ablations.without_mapping(setup)
    assert unmapped.replicas_apart
    assert all(not unmapped.links.crosses(0, rank) for rank in range(8))


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [8, 32])
@pytest.mark.parametrize("vocabulary", [1024, 51200])
def test_the_table_of_when_to_take_it(vocabulary: int, microbatches: int) -> None:
    cells = []
    one_pipe = (("interleaved-1f1b", 2, None), ("zb-v", 2, None), ("grouped-interleaved", 4, 8))
    for schedule, v, group in (*one_pipe, ("bitpipe", 2, None), ("bitpipe", 4, None)):
        setup = Setup(
            model=replace(PRESETS["gpt3-13b"], num_layers=32, vocabulary=vocabulary),
            cluster=parse_cluster("a100-80g:1x8"),
            tensor=1,
            pipeline=8,
            micro_batch=1,
            global_batch=microbatches,
            sequence=PRESETS["gpt3-13b"].sequence,
            layers=(32 // 8 // v,) * 8 * v,
            recompute="none",
            schedule=schedule,
            num_chunks=v,
            group_size=group,
            switches=Switches(overlap_grad_reduce=True),
        )
        fullest = max(rank.peak_bytes for rank in predict_memory(setup)) / 2**30
        cells.append(f"{float(simulation_of(setup).makespan_s):.2f} s, {fullest:.1f}")
    assert re.search(
        rf"^\| {vocabulary} \| {microbatches} \| {re.escape(' | '.join(cells))} \|$", PAGE, re.MULTILINE
    ), cells
