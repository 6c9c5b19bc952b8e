"""One answer: the launch if nothing is clearly faster, then stock, then ours; never what cannot run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bpipe.plan.candidates import CLEARLY
from bpipe.plan.explain import LAUNCH, OURS, STOCK, accuracy, advice, answer, answer_document, calibration_lines
from bpipe.plan.predict import Candidate, predict
from bpipe.predict.cluster import AMPERE, BLACKWELL, CALIBRATED, EXPERTS, HOPPER, is_never_calibrated, parse_cluster
from bpipe.predict.layer_variants import Experts
from bpipe.predict.layout import Setup
from bpipe.predict.model import PRESETS

SETUP = Setup(PRESETS["gpt3-13b"], parse_cluster("a100-80g:1x8"), 1, 8, 1, 64, 2048, (5,) * 8, "none")


@pytest.fixture(scope="module")
def prediction() -> Candidate:
    return predict(SETUP)


def choice(name: str, prediction: Candidate, seconds: float, fits: bool = True, refused: bool = False) -> Candidate:
    memory = tuple(replace(rank, limit_bytes=2 * rank.peak_bytes if fits else 1) for rank in prediction.memory)
    timed = replace(prediction, timing=replace(prediction.timing, iteration_s=seconds), memory=memory)
    return replace(timed, name=name, refused=("a reason",) * refused)


LEVEL, FASTER = 1 / (CLEARLY - 0.01), 1 / (CLEARLY + 0.01)


@pytest.mark.parametrize(
    ("launch", "stock", "ours", "taken", "words"),
    [
        (1.0, LEVEL, LEVEL, LAUNCH, "Keep the launch"),
        (1.0, FASTER, LEVEL, STOCK, "Stay with stock Megatron"),
        (1.0, FASTER, FASTER * LEVEL, STOCK, "Stay with stock Megatron"),
        (1.0, 1.1, FASTER, OURS, "Use bpipe"),
        (1.0, FASTER, FASTER**2, OURS, "Use bpipe"),
    ],
)
def test_the_first_is_taken_that_nothing_is_clearly_faster_than(
    prediction: Candidate, launch: float, stock: float, ours: float, taken: str, words: str
) -> None:
    seconds = {OURS: ours, LAUNCH: launch, STOCK: stock}
    result = answer(choice(name, prediction, time) for name, time in seconds.items())
    assert [row.name for row in result.choices] == [LAUNCH, STOCK, OURS]
    assert answer_document(result)["take"] == taken
    assert advice(result).startswith(words)
    assert ("predictions cannot tell" in advice(result)) is any(time < seconds[taken] for time in seconds.values())


def test_what_does_not_fit_or_is_refused_is_never_taken(prediction: Candidate) -> None:
    launch = choice(LAUNCH, prediction, 1.0, fits=False)
    stock, ours = choice(STOCK, prediction, 2.0), choice(OURS, prediction, 1.0, refused=True)
    assert answer([launch, stock, ours]).taken is stock
    assert (launch.state, ours.state) == ("does not fit", "refused by the trainer")
    assert answer([launch]).taken is None
    assert advice(answer([launch])) == "None of these can run."


def test_error_bars_follow_the_kind_of_a_setup() -> None:
    on = {
        name: replace(SETUP, cluster=parse_cluster(f"{name}:1x8")) for name in ("h100-80g", "b200-180g", "mi300x-192g")
    }
    experts = replace(SETUP, model=replace(PRESETS["llama3-8b"], num_layers=40, experts=Experts(8, 2, 14336)))
    calibrated = replace(SETUP, cluster=replace(SETUP.cluster, factor=1.1))
    assert [setup.error_bars for setup in (SETUP, on["h100-80g"], on["b200-180g"], experts, calibrated)] == [
        AMPERE,
        HOPPER,
        BLACKWELL,
        EXPERTS,
        CALIBRATED,
    ]
    assert on["mi300x-192g"].error_bars is None
    choices = [replace(predict(on["mi300x-192g"]), name=STOCK)]
    assert "no measured run on" in accuracy(choices[0])
    never = {name: is_never_calibrated(setup.cluster) for name, setup in on.items()}
    assert never == {"h100-80g": False, "b200-180g": False, "mi300x-192g": True}
    for name, setup in on.items():
        assert ("Never calibrated" in accuracy(predict(setup))) is never[name]
        assert any("never calibrated" in line for line in calibration_lines(setup.cluster)) is never[name]
    assert not is_never_calibrated(replace(on["b200-180g"].cluster, factor=1.1))
    assert answer_document(answer(choices))["choices"]["stock"]["range_s"] is None
