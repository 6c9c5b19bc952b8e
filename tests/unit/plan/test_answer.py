"""One answer: the launch where nothing is clearly faster, then stock, then ours; never what cannot run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bpipe.plan.answer import Choice, ChoiceKind, answer, answer_document, answer_lines
from bpipe.plan.explain import CLEARLY, calibration_lines
from bpipe.plan.predict import SetupPrediction, predict
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.error_bars import AMPERE, BLACKWELL, CALIBRATED, EXPERTS, HOPPER, error_bars, is_never_calibrated
from bpipe.predict.layer_variants import Experts
from bpipe.predict.layout import Setup
from bpipe.predict.model import PRESETS

SETUP = Setup(PRESETS["gpt3-13b"], parse_cluster("a100-80g:1x8"), 1, 8, 1, 64, 2048, (5,) * 8, "none")


@pytest.fixture(scope="module")
def prediction() -> SetupPrediction:
    return predict(SETUP)


def choice(
    kind: ChoiceKind, prediction: SetupPrediction, seconds: float, fits: bool = True, refused: bool = False
) -> Choice:
    memory = tuple(replace(rank, limit_bytes=2 * rank.peak_bytes if fits else 1) for rank in prediction.memory)
    timed = replace(prediction, timing=replace(prediction.timing, iteration_s=seconds), memory=memory)
    return Choice(kind, timed, "" if kind is ChoiceKind.LAUNCH else "the launch with --flag", ("a reason",) * refused)


LEVEL, FASTER = 1 / (CLEARLY - 0.01), 1 / (CLEARLY + 0.01)


@pytest.mark.parametrize(
    ("launch", "stock", "ours", "taken"),
    [
        (1.0, LEVEL, LEVEL, ChoiceKind.LAUNCH),
        (1.0, FASTER, LEVEL, ChoiceKind.STOCK),
        (1.0, FASTER, FASTER * LEVEL, ChoiceKind.STOCK),
        (1.0, 1.1, FASTER, ChoiceKind.OURS),
        (1.0, FASTER, FASTER**2, ChoiceKind.OURS),
    ],
)
def test_the_first_is_taken_that_nothing_is_clearly_faster_than(
    prediction: SetupPrediction, launch: float, stock: float, ours: float, taken: ChoiceKind
) -> None:
    seconds = {ChoiceKind.OURS: ours, ChoiceKind.LAUNCH: launch, ChoiceKind.STOCK: stock}
    found = answer([choice(kind, prediction, each) for kind, each in seconds.items()])
    assert [one.kind for one in found.choices] == list(ChoiceKind)
    assert found.taken is not None
    assert found.taken.kind is taken
    (line,) = [line for line in answer_lines(found) if line.startswith(("Keep", "Take"))]
    words = {ChoiceKind.LAUNCH: "Keep the launch", ChoiceKind.STOCK: "Take stock", ChoiceKind.OURS: "Take bpipe"}
    assert line.startswith(words[taken])
    assert ("predictions cannot tell" in line) is any(each < seconds[taken] for each in seconds.values())
    assert answer_document(found)["take"] == taken.value


def test_what_does_not_fit_or_is_refused_is_never_taken(prediction: SetupPrediction) -> None:
    launch = choice(ChoiceKind.LAUNCH, prediction, 1.0, fits=False)
    stock, ours = choice(ChoiceKind.STOCK, prediction, 2.0), choice(ChoiceKind.OURS, prediction, 1.0, refused=True)
    found = answer([launch, stock, ours])
    assert found.taken is stock
    lines = answer_lines(found)
    assert "does not fit" in lines[0]
    assert any("the trainer refuses this: a reason" in line for line in lines)
    assert answer([launch]).taken is None
    assert "None of these can run." in answer_lines(answer([launch]))


def test_it_has_at_most_twelve_lines(prediction: SetupPrediction) -> None:
    found = answer([choice(kind, prediction, 1.0, refused=kind is ChoiceKind.LAUNCH) for kind in ChoiceKind])
    assert len(answer_lines(found)) <= 12


def test_error_bars_follow_the_kind_of_a_setup() -> None:
    on = {
        name: replace(SETUP, cluster=parse_cluster(f"{name}:1x8")) for name in ("h100-80g", "b200-180g", "mi300x-192g")
    }
    experts = replace(SETUP, model=replace(PRESETS["llama3-8b"], num_layers=40, experts=Experts(8, 2, 14336)))
    calibrated = replace(SETUP, cluster=replace(SETUP.cluster, factor=1.1))
    assert [error_bars(one) for one in (SETUP, on["h100-80g"], on["b200-180g"], experts, calibrated)] == [
        AMPERE,
        HOPPER,
        BLACKWELL,
        EXPERTS,
        CALIBRATED,
    ]
    assert error_bars(on["mi300x-192g"]) is None
    choices = [Choice(ChoiceKind.STOCK, predict(on["mi300x-192g"]))]
    assert "no measured run on" in answer_lines(answer(choices))[-1]
    never = {name: is_never_calibrated(one.cluster) for name, one in on.items()}
    assert never == {"h100-80g": False, "b200-180g": True, "mi300x-192g": True}
    for name, one in on.items():
        said = answer_lines(answer([Choice(ChoiceKind.STOCK, predict(one))]))[-1]
        assert ("Never calibrated" in said) is never[name]
        assert any("never calibrated" in line for line in calibration_lines(one.cluster)) is never[name]
    assert not is_never_calibrated(replace(on["b200-180g"].cluster, factor=1.1))
    assert answer_document(answer(choices))["choices"]["stock"]["range_s"] is None
