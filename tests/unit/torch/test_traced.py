"""`bpipe.torch.trace`: what stages would hold, on fake tensors; `tests.gloo.test_pipelined_budget` lays it beside
what is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bpipe.cli import main
from bpipe.commands import trace
from bpipe.torch.trace import predict_peaks, trace_stages

WIDTH, ROWS = 64, 16
MAT = 4 * ROWS * WIDTH


class Stage(nn.Module):
    """Two products with a tanh between: the first input and the output of the tanh, which both save, stay."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.recomputes = recomputes
        # Held by Python alone, as a table of positions may be.
        self.table = [torch.ones(ROWS, WIDTH)]
        self.plain_table = torch.ones(ROWS, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        x = x * self.plain_table
        return checkpoint(self.layers, x, use_reentrant=False) if self.recomputes else self.layers(x)


def made(number: int = 4, recomputes: bool = False) -> tuple[Any, ...]:
    return [Stage(recomputes) for _ in range(number)], (torch.empty(ROWS, WIDTH),)


def test_what_is_computed_again_is_not_held() -> None:
    traced = trace_stages(lambda: made(recomputes=True), minimum_bytes=1)
    assert [stage.sizes.saved_bytes for stage in traced] == [MAT] * 4


def test_peaks_follow_from_the_schedule() -> None:
    traced = trace_stages(made, minimum_bytes=1)
    alone = predict_peaks(traced, 4, 8, balance=None)
    assert alone.need_bytes == (8 * MAT, 6 * MAT, 4 * MAT, 2 * MAT)
    assert predict_peaks(traced, 4, 8).need_bytes == (6 * MAT, 6 * MAT, 4 * MAT, 6 * MAT)
    assert predict_peaks(traced, 4, 8, memory=7 * MAT).need_bytes[0] <= 7 * MAT
    assert predict_peaks(traced, 2, 8).schedule.name == "interleaved-1f1b"


@pytest.mark.parametrize(
    "returned", [None, (), ([nn.Linear(2, 2)], torch.ones(2)), ([1], (torch.ones(2),)), ([nn.Linear(2, 2)],)]
)
def test_what_is_no_stages_is_refused(returned: Any) -> None:
    with pytest.raises(ValueError, match="the function returns no stages"):
        trace_stages(lambda: returned)


def test_split_backwards_are_refused() -> None:
    traced = trace_stages(made, minimum_bytes=1)
    with pytest.raises(ValueError, match="zb-h1 splits backwards"):
        predict_peaks(traced, 4, 8, "zb-h1")


PROGRAM = """
import torch
from torch import nn

def stages():
    layers = [nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)) for _ in range(4)]
    return layers, (torch.empty(256, 512),), nn.MSELoss(), torch.empty(256, 512)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_command_says_it_of_a_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.py"
    file.write_text(PROGRAM)
    asked = ["trace", "--module", f"{file}:stages", "--pp", "4", "--microbatches", "8", "--device", "cpu"]
    assert main([*asked, "--format", "json"]) == 0
    found = json.loads(capfd.readouterr().out)
    half = 256 * 512 * 4
    assert [stage["saved_bytes"] for stage in found["stages"]] == [half, 2 * half, 2 * half, 2 * half]
    assert found["alone_bytes"] == [4 * half, 6 * half, 4 * half, 2 * half]
    monkeypatch.setattr(trace, "_answer_of", lambda *given: found)
    assert main(asked) == 0
    lines = capfd.readouterr().out.splitlines()
    at = lines.index("rank  peak MiB  balanced MiB")
    assert lines[at + 1].split() == ["0", "2.0", "1.5"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--module", "nothing.py:stages"], "give --pp and --microbatches"),
        (["--module", "nothing.py:stages", "--pp", "4", "--microbatches", "8"], "no such file"),
        (["--module", "x:y", "--pp", "4", "--microbatches", "8", "--output", "a.json"], "--output: simulate and plan"),
    ],
)
def test_the_command_refuses_in_words(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(["trace", *words])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert said in capfd.readouterr().err
