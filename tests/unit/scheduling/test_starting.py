"""How a run starts: what is refused, repaired and shared, said once, with the same status on every rank."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.config.flags.values import MemoryBudget
from bpipe.simulate.cost import Costs
from megatron.scheduling import install, launch
from megatron.scheduling.hooks import repairs
from megatron.scheduling.options.arguments import BY_TRAINER, SchedulingConfig
from megatron.scheduling.options.flags import add_arguments
from megatron.scheduling.start import startup


def parser() -> argparse.ArgumentParser:
    parser = add_arguments(argparse.ArgumentParser(prog="pretrain.py", allow_abbrev=False))
    parser.add_argument("--num-layers", type=int)
    launch.refuse_once(parser)
    return parser


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--bpip"],
            "pretrain.py: error: unrecognized arguments: --bpip\n  instead of --bpip, did you mean --bpipe?\n",
        ),
        (
            ["--bpipe-reprot=x", "--num-layer", "4"],
            "  instead of --bpipe-reprot, did you mean --bpipe-report?\n  instead of --num-layer, did you mean "
            "--num-layers?\n",
        ),
        (["--qqq"], "pretrain.py: error: unrecognized arguments: --qqq\n"),
        (["--num-layers", "many"], "pretrain.py: error: argument --num-layers: invalid int value: 'many'\n"),
    ],
)
def test_a_flag_that_is_not_known_is_refused_once(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit) as ended:
            parser().parse_args(flags)
        assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.endswith(message)
    assert error.count("usage: ") == 1
    assert error.count("error: ") == 1


def test_a_folder_that_cannot_be_written_is_named_once_a_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of two processes, on a real file system: there is a file where the folder should be."""
    (tmp_path / "file").write_text("")
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
        monkeypatch.setenv("GROUP_RANK", str(rank // 2))
        with pytest.raises(SystemExit) as ended:
            launch.need_folder(str(tmp_path / "file/report"))
        assert ended.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"bpipe: error: --bpipe-report {tmp_path}/file/report: Not a directory"
    assert second.startswith(f"{first} on ")


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    launch.need_folder(str(tmp_path / "runs/mine"))
    assert list((tmp_path / "runs/mine").iterdir()) == []


@pytest.mark.parametrize("flag", ["--sft", "--dataloader-inter-document-masking"])
def test_a_pipeline_takes_one_packed_row_at_a_time(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With stock Megatron, too: the second of two stages got a micro-batch of two rows as one of another shape."""
    packed = {flag.removeprefix("--").replace("-", "_"): True, "pipeline_model_parallel_size": 2}
    for rows in ({"micro_batch_size": 2}, {"micro_batch_size": 1, "eval_micro_batch_size": 2}):
        with pytest.raises(SystemExit) as ended:
            launch.refuse_packed_batches(SimpleNamespace(**packed, **rows))
        assert ended.value.code == 2
        assert f"bpipe: error: {flag}: Megatron joins the 2 packed rows" in capsys.readouterr().err
    launch.refuse_packed_batches(SimpleNamespace(**packed, micro_batch_size=1))
    launch.refuse_packed_batches(SimpleNamespace(sft=True, micro_batch_size=2, pipeline_model_parallel_size=1))
    launch.refuse_packed_batches(SimpleNamespace(sft=False, micro_batch_size=2, pipeline_model_parallel_size=2))


ASKED: dict[str, Any] = {
    "report": "runs/mine",
    "report_iterations": (3, 5),
    "peak_tflops": 989.0,
    "memory": MemoryBudget((None,), True),
    "costs": Costs(()),
}


@pytest.mark.parametrize("name", BY_TRAINER)
def test_what_needs_megatrons_trainer_is_refused_by_its_name(name: str) -> None:
    """It was ignored: a run ended without its report."""
    with pytest.raises(
        ValueError, match=rf"\n  {name} in the configuration: .* python -m megatron.scheduling.launch"
    ) as refused:
        install(SchedulingConfig(num_ranks=4, num_chunks=1, balance=BalanceConfig(), **{name: ASKED[name]}))
    assert str(refused.value).count("in the configuration") == 1


def missing_attribute() -> bool:
    return bool(SimpleNamespace().grad_data)


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    repair = repairs.Repair(("megatron.core.made",), "what was broken works", lambda: True)
    sound = repairs.Repair(("megatron.core.sound",), "nothing was broken", lambda: False)
    untried = repairs.Repair(("megatron.core.changed", "megatron.core.other"), "state is saved", missing_attribute)
    last = repairs.Repair(("megatron.core.last",), "the last works", lambda: True)
    monkeypatch.setattr(repairs, "REPAIRS", (repair, sound, untried, last))
    monkeypatch.delenv("RANK", raising=False)
    startup.repair.cache_clear()
    yield
    startup.repair.cache_clear()


def test_each_repair_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A script that prepared the process itself and was also run by the launcher wrapped the wrappers."""
    startup.repair()
    startup.repair()
    printed = capsys.readouterr().out
    assert (
        printed.count("bpipe: repaired in memory, without editing files: megatron.core.made: what was broken works\n")
        == 1
    )
    assert "megatron.core.sound" not in printed


def environment(local_rank: int = 0, local_world: int = 8, world: int = 8) -> dict[str, str]:
    return {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_world), "WORLD_SIZE": str(world)}


def arguments(local_rank: int = 0, shares: bool = True) -> SimpleNamespace:
    return SimpleNamespace(local_rank=local_rank, bpipe_share_gpus=shares)


def test_ranks_take_the_gpus_in_turn_and_are_nodes_of_their_own_for_nccl() -> None:
    hosts, gpus = set(), []
    for rank in range(8):
        args, variables = arguments(rank), environment(rank)
        line = startup.gpu_of_rank(args, 3, variables)
        assert line is not None
        assert line.startswith("WARNING: 8 ranks share 3 GPUs (--bpipe-share-gpus)")
        gpus.append(args.local_rank)
        hosts.add(variables["NCCL_HOSTID"])
        assert variables["NCCL_SOCKET_IFNAME"] == "lo"
        assert variables["NCCL_IB_DISABLE"] == "1"
    assert gpus == [0, 1, 2, 0, 1, 2, 0, 1]
    assert len(hosts) == 8, "NCCL refuses two ranks of one host on one GPU"


def test_what_the_user_sets_for_nccl_stays() -> None:
    variables = environment() | {"NCCL_SOCKET_IFNAME": "eth0"}
    startup.gpu_of_rank(arguments(), 1, variables)
    assert variables["NCCL_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize("num_gpus", [8, None])
def test_where_nothing_is_to_be_shared_nothing_changes(num_gpus: int | None) -> None:
    args, variables = arguments(5), environment(5)
    line = startup.gpu_of_rank(args, num_gpus, variables)
    assert line is not None
    assert "WARNING" not in line
    assert args.local_rank == 5
    assert variables == environment(5)
    assert startup.gpu_of_rank(arguments(shares=False), num_gpus, environment()) is None


def test_too_few_gpus_are_refused_with_the_flag_that_shares_them() -> None:
    """Megatron ended with "invalid device ordinal"."""
    variables = environment(7)
    with pytest.raises(ValueError, match=r"^8 ranks on this node, but torch sees 1 GPUs: .* add --bpipe-share-gpus"):
        startup.gpu_of_rank(arguments(7, shares=False), 1, variables)
    assert variables == environment(7)


def test_ranks_of_several_nodes_are_refused() -> None:
    """Loopback reaches only one node."""
    with pytest.raises(ValueError, match="16 ranks, of which 8 are on this node"):
        startup.gpu_of_rank(arguments(), 1, environment(world=16))
