"""The sub-commands: what they print, the JSON they promise, what they refuse, and that none loads torch."""

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main
from bpipe.commands.plan import peaks_text
from bpipe.predict.cluster import GIB
from bpipe.predict.memory import RankMemory
from bpipe.schedule.families.families import FAMILIES, SEARCHED

SIMULATE = ["simulate", "--model", "gpt3-96b", "--cluster", "a100-80g:4x8", "--tp", "4", "--pp", "8", "--mbs", "2"]
SIMULATE += ["--gbs", "128", "--recompute", "selective", "--attention", "unfused"]
BALANCED = [*SIMULATE, "--balance", "bpipe", "--precision", "fp16"]


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what a command prints, with single spaces."""
    assert main(arguments) == 0
    return " ".join(capsys.readouterr().out.split())


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(output(capsys, *arguments, "--format", "json"))
    return result


def test_simulate_promises_this_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = document(capsys, *BALANCED)
    assert set("iteration_time_s mfu_percent bubble_percent exposed_transfer_s stages balanced fits".split()) <= set(
        result
    )
    assert result["balanced"] is True
    assert result["fits"] is True
    assert [stage["stage"] for stage in result["stages"]] == list(range(8))
    assert {"stage", "weights_bytes", "activations_bytes", "peak_bytes", "fits"} <= set(result["stages"][0])
    assert result["configuration"]["data"] == 1
    plain = document(capsys, *SIMULATE, "--precision", "fp16")
    assert (plain["fits"], plain["balanced"]) == (False, False)


def test_replicas_that_pairs_part_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Balancing cost 4 % with 0 s exposed, and nothing said why: pairs share nodes, so gradients are reduced between
    nodes."""
    flags = ["simulate", "--model", "llama3-70b", "--cluster", "h100-80g:4x8", "--tp", "4", "--pp", "4", "--vp", "5"]
    flags += ["--gbs", "32"]
    assert "so the replicas of a rank do not" in output(capsys, *flags, "--balance", "bpipe")
    assert "replicas" not in output(capsys, *flags)
    # If replicas were on different nodes before, balancing does not change that.
    assert "replicas" not in output(capsys, *BALANCED)


def test_simulate_a_schedule_that_splits_its_backwards(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With sequence parallelism, delayed weight gradients hold more than their forwards saved."""
    split = ["simulate", "--model", "llama3-70b", "--cluster", "h100-80g:8x8", "--tp", "8", "--pp", "8", "--gbs", "32"]
    split += ["--schedule", "zb-h1"]
    trace = tmp_path / "trace.json"
    output(capsys, *split, "--trace", str(trace))
    names = {
        event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "backward_weight"
    }
    assert names
    result = document(capsys, *split)
    assert result["configuration"]["keep_weights_halves"] == "linear"
    at_once = document(capsys, *split, "--keep-weights-halves", "none")
    assert at_once["configuration"]["keep_weights_halves"] == "none"
    assert max(stage["peak_bytes"] for stage in result["stages"]) > max(
        stage["peak_bytes"] for stage in at_once["stages"]
    )


SLICED = (
    *("simulate", "--model", "llama3-8b", "--seq", "65536", "--cluster", "h100-80g:8", "--tp", "2", "--pp", "4"),
    *("--gbs", "8", "--recompute", "selective", "--slices", "4"),
)


def test_simulate_slices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "1f1b k=4, 8 micro-batches, attention flash, slices of 16384,16384,16384,16384 tokens" in output(
        capsys, *SLICED
    )
    result = {
        name: document(capsys, *SLICED, "--slice-lengths", name) for name in ("even", "time", "28160,15872,11776,9728")
    }
    assert result["even"]["configuration"]["slice_lengths"] == [16384] * 4
    assert result["time"]["iteration_time_s"] < 0.9 * result["even"]["iteration_time_s"]
    assert result["28160,15872,11776,9728"]["configuration"]["slice_lengths"] == [28160, 15872, 11776, 9728]
    trace = tmp_path / "trace.json"
    output(capsys, *SLICED, "--trace", str(trace))
    assert '"0F15"' in trace.read_text()
    assert main([*SLICED, "--slice-lengths", "1,2"]) == 2
    assert "2 lengths for 4 slices: give one for each" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*SLICED, "--slice-lengths", "long"])
    assert "'long' must be even, work, time or a list of lengths" in capsys.readouterr().err


@pytest.mark.parametrize("lengths", ["even", "time"])
def test_simulate_slices_within_a_budget(capsys: pytest.CaptureFixture[str], lengths: str) -> None:
    """With a budget below the fullest rank's need, every rank keeps it, and slices are evicted."""
    sliced = (*SLICED, "--slice-lengths", lengths)
    alone = [stage["peak_bytes"] for stage in document(capsys, *sliced)["stages"]]
    budget = (max(alone) + min(alone)) / 2 / 2**30
    within = (*sliced, "--balance", "bpipe", "--hosts", "all", "--memory", f"{budget:.1f}")
    result = document(capsys, *within)
    assert max(stage["peak_bytes"] for stage in result["stages"]) <= budget * 2**30 + 2**27 < max(alone)
    assert result["plan"]["moved_bytes"] > 0
    printed = output(capsys, *within)
    assert "of its 32 slices of micro-batches: " in printed
    by_counts = output(capsys, *sliced, "--balance", "bpipe")
    assert ("slices of differing lengths are balanced by their number" in by_counts) is (lengths == "time")
    assert "balanced by their number" not in printed


def test_simulate_groups(capsys: pytest.CaptureFixture[str]) -> None:
    grouped = ["simulate", "--model", "gpt3-13b", "--cluster", "h100-80g:8", "--pp", "4", "--gbs", "32"]
    grouped += ["--schedule", "grouped-interleaved", "--vp", "5", "--balance", "bpipe"]
    assert "grouped-interleaved v=5 g=3 balanced, 16 micro-batches" in output(capsys, *grouped, "--group", "3")
    peaks = []
    for group in ("2", "4"):
        result = document(capsys, *grouped, "--group", group)
        assert result["configuration"]["group"] == int(group)
        peaks.append(max(stage["peak_bytes"] for stage in result["stages"]))
    assert peaks[0] < peaks[1]
    assert document(capsys, *grouped)["configuration"]["group"] == 2


@pytest.mark.parametrize("schedule", [name for name, family in FAMILIES.items() if family.min_chunks > 1])
def test_simulate_takes_the_fewest_chunks_that_a_schedule_has_as_schedule_does(
    schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`simulate` asked for a flag that `schedule` does not need: "schedule v-half needs at least 2 chunks per rank, not
    1"."""
    sizes = "simulate --model gpt3-13b --cluster a100-80g:8 --pp 4 --gbs 64 --format json".split()
    result = json.loads(output(capsys, *sizes, "--schedule", schedule))
    assert result["configuration"]["chunks"] == 2
    assert result == json.loads(output(capsys, *sizes, "--schedule", schedule, "--vp", "2"))
    assert output(capsys, "schedule", "--schedule", schedule, "--pp", "4", "--microbatches", "8")


def test_simulate_refuses_chunks_of_a_launch_that_the_trainer_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    launch = "--num-layers 40 --hidden-size 5120 --num-attention-heads 40 --seq-length 2048 --bf16".split()
    launch += ("--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 8 --vocab-size 50257").split()
    simulated = ["simulate", "--cluster", "a100-80g:1x4", "--", *launch]
    assert "v-half" in output(capsys, *simulated, "--bpipe-schedule", "v-half")
    for more, words in (
        (["--bpipe-schedule", "interleaved-1f1b"], "interleaved-1f1b needs at least 2 chunks per rank, not 1"),
        (
            ["--bpipe-schedule", "v-half", "--num-virtual-stages-per-pipeline-rank", "5"],
            "at most 2 chunks per rank, not 5",
        ),
    ):
        assert main([*simulated, *more]) == 2
        assert words in capsys.readouterr().err


def test_simulate_takes_a_bound_for_each_rank_from_its_flag_or_from_a_launch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only ranks above their bound evict; a launch gives bounds by the trainer's flag."""
    sizes = ["simulate", "--cluster", "a100-80g:1x4", "--vocab-size", "50257", "--format", "json"]
    launch = "--num-layers 40 --hidden-size 5120 --num-attention-heads 40 --seq-length 2048 --bf16".split()
    launch += ["--pipeline-model-parallel-size", "4", "--micro-batch-size", "1", "--global-batch-size", "8", "--bpipe"]
    result = [
        json.loads(output(capsys, *sizes, *flags, "--", *launch, *more))
        for flags, more in ((["--bound", "4,2,4,1"], []), ([], ["--bpipe-bound", "4,2,4,1"]))
    ]
    assert result[0] == result[1]
    assert [stage["evictions"] for stage in result[0]["stages"]] == [0, 6, 0, 0]
    assert result[0]["configuration"]["bound"] == [4, 2, 4, 1]
    assert ", bounds 4,2,4,1" in output(capsys, *sizes[:-2], "--bound", "4,2,4,1", "--", *launch)
    assert main([*SIMULATE, "--bound", "4"]) == 2
    assert "--bound says how to balance: give --balance bpipe, too" in capsys.readouterr().err
    assert main([*sizes, "--", *launch, "--bpipe-bound", "3,x"]) == 2
    assert "'3,x' is neither a number nor a list of numbers such as 3,3,2,1" in capsys.readouterr().err
    grouped = ["--schedule", "grouped-interleaved", "--vp", "2", "--bound", "8"]
    assert main([*sizes, *grouped, "--", *launch]) == 2
    assert "chooses its order for a bound, which is not modelled: give the group" in capsys.readouterr().err


def test_a_budget_sends_only_what_must_and_says_who_hosts_for_whom(capsys: pytest.CaptureFixture[str]) -> None:
    plain = document(capsys, *SIMULATE, "--precision", "fp16")
    tightest = document(capsys, *BALANCED)
    peak_gib = max(stage["peak_bytes"] for stage in plain["stages"]) / 2**30
    evictions = []
    for budget in (
        peak_gib + 1,
        peak_gib - 0.1,
        max(stage["peak_bytes"] for stage in tightest["stages"]) / 2**30 + 0.1,
    ):
        result = document(capsys, *BALANCED, "--memory", f"{budget:.2f}")
        assert result["fits"]
        assert [stage["peak_bytes"] for stage in result["stages"]] == result["plan"]["need_bytes"], (
            "the table and the plan differ"
        )
        assert {stage["limit_bytes"] for stage in result["stages"]} == set(result["plan"]["budget_bytes"])
        sent = {host["rank"]: host["evictions"] for host in result["plan"]["hosts"]}
        assert [stage["evictions"] for stage in result["stages"]] == [sent.get(rank, 0) for rank in range(8)]
        evictions.append(sum(sent.values()))
    assert 0 == evictions[0] < evictions[1] < evictions[2]
    text = output(capsys, *BALANCED, "--memory", f"{peak_gib - 0.1:.2f}")
    assert re.search(r"^by prediction within [\d.]+ GiB per device: [\d.]+ GiB are evicted per iteration rank 0", text)
    assert re.search(
        r" rank 0 would need [\d.]+ GiB; rank 7 hosts [\d.]+ GiB of each of \d+ of its 64 micro-batches: they need",
        text,
    )
    assert "nothing has to leave, rank 0 is the fullest with" in output(capsys, *BALANCED, "--memory", "auto:200")


def test_a_budget_that_nothing_keeps_is_refused_with_the_smallest_that_something_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = [*BALANCED, "--gbs", "32"]
    assert main([*few, "--memory", "30"]) == 2
    printed = capsys.readouterr().err
    result = re.search(r"The smallest budget that one keeps is ([\d.]+) GiB. `bpipe fit` with the same launch", printed)
    assert result, printed
    assert main([*few, "--memory", result[1], "--format", "json"]) == 0
    less = float(result[1]) - 0.2
    assert main([*few, "--memory", f"{less:.1f}"]) == 2
    capsys.readouterr()
    for flags, reason in (
        (["--memory", "0"], "'0' must be a number of GiB above 0"),
        (["--memory", "40,50"], "2 budgets for 8 ranks: give one for all or one for each"),
        (["--memory", "40", "--bound", "5"], "--memory says how to balance, and so does --bound: give one of them"),
        (["--memory", "40", "--balance", "none"], "--memory says how to balance: give --balance bpipe, too"),
    ):
        with suppress(SystemExit):
            assert main([*few, *flags]) == 2
        assert reason in capsys.readouterr().err


def test_the_papers_stage_times_as_a_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """GPT-3 96B, t=4 p=8 b=2: 50.64 % measured. The times contain the output layer."""
    path = tmp_path / "profile.json"
    stage = {"forward_s": 0.14337, "backward_s": 0.2879, "transfer_s": 0.01563, "output_s": 0, "embedding_s": 0}
    path.write_text(json.dumps({"stages": [stage]}))
    result = document(capsys, *BALANCED, "--profile", str(path))
    # The paper counts attention in full, Megatron counts causal attention half.
    assert result["mfu_percent"] == pytest.approx(50.64 * (1 + 2048 / (12 * 9984)) / (1 + 2048 / (6 * 9984)), rel=0.025)
    assert result["exposed_transfer_s"] == 0


def test_a_profile_of_several_sizes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(
        json.dumps(
            {"stages": [{"micro_batch": b, "layers": 1, "forward_s": 0.01 * b, "backward_s": 0.02 * b} for b in (1, 2)]}
        )
    )
    result = document(capsys, *SIMULATE, "--profile", str(path))
    # Ten layers per stage, 64 micro-batches and 7 to fill the pipeline; the rest is what the profile leaves out.
    assert result["iteration_time_s"] == pytest.approx(71 * 10 * 0.06, rel=0.1)
    assert main([*SIMULATE[:-1], "unfused", "--mbs", "4", "--profile", str(path)]) == 2
    assert "no stage of micro-batch size 4, only of [1, 2]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "a profile is"),
        ('{"stages": [{"forward": 1}]}', "unknown keys forward: choose from"),
        ('{"stages": [{"forward_s": -1}]}', "forward_s is -1"),
        ('{"stages": [{"forward_s": 1}, {"forward_s": 1}]}', "2 stages for micro-batch size 2, but the setup has 8"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"stages": [{"forward_s": NaN}]}', "NaN is not a finite number"),
        ('{"stages": [{"forward_s": 1e999}]}', "forward_s is inf, but must be a number from 0"),
        ('{"stages": [{"forward_s": 1%s}]}' % ("0" * 400), "but must be a number from 0"),
        ('{"stages": [{"forward_s": 1, "layers": 0}]}', "layers is 0, but must be a whole number from 1"),
    ],
)
def test_profiles_that_are_no_good(
    content: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    assert main([*SIMULATE, "--profile", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = str(tmp_path / "trace.json")
    small = "simulate --model gpt3-13b --cluster a100-80g:4 --pp 4 --gbs 8 --balance bpipe".split()
    output(capsys, *small, "--trace", trace)
    events: list[dict[str, Any]] = json.loads(Path(trace).read_text())["traceEvents"]
    computed = [event for event in events if event["ph"] == "X" and event["cat"] in ("forward", "backward")]
    assert len(computed) == 4 * 8 * 2
    assert {event["name"] for event in events if event.get("cat") == "evict"} == {"0EVICT1", "0EVICT3", "0EVICT5"}


def test_sizes_as_flags(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq 1024 --vocab-size 50257".split()
    rest = ["--cluster", "h100-80g:1x4", "--pp", "4", "--gbs", "16"]
    result = document(capsys, "simulate", *sizes, *rest)
    assert result["configuration"]["vocabulary"] == 50304
    assert main(["simulate", *rest]) == 2
    assert "no --model, and --num-layers, --hidden-size" in capsys.readouterr().err
    assert "rank layers weights" in output(capsys, "simulate", *sizes, *rest)


PLAN = (
    "plan --model gpt3-96b --cluster a100-80g:4x8 --gbs 128 --attention unfused --precision fp16 --max-chunks 2 "
    "--max-micro-batch 8 --schedule 1f1b interleaved-1f1b"
).split()


def test_a_plan_compares_every_family_and_says_how_each_did(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--num-layers 16 --hidden-size 8192 --num-attention-heads 64 --seq 4096 --vocab-size 32000".split()
    small = ["plan", *sizes, "--cluster", "a100-80g:4", "--gbs", "16", "--max-micro-batch", "1", "--recompute", "none"]
    result = document(capsys, *small, "--rows", "3")
    families, first = result["families"], result["rows"][0]
    assert {family["schedule"] for family in families} == set(SEARCHED)
    assert families[0]["iteration_time_s"] == first["iteration_time_s"]
    assert families[0]["schedule"] == first["configuration"]["schedule"]
    assert sum(family["fitting"] for family in families) == result["searched"]["fitting"]
    splits = any(FAMILIES[row["configuration"]["schedule"]].splits for row in result["rows"])
    assert any("Transformer Engine" in need for need in result["needs"]) is splits
    text = output(capsys, *small, "--rows", "3")
    assert all(
        words in text for words in (*result["needs"], *(f"{family['schedule']} {family['why']}" for family in families))
    )


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The answer is the last line, and the rows printed are those of the JSON."""
    assert main(PLAN) == 0
    lines = capsys.readouterr().out.splitlines()
    result = document(capsys, *PLAN, "--rows", "3")
    rows, answer = result["rows"], result["answer"]
    first = next(line for line in lines if line.startswith("Use "))
    assert lines[-1] == first
    assert first.startswith(f"Use {answer['take']}: its iteration takes")
    figures = ["1", f"{rows[0]['iteration_time_s']:.3f}", f"{rows[0]['mfu_percent']:.2f}"]
    assert figures in [line.split()[:3] for line in lines]
    assert len(rows) == 3
    assert result["verdict"]["kind"] == "gain"
    assert result["searched"]["fitting"] > result["searched"]["only_balanced"] > 0
    assert rows[0]["only_balanced"] is True
    assert rows[0]["unbalanced_peak_bytes"] > rows[0]["stages"][0]["limit_bytes"] > rows[0]["stages"][0]["peak_bytes"]
    assert "--pipeline-model-parallel-size" in rows[0]["megatron_flags"]
    assert [row["iteration_time_s"] for row in rows] == sorted(row["iteration_time_s"] for row in rows)


def test_a_plan_without_rows_has_a_status_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """It ended with 0, so a script could not tell; 2 is for wrong arguments."""
    nothing = ["plan", "--model", "llama3-405b", "--cluster", "a100-80g:8", "--gbs", "16"]
    assert main([*nothing, "--format", "json"]) == 3
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["verdict"]["kind"], result["rows"]) == ("nothing-fits", [])
    assert result["searched"]["cut"]["branches"] > result["searched"]["configurations"] == 0
    assert printed.err == ""
    assert main([*nothing, "--model", "gpt5"]) == 2


@pytest.mark.slow
def test_many_micro_batches_are_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """65,536 took 40 seconds, ten million were refused."""
    many = ["simulate", "--model", "llama3-8b", "--cluster", "h100-80g:8", "--pp", "8", "--balance", "bpipe"]
    result = document(capsys, *many, "--gbs", "65536")
    assert result["simulated_microbatches"] == 72
    # A trace is simulated to its end.
    drawn = ("--trace", str(tmp_path / "trace.json"))
    few = document(capsys, *many, "--gbs", "2048", *drawn)
    assert few["simulated_microbatches"] == 2048
    assert result["iteration_time_s"] == pytest.approx(few["iteration_time_s"] * 32, rel=0.01)
    assert result["stages"][0]["peak_bytes"] == few["stages"][0]["peak_bytes"]
    assert "10000000 micro-batches" in output(capsys, *many, "--gbs", "10000000")


@pytest.mark.slow
def test_plan_emits_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--bpipe-memory 75.2" in output(capsys, *PLAN, "--emit-args", "2")
    flags = output(capsys, *PLAN, "--emit-args", "1").split()
    assert "--bpipe" in flags
    assert "--bpipe-memory" not in flags
    assert flags[flags.index("--pipeline-model-parallel-size") + 1] == "8"
    with pytest.raises(SystemExit, match="2"):
        main([*PLAN, "--emit-args", "0"])
    assert "--emit-args: '0' must be a whole number, at least 1" in capsys.readouterr().err


def test_no_command_loads_torch_before_it_must() -> None:
    arguments = [[*BALANCED, "--format", "json"], [*PLAN, "--rows", "1"]]
    program = (
        f"import sys; import bpipe.cli as cli; [cli.main(arguments) for arguments in {arguments!r}]; import "
        f"bpipe.commands.profile; sys.exit(' '.join({{'torch', 'megatron', 'matplotlib'}} & set(sys.modules)) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


SMALL = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq", "64", "--vocab-size", "128"]


def test_profile_starts_megatron_with_its_own_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        started.append(command)
        assert options["env"]["CUDA_VISIBLE_DEVICES"] == ""
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match="3"):
        main(["profile", *SMALL, *"--tp 2 --recompute full --device cpu --mbs 2 8 --timed-layers 3".split()])
    text = " ".join(started[0])
    assert "-m megatron.scheduling.record.profile --num-layers 4 --hidden-size 64" in text
    assert "--tensor-model-parallel-size 2" in text
    assert "--recompute-granularity full" in text
    assert "--vocab-size 128" in text
    assert text.endswith("--profile-layers 3 --profile-repeats 5 --profile-micro-batches 2 8")
    assert main(["profile", *SMALL, "--tp", "3"]) == 2
    assert "does not divide 4" in capsys.readouterr().err
    assert len(started) == 1


LLAMA = ["--swiglu", "--rms-norm", "--rotary", "--num-query-groups", "2", "--disable-bias-linear"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("model", "tensor"), [(SMALL, "1"), ([*SMALL, *LLAMA], "2")])
def test_profile_writes_what_simulate_reads(
    model: list[str], tensor: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With Megatron's own layers: a micro-batch saves what is predicted for CPUs, and times are scaled to a stage's
    number of layers."""
    path = tmp_path / "profile.json"
    cut = ["--tp", tensor, "--precision", "fp32", "--attention", "unfused"]
    timed = ["--mbs", "1", "2", "--repeats", "1", "--device", "cpu", "--output", str(path)]
    assert main(["profile", *model, *cut, *timed]) == 0
    stages = json.loads(path.read_text())["stages"]
    assert [stage["micro_batch"] for stage in stages] == [1, 2]
    keys = ("forward_s", "backward_s", "transfer_s", "output_s", "saved_bytes")
    assert all(stage[key] > 0 for stage in stages for key in keys)
    rest = [*cut, "--cluster", f"a100-80g:1x{4 * int(tensor)}", "--pp", "4", "--gbs", "32", "--mbs", "2"]
    rest += ["--num-layers", "8"]
    predicted = document(capsys, "simulate", *model, *rest, "--kernels", "cpu")["stages"]
    assert predicted[1]["activations_bytes"] == 3 * 2 * stages[1]["saved_bytes"], "three micro-batches of two layers"
    result = document(capsys, "simulate", *model, *rest, "--profile", str(path))
    assert result["iteration_time_s"] > 16 * 2 * (stages[1]["forward_s"] + stages[1]["backward_s"])
    assert main(["simulate", *model, *rest, "--profile", str(path), "--recompute", "full"]) == 2
    assert "measured with recompute none, but the setup has full" in capsys.readouterr().err
    assert main(["simulate", *model, *rest, "--profile", str(path), "--hidden-size", "128"]) == 2
    assert "measured with hidden_size 64, but the setup has 128" in capsys.readouterr().err


def test_a_plan_leaves_a_twentieth_of_every_device_free(capsys: pytest.CaptureFixture[str]) -> None:
    """It recommended rows of 78.3 of 79.1 GiB: the allocator may have to retry, and the prediction's error may be more
    than the rest."""
    asked = ["plan", "--model", "gpt3-13b", "--cluster", "a100-40g:8", "--gbs", "32", "--rows", "3"]
    asked += ["--schedule", "1f1b", "interleaved-1f1b", "--format", "json"]
    rows = json.loads(output(capsys, *asked))["rows"]
    assert {rank["limit_bytes"] for row in rows for rank in row["stages"]} == {int(37.5 * 2**30)}
    assert not any(rank["is_tight"] for row in rows for rank in row["stages"])
    (full,) = json.loads(output(capsys, *asked, "--memory", "39.5", "--rows", "1"))["rows"]
    assert max(rank["peak_bytes"] for rank in full["stages"]) > 37.5 * 2**30
    assert any(rank["is_tight"] for rank in full["stages"]), "of the device, not of the budget"
    assert full["iteration_time_s"] < rows[0]["iteration_time_s"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plan_within_a_budget_ranks_by_what_it_then_sends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over slow links the fastest row sends less than balancing could, whatever number of rows is asked for."""
    cluster = tmp_path / "slow.toml"

    def first(speed: int, batch: int, rows: int) -> tuple[int, int, int]:
        cluster.write_text(
            f'nodes = 4\ngpus_per_node = 8\n[device]\nlike = "h100-80g"\nname = "slow"\ninside_gb_per_s = {speed}\n'
        )
        words = f"--model llama-65b --gbs {batch} --memory 70 --schedule 1f1b --recompute none --balance bpipe"
        words += f" --rows {rows} --pp 2 4 8 16 --max-micro-batch 2"
        best = document(capsys, "plan", "--cluster", str(cluster), *words.split())["rows"][0]["configuration"]
        return best["pipeline"], best["data"], best["micro_batch"]

    # With one row it was once that of 16 ranks, which is faster if everything movable is evicted.
    assert first(8, 64, 1) == first(40, 128, 4) == (8, 2, 1)


@pytest.mark.parametrize(
    ("gib", "shown"),
    [
        ([51, 72, 72, 50], "51.0 72.0 72.0 50.0"),
        ([51, *[72] * 21, 71, *[72] * 9], "51.0 21 x 72.0 71.0 9 x 72.0"),
    ],
)
def test_peaks_of_many_ranks_are_counted(gib: list[int], shown: str) -> None:
    """For 64 ranks a line held 64 numbers, of which 60 were the same."""
    memory = [
        RankMemory(rank, num_gib * GIB, 0, 0, 0, 0, 0, 0, 0, 0, 80 * GIB, 80 * GIB) for rank, num_gib in enumerate(gib)
    ]
    assert peaks_text(memory) == shown
