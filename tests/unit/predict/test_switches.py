"""What Megatron's switches change of times and bytes, that contradictions are refused, and that each stands in one
place."""

from __future__ import annotations

from typing import Any

import pytest

from bpipe.cli import main
from bpipe.config.launch.megatron_command import read_command
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.plan.document import configuration
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.costs import predict_costs
from bpipe.predict.layout import Setup
from bpipe.predict.model import PRESETS
from bpipe.predict.switches import SWITCHES, Switches


def setup(*on: str, **changes: Any) -> Setup:
    sizes = {"tensor": 2, "pipeline": 4, "micro_batch": 1, "global_batch": 32, "sequence": 2048, "layers": (10,) * 4}
    switches = Switches(**dict.fromkeys(on, True))
    return Setup(PRESETS["gpt3-13b"], parse_cluster("a100-80g:4x8"), **{**sizes, "switches": switches, **changes})


@pytest.mark.parametrize(
    ("on", "changes", "message"),
    [
        (
            ("no_overlap_p2p_communication",),
            {"pipeline": 2, "num_chunks": 2, "layers": (10,) * 4, "schedule": "interleaved-1f1b"},
            "needs 3 or more pipeline ranks",
        ),
        (("overlap_param_gather",), {}, "--overlap-param-gather needs --overlap-grad-reduce"),
        (
            ("overlap_grad_reduce", "overlap_param_gather"),
            {"distributed_optimizer": False},
            "needs the distributed optimizer",
        ),
        (("tp_comm_overlap",), {"sequence_parallel": False}, "--tp-comm-overlap is for sequence parallelism"),
        (("grad_reduce_in_bf16",), {"precision": "fp16"}, "--grad-reduce-in-bf16 is for bf16, the precision is fp16"),
    ],
)
def test_contradictions_are_refused(on: tuple[str, ...], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        setup(*on, **changes)


def test_every_switch_is_offered_read_written_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    mine = setup(*SWITCHES)
    flags = megatron_flags(mine)
    options = read_command(flags).options
    assert all(options[name] is True and configuration(mine)[name] is True for name in SWITCHES)
    with pytest.raises(SystemExit):
        main(["simulate", "--help-all"])
    offered = capsys.readouterr().out
    assert all(flag in offered and flag in flags for flag in mine.switches.flags)
    assert len(mine.switches.flags) == len(SWITCHES)
    # Megatron refuses it where there is one tensor-parallel rank.
    alone = setup("tp_comm_overlap", tensor=1)
    assert "--tp-comm-overlap" not in megatron_flags(alone)
    assert predict_costs(alone) == predict_costs(setup(tensor=1))
    reading = read_command([*flags, "--transformer-impl", "local"])
    assert reading.options["tp_comm_overlap"] is False
    assert any("--tp-comm-overlap" in note for note in reading.notes)
