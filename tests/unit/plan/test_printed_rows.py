"""What `bpipe plan` prints can be launched as it is: Megatron's own parser accepts every row, and `bpipe simulate`
predicts the row's figures."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any, NamedTuple

import pytest

from bpipe.cli import main
from tests.unit.config.launch.megatron_parser import parsed

DEVICES = ("a100-80g:4x8", "h100-80g:8x8", "h200-141g:4x8", "b200-180g:2x8", "mi300x-192g:4x8")
MODELS = ("gpt3-13b", "gpt3-96b", "gpt3-134b", "llama-65b", "llama3-8b", "llama3-70b", "llama3-405b")
QUICK = ("--max-micro-batch", "2", "--max-chunks", "4", "--schedule", "1f1b", "interleaved-1f1b", "grouped-interleaved")
# Together these have models of both kinds, balanced rows, and rows with shards of the vocabulary.
SHARE = (
    ("gpt3-96b", "a100-80g:4x8", "--attention unfused --precision fp16"),
    ("llama3-70b", "h100-80g:8x8", "--balance bpipe --memory 60"),
    ("llama3-8b", "mi300x-192g:1x8", ""),
)
EVERY = [pytest.param(model, device, "", marks=pytest.mark.slow) for model in MODELS for device in DEVICES]


class Row(NamedTuple):
    """A printed row: its seconds, MFU and peaks as printed, and all its flags."""

    seconds: str
    mfu: str
    peaks: list[str]
    flags: list[str]


def rows_of(printed: str) -> list[Row]:
    """Return the printed rows, each with the flags of all rows."""
    figures = re.findall(r"^ *\d+ +([\d.]+) +([\d.]+) +[\d.]+ +[\d.]+ ", printed, re.MULTILINE)
    peaks_of_rows = re.findall(r" \d+: GiB per rank, of [\d.]+: ([\d. x]+)", " ".join(printed.split()))
    flags = re.findall(r"^   (--.*)$", printed, re.MULTILINE)
    rows = []
    for (seconds, mfu), peaks, own in zip(figures, peaks_of_rows, flags, strict=True):
        rank_peaks = [
            peak for number, peak in re.findall(r"(?:(\d+) x )?([\d.]+)", peaks) for _ in range(int(number or 1))
        ]
        rows.append(Row(seconds, mfu, rank_peaks, [*of_all_rows(printed), *shlex.split(own)]))
    return rows


def of_all_rows(printed: str) -> list[str]:
    (common,) = re.findall(r"^all rows: (.*)$", printed, re.MULTILINE) or [""]
    return shlex.split(common)


def output_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(arguments)
    # Long flags are continued on further lines.
    return code, re.sub(r" \\\n +", " ", capsys.readouterr().out)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("model", "device", "more"),
    [
        SHARE[-1],
        *(pytest.param(*row, marks=pytest.mark.slow) for row in SHARE[:-1]),
        *EVERY,
    ],
)
def test_a_printed_row_is_taken_by_megatron_and_predicted_with_its_figures(
    model: str, device: str, more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = QUICK if (model, device, more) in SHARE else QUICK[:2]
    arguments = ["plan", "--model", model, "--cluster", device, "--gbs", "128", "--rows", "4", *quick, *more.split()]
    code, printed = output_of(arguments, capsys)
    rows = rows_of(printed)
    # Some models do not fit on so few devices, and the plan says so.
    assert bool(rows) is (code == 0)
    assert rows or "Nothing fits" in printed
    num_devices = int(device.split(":")[1].split("x")[0]) * int(device.split("x")[-1])
    taken = parsed([(num_devices, row.flags) for row in rows])
    for row, args in zip(rows, taken, strict=True):
        result = simulated(row.flags, device, capsys)
        stages = result["stages"]
        assert f"{result['iteration_time_s']:.3f}" == row.seconds, " ".join(row.flags)
        assert f"{result['mfu_percent']:.2f}" == row.mfu
        assert [f"{stage['peak_bytes'] / 2**30:.1f}" for stage in stages] == row.peaks
        assert result["refused"] == []
        configuration = result["configuration"]
        assert configuration["layers"] == args["layers"]
        assert args["balanced"] is (configuration["balance"] == "bpipe")
        assert args["vocab_size"] <= configuration["vocabulary"]


def simulated(flags: list[str], device: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code, printed = output_of(["simulate", "--cluster", device, "--format", "json", "--", *flags], capsys)
    assert code == 0
    result: dict[str, Any] = json.loads(printed)
    return result
