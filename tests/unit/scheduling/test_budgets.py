"""Budgets before training: the command's own prediction and plan, what is refused, and when a plan is changed."""

import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from bpipe import cli
from bpipe.balance.config import BalanceConfig
from bpipe.build import build
from bpipe.config.flags.values import read_budget
from bpipe.plan.budget import Devices, better_plan, tightest_plan, within
from bpipe.predict.memory import DeviceBesides
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.host_buffers import links_of
from bpipe.schedule.hosts import ALL, HOST
from bpipe.schedule.memory import memory_of, num_transfers
from bpipe.schedule.program import Exchange
from bpipe.simulate.cost import Costs, Link, Links, StageCost
from bpipe.simulate.engine import simulate
from megatron.scheduling.options.schedule_choice import requested
from tests.unit.scheduling.test_choosing import args, own_schedule

# The command line of `args`.
WORDS = [
    *("--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --transformer-impl local").split(),
    *(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --micro-batch-size 2 --global-batch-size 48"
    ).split(),
    *("--vocab-size", "1024", "--max-position-embeddings", "1024", "--bpipe"),
]


SIZES = {
    "num_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "seq_length": 1024,
    "transformer_impl": "local",
}
SIZES |= {"world_size": 24, "vocab_size": 1024, "bpipe": True, "bpipe_min_bytes": 65536}


@pytest.fixture(autouse=True)
def nodes_of_8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    # Only the arguments count: a user's own program has another command line.
    monkeypatch.setattr(sys, "argv", ["program.py", "--num-layers", "wrong"])


def asked(memory: str, **more: Any) -> Any:
    return args(**{**SIZES, "bpipe_memory": read_budget(memory), **more})


def requested_balance(arguments: Any) -> tuple[BalanceConfig | None, tuple[str, ...]]:
    request = requested(arguments)
    return request.config.balance, request.plan.lines


def test_the_plan_is_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """The log has the lines that `bpipe simulate --memory` prints for the same flags."""
    simulate = ["simulate", "--cluster", "h100-80g:3x8", "--kernels", "cpu", "--attention", "unfused"]
    moved = []
    for memory in ("2.8", "2.4", "2.2"):
        how, lines = requested_balance(asked(memory))
        assert cli.main([*simulate, "--memory", memory, "--", *WORDS]) == 0
        assert lines
        assert " ".join(lines) in " ".join(capsys.readouterr().out.split())
        assert how is not None
        schedule = build(replace(plain_config(), balance=how))
        moved.append(sum(num_transfers(schedule, rank).evictions for rank in range(4)))
    assert moved == sorted(moved)
    assert moved[0] == 0 < moved[-1]


def test_where_links_are_said_transfers_end_in_time_as_the_command_plans_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With a cluster whose links are slow; without one, the plan is made from bytes alone."""
    slow = tmp_path / "slow.toml"
    slow.write_text(
        'nodes = 3\ngpus_per_node = 8\n[device]\nlike = "h100-80g"\nname = "slow"\ninside_gb_per_s = '
        "80\nbetween_gb_per_s = 80\n"
    )
    simulate = [
        "simulate",
        "--cluster",
        str(slow),
        "--kernels",
        "cpu",
        "--attention",
        "unfused",
        "--memory",
        "2.6",
        "--",
        *WORDS,
    ]
    by_bytes, _ = requested_balance(asked("2.6"))
    how, lines = requested_balance(asked("2.6", bpipe_cluster=str(slow)))
    assert cli.main(simulate) == 0
    assert " ".join(lines) in " ".join(capsys.readouterr().out.split())
    assert by_bytes is not None
    assert how is not None
    assert by_bytes.windows is None
    assert how == replace(by_bytes, windows=how.windows)
    assert lines[-1].startswith(
        "not every transfer ends before it is needed, issued earlier where there is room: waits in an iteration rank 0 "
    )
    timed, plain = (build(replace(plain_config(), balance=balance)) for balance in (how, by_bytes))
    assert timed.ranks != plain.ranks
    assert [num_transfers(timed, rank) for rank in range(4)] == [num_transfers(plain, rank) for rank in range(4)]


def test_where_links_are_said_what_is_learned_is_planned_by_their_seconds() -> None:
    """The first iteration is planned from bytes alone; a given budget is planned once."""

    def costs(memory: str, cluster: str | None = "h100-80g", **more: Any) -> Costs | None:
        return requested(asked(memory, bpipe_cluster=cluster, **more)).plan.costs

    costs_of_fast, slower = costs("auto:2.6"), costs("auto:2.6", cluster="a100-80g")
    assert costs_of_fast is not None
    assert slower is not None
    assert costs_of_fast.stages[0].forward_s < slower.stages[0].forward_s
    assert costs("auto:2.6", cluster=None) is None
    assert costs("2.6") is None
    assert costs("auto:2", moe_latent_size=8) is None
    how, lines = requested_balance(asked("auto:2.6", bpipe_cluster="h100-80g"))
    assert (how, lines) == requested_balance(asked("auto:2.6"))
    _, lines = requested_balance(asked("auto:2", moe_latent_size=8, bpipe_cluster="h100-80g"))
    assert lines[0].endswith("keeps the smallest bound, and plans are made from bytes alone")


def test_links_are_said_for_a_budget() -> None:
    with pytest.raises(ValueError, match=r"--bpipe-cluster h100-80g says how long transfers take within a budget"):
        requested_balance(args(bpipe=True, bpipe_cluster="h100-80g"))


def plain_config() -> Any:
    config = own_schedule(args(bpipe_executor=True))
    assert config is not None
    return config


@pytest.mark.parametrize(
    ("memory", "more", "reason"),
    [
        ("1.2", {}, "--bpipe-memory: by prediction no plan keeps ranks . and . within 1.2 GiB.* The smallest budget"),
        ("1.2", {}, r"`bpipe fit` with the same launch lists .*With auto:GIB the run starts anyway and measures"),
        ("2", {"bpipe_bound": (3,)}, "--bpipe-memory and --bpipe-bound both say how to balance: give only one of them"),
        ("2,2", {}, "2 budgets for 4 ranks: give one for all or one for each"),
        ("2", {"moe_latent_size": 8}, r"predicted \(--moe-latent-size 8 is not modelled.*measured with auto"),
        ("auto", {}, "--bpipe-memory auto: a CPU has no device memory .* --bpipe-memory auto:GIB"),
    ],
)
def test_what_cannot_be_kept_is_said_before_training(memory: str, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){reason}"):
        own_schedule(asked(memory, **more))


def test_learning_begins_with_what_helps_most_or_where_nothing_predicts_with_the_smallest_bound() -> None:
    how, lines = requested_balance(asked("auto:1"))
    assert how is not None
    assert how.activation_budget is not None
    schedule = build(replace(plain_config(), balance=how))
    assert num_transfers(schedule, 0).evictions > 0, "even a budget that is too small by prediction is tried"
    assert lines[0] == "the first iteration moves as much as helps, until bytes are measured:"
    how, lines = requested_balance(asked("auto:2", moe_latent_size=8))
    assert how == BalanceConfig()
    assert lines[0].endswith(": the first iteration keeps the smallest bound")


def test_before_there_is_a_tokenizer_pairs_are_the_usual() -> None:
    assert requested_balance(asked("2", vocab_size=None, padded_vocab_size=None)) == (BalanceConfig(), ())


@pytest.mark.parametrize("text", ["", "0", "-1", "1e3", "70;80", "auto:", "auto:x", "70,", "0.0000000001"])
def test_no_budget(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number of GiB above 0"):
        read_budget(text)


def devices(*budget: int) -> Devices:
    """1F1B of 4 ranks, with 1000 fixed bytes and 100 per micro-batch: the first rank needs 1400 on its own."""
    besides = DeviceBesides((1000,) * 4, (0,) * 4, (0,) * 4)
    return Devices(FAMILIES["1f1b"].generate(4, 8, 1), memory_of([100] * 4), besides, budget * (4 // len(budget)))


def test_a_plan_changes_over_only_where_that_helps() -> None:
    tight = tightest_plan(devices(1400)).schedule
    assert num_transfers(tight, 0).evictions == 3
    plan, lines = better_plan(devices(1400), tight)
    assert plan is not None
    assert plan.moved_bytes == 0
    assert lines[0].endswith("are evicted per iteration; changing the plan:")
    assert better_plan(devices(1300), tight)[0] is None
    assert "no plan needs less, so this one stays" in better_plan(devices(1300), tight)[1][0]
    plan, lines = better_plan(devices(1300), within(devices(1400)).schedule)
    assert plan is None
    assert "would send from stage 0, whose sizes are not measured yet" in lines[0]
    plan, lines = better_plan(devices(1200), tight)
    assert plan is None
    assert "no plan keeps ranks 0 and 3 within" in lines[0]
    # Now too little is evicted, and the link exists.
    less = within(devices(1300, 1200, 1400, 1300)).schedule
    assert num_transfers(less, 1).evictions
    assert better_plan(devices(1300, 1200, 1400, 1300), less)[0] is None


@pytest.mark.parametrize("hosts", [HOST, ALL])
def test_a_first_plan_asks_a_node_for_little_more_memory_than_the_last(hosts: str) -> None:
    """The first plan evicted all that it could: one node ran out of host memory that was never needed again."""
    besides = DeviceBesides((1000,) * 8, (0,) * 8, (0,) * 8)
    room = Devices(FAMILIES["1f1b"].generate(8, 16, 1), memory_of([100] * 8), besides, (1750,) * 8, hosts=hosts)
    first, last, all_leave = tightest_plan(room), within(room), tightest_plan(replace(room, budget_bytes=(1,) * 8))
    assert sum(last.own_bytes) <= sum(first.own_bytes) < sum(all_leave.own_bytes)
    assert max(first.need_bytes) <= 1750 - 1750 // 8
    # What moves is measured on every rank that can evict, so any budget can be planned later, over other links, too.
    for budget in (1200, 1300, 1500, 1700):
        plan, lines = better_plan(replace(room, budget_bytes=(budget,) * 8), first.schedule)
        assert plan is not None, lines
    assert hosts == HOST or not links_of(within(room).schedule) <= links_of(all_leave.schedule)


def costs_of(transfer_s: int) -> Costs:
    """Costs by which a measured micro-batch takes `transfer_s`. Of the predicted sizes, nothing would move."""
    cost = StageCost(1, 2, saved_bytes=1, moved_bytes=0)
    return Costs(
        (cost,) * 4, Links(Link(Fraction(100, transfer_s))), Exchange.MEGATRON_1F1B, one_sided=frozenset(range(4))
    )


def test_a_plan_that_sends_as_much_is_changed_to_where_less_is_waited_for() -> None:
    room = devices(1300, 1400, 1400, 1400)
    now = tightest_plan(room).schedule
    assert better_plan(room, now)[0] is None
    assert better_plan(room, now, costs_of(1))[0] is None
    plan, lines = better_plan(room, now, costs_of(3))
    assert plan is not None
    assert lines[0].endswith("a plan that sends as much waits less for it; changing the plan:")
    waits = [sum(simulate(schedule, costs_of(3).holding(room.memory)).exposed_s) for schedule in (now, plan.schedule)]
    assert waits[1] < waits[0]
    assert better_plan(room, plan.schedule, costs_of(3))[0] is None
