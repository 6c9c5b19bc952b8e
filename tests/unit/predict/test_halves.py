"""Split backwards: predicted and measured seconds of the halves, and what a rank holds between them."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from bpipe.balance.pairs import balance
from bpipe.build import ScheduleConfig, build
from bpipe.predict.activations import held_by
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.costs import predict_costs
from bpipe.predict.layers.layer import every_seconds, layer_seconds
from bpipe.predict.layout import Setup
from bpipe.predict.model import PRESETS
from bpipe.predict.profile import read_profile
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families import one_f_one_b
from bpipe.schedule.families.unit_grid import place
from bpipe.schedule.layout import one_pipe
from bpipe.schedule.memory import live_bytes, memory_of
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import StageCost

LLAMA = Setup(PRESETS["llama3-70b"], parse_cluster("h100-80g:8x8"), 8, 8, 1, 32, 8192, (10,) * 8, recompute="none")
ALONE = replace(LLAMA, tensor=1, cluster=parse_cluster("h100-80g:8x1"))


def test_the_halves_are_the_whole() -> None:
    forward, backward = layer_seconds(ALONE)
    first, second = every_seconds(ALONE)[2:]
    assert first + second == pytest.approx(backward)
    # W has only a forward's products; I has them and the attention's backward, two and a half times its forward.
    assert second < forward < first


def test_measured_seconds(tmp_path: Path) -> None:
    """Halves keep their predicted shares of a measured backward; measured halves are scaled to a stage's layers."""
    predicted = predict_costs(LLAMA)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"stages": [{"backward_s": 0.02, "layers": 1}]}))
    stage = read_profile(str(path)).apply(LLAMA, predicted).stages[3]
    before = predicted.stages[3]
    assert before.weight_s
    assert before.input_s
    assert stage.backward_s == pytest.approx(0.2)
    assert stage.weight_s == pytest.approx(before.weight_s * 0.2 / float(before.backward_s))
    assert stage.input_s == pytest.approx(before.input_s * 0.2 / float(before.backward_s))
    path.write_text(json.dumps({"stages": [{"input_s": 0.012, "weight_s": 0.009, "layers": 1}]}))
    stage = read_profile(str(path)).apply(LLAMA, predicted).stages[3]
    assert (stage.input_s, stage.weight_s, stage.backward_s) == (
        pytest.approx(0.12),
        pytest.approx(0.09),
        before.backward_s,
    )
    at_once = replace(LLAMA, keep_weights_halves="none")
    assert read_profile(str(path)).apply(at_once, predict_costs(at_once)).stages[3].weight_s == 0
    path.write_text(json.dumps({"stages": [{"weight_s": 0.009}]}))
    with pytest.raises(ValueError, match="stage 0 has only one half of a backward: give both input_s and weight_s"):
        read_profile(str(path))


def test_halves_of_their_own_need_not_add_up() -> None:
    assert StageCost(3, 5, weight_s=2, input_s=4, output_backward_s=1).whole_input_s == 5
    assert StageCost(3, 5, weight_s=2, output_backward_s=1).whole_input_s == 4
    with pytest.raises(ValueError, match="weight_s 6 is a part of backward_s 5"):
        StageCost(3, 5, weight_s=6)


def split_1f1b(p: int, m: int) -> Schedule:
    """1F1B whose weight gradients run one backward late."""
    orders = []
    for order in one_f_one_b.in_turn(p, m, 1):
        row: list[Action] = []
        late: list[Action] = []
        for action in order:
            if action.kind is Kind.BACKWARD:
                row += [Action(action.stage, Kind.BACKWARD_INPUT, action.microbatch), *late]
                late = [Action(action.stage, Kind.BACKWARD_WEIGHT, action.microbatch)]
            else:
                row.append(action)
        orders.append(row + late)
    return place("split", m, one_pipe(range(p)), orders)


BALANCED = balance(split_1f1b(6, 12))


@pytest.mark.parametrize("share", [0, Fraction(1, 2), 1, Fraction(9, 5)])
@pytest.mark.parametrize(
    "schedule",
    [
        build(ScheduleConfig("v-half", 4, 9, num_chunks=2)),
        build(ScheduleConfig("v-min", 6, 12, num_chunks=2)),
        split_1f1b(6, 12),
        BALANCED,
    ],
    ids=["half", "min", "1f1b", "1f1b balanced"],
)
def test_what_is_held_is_what_the_memory_rule_says(schedule: Schedule, share: Fraction) -> None:
    """Stages of different sizes, which hold as much, less or more between the halves."""
    saved = tuple(100 + 10 * stage for stage in range(schedule.num_stages))
    between = tuple(int(share * size) for size in saved)
    for rank, orders in enumerate(held_by(schedule)):
        ours = [stage in schedule.layout.stages_of(rank) for stage in range(schedule.num_stages)]
        own = [[size * of for size, of in zip(sizes, ours, strict=True)] for sizes in (saved, between)]
        assert orders.num_bytes(saved, between)[0] == max(live_bytes(schedule, rank, memory_of(own[0], None, own[1])))
