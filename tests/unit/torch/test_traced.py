"""What stages would hold, traced on fake tensors, and plans within budgets."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.cli import main
from bpipe.commands import trace
from bpipe.schedule.host_buffers import host_buffers, stages_in_buffers
from bpipe.schedule.memory import num_transfers
from bpipe.torch.memory_budget import RankBudgets, StageSizes, budget_bytes
from bpipe.torch.trace import predict_peaks, trace_stages
from bpipe.transport.memory import BufferLayout

WIDTH, ROWS = 64, 16
MAT = 4 * ROWS * WIDTH


class Stage(nn.Module):
    """Two linear layers with a tanh between: they save the first input and the output of the tanh."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.recomputes = recomputes
        # Held by Python only, as a table of positions may be.
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
    command = ["trace", "--module", f"{file}:stages", "--pp", "4", "--microbatches", "8", "--device", "cpu"]
    assert main([*command, "--format", "json"]) == 0
    result = json.loads(capfd.readouterr().out)
    half = 256 * 512 * 4
    assert [stage["saved_bytes"] for stage in result["stages"]] == [half, 2 * half, 2 * half, 2 * half]
    assert result["alone_bytes"] == [4 * half, 6 * half, 4 * half, 2 * half]
    monkeypatch.setattr(trace, "_answer_of", lambda *_: result)
    assert main(command) == 0
    lines = capfd.readouterr().out.splitlines()
    header = lines.index("rank  peak MiB  balanced MiB")
    assert lines[header + 1].split() == ["0", "2.0", "1.5"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--module", "nothing.py:stages"], "give --pp and --microbatches"),
        (["--module", "nothing.py:stages", "--pp", "4", "--microbatches", "8"], "no such file"),
        (["--module", "x:y", "--pp", "4", "--microbatches", "8", "--output", "a.json"], "--output: simulate and plan"),
    ],
)
def test_the_command_refuses_in_words(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(["trace", *words])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert message in capfd.readouterr().err


PLAIN = build(ScheduleConfig("1f1b", 4, 8))


@pytest.mark.parametrize("budget", [0, -1, [], [1, 2, 3], "much", "0"])
def test_what_is_no_budget_is_refused(budget: Any) -> None:
    with pytest.raises(ValueError, match=r"bytes above 0|number of GiB above 0|3 budgets for 2 ranks"):
        budget_bytes(budget, 2)


@pytest.mark.parametrize(
    ("schedule", "how", "differing", "why"),
    [
        (PLAIN, None, False, "balance None evicts nothing"),
        (PLAIN, BalanceConfig((3,)), False, "bounds and memory exclude each other"),
        (PLAIN, BalanceConfig(), True, "it assumes micro-batches of one size"),
        (build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig())), BalanceConfig(), False, "is already balanced"),
        (build(ScheduleConfig("zb-h1", 4, 8)), BalanceConfig(), False, "zb-h1 splits backwards"),
    ],
)
def test_a_budget_is_refused_beside_what_says_otherwise(
    schedule: Any, how: BalanceConfig | None, differing: bool, why: str
) -> None:
    with pytest.raises(ValueError, match=f"^memory 5: .*{why}"):
        RankBudgets.of(5, schedule, how, differing)


def test_a_part_is_taken_from_the_end_as_an_evictor_takes_it() -> None:
    sizes = StageSizes(0, 100, (10, 20, 30))
    assert (sizes.moved_bytes, sizes.parts) == (60, (30, 50, 60))
    assert sizes.lengths_of(60) == (30, 20, 10)
    assert sizes.lengths_of(31) == (30, 20)
    assert sizes.lengths_of(30) == (30,)
    assert sizes.lengths_of(0) == ()


def test_what_host_buffers_take_to_begin_where_copies_like_it_keeps_the_budget_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,000 bytes take 1,024 in a host buffer: planned without that, a rank of small storages exceeded its budget."""
    lengths = (1000,) * 8
    # Whole micro-batches only.
    monkeypatch.setattr(StageSizes, "parts", (8000,))
    sizes = {stage: StageSizes(stage, 8000, lengths) for stage in range(4)}
    # Rank 3 holds a micro-batch of its own, and two of rank 0's.
    budget = 8000 + 2 * 8 * 1024
    plan = RankBudgets((budget,) * 4, BalanceConfig()).plan(PLAIN, sizes)
    assert num_transfers(plan.schedule, 0).evictions
    hosted = stages_in_buffers(host_buffers(plan.schedule, 3))
    assert BufferLayout.of(hosted, dict.fromkeys(sizes, lengths)).nbytes + 8000 == plan.need_bytes[3] == budget
    with pytest.raises(ValueError, match=r"^memory: no plan keeps .* Micro-batches and host buffers are counted"):
        RankBudgets((budget - 1,) * 4, BalanceConfig()).plan(PLAIN, sizes)
