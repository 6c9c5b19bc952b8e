"""Which of NVIDIA's 173 pretraining recipes with pipeline parallelism are supported, and other published launches.

tests/data has the settings that decide, from Megatron-Bridge as of 2026-08-22. Where a recipe's graphs are `getattr`,
its source takes the model's own setting, which is "none" for those models. Graphs of layers without a scope are of
whole layers, as in Megatron and as that recipe's own comment says.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from bpipe.cli import main
from bpipe.config.features.table import State
from bpipe.config.launch.capture import write_launches
from bpipe.plan.refusals import states_of_launch, worst

ROOT = Path(__file__).resolve().parents[3]
LINES = (ROOT / "tests/data/recipes_2026.csv").read_text().splitlines()
RECIPES = {row["recipe"]: row for row in csv.DictReader(line for line in LINES if not line.startswith("#"))}


def flags_of(recipe: dict[str, str]) -> list[str]:
    """Return the flags of a recipe that decide whether it is supported."""
    precision = recipe["precision"]
    fewer_bits = ["--fp8-format", "hybrid"] * precision.startswith("fp8") + ["--fp4-format", "e2m1"] * (
        precision.startswith("nvfp4")
    )
    sizes = {
        "--tensor-model-parallel-size": recipe["tensor"],
        "--pipeline-model-parallel-size": recipe["pipeline"],
        "--context-parallel-size": recipe["context"],
        "--num-virtual-stages-per-pipeline-rank": recipe["chunks"],
    }
    flags = ["--bf16", *fewer_bits, *(word for flag, value in sizes.items() if value for word in (flag, value))]
    if recipe["expert"]:
        flags += ["--num-experts", "64", "--expert-model-parallel-size", recipe["expert"]]
        dispatcher = "flex" if recipe["flex_backend"] else "alltoall"
        flags += ["--moe-token-dispatcher-type", dispatcher]
    if recipe["cuda_graph_impl"] not in ("", "getattr"):
        flags += ["--cuda-graph-impl", recipe["cuda_graph_impl"]]
        flags += ["--cuda-graph-modules", *recipe["cuda_graph_scope"].split()] if recipe["cuda_graph_scope"] else []
    for name, flag in (
        ("tp_comm_overlap", "--tp-comm-overlap"),
        ("expert_overlap", "--overlap-moe-expert-parallel-comm"),
        ("activation_offload", "--fine-grained-activation-offloading"),
    ):
        flags += [flag] * bool(recipe[name])
    if recipe["recompute_modules"]:
        flags += ["--recompute-granularity", "selective", "--recompute-modules", *recipe["recompute_modules"].split()]
    return [*flags, "--disable-bias-linear"]


STATES = {name: states_of_launch(flags_of(recipe)) for name, recipe in RECIPES.items()}


def test_every_other_recipe_has_its_reason() -> None:
    """Only graphs of whole layers keep a recipe out."""
    reasons = Counter(
        feature.name for features in STATES.values() for feature in features if feature.state is State.REFUSED
    )
    assert reasons == {"CUDA graphs of whole layers": 1}
    for features in STATES.values():
        for feature in features:
            assert feature.reason
            assert feature.remedy
            assert "never tried" not in feature.reason


def test_without_what_is_refused_every_recipe_trains() -> None:
    """The remedies work: without these settings every recipe is supported or guarded."""
    for name, recipe in RECIPES.items():
        without = dict(recipe)
        if recipe["cuda_graph_impl"] != "full_iteration" and not recipe["cuda_graph_scope"]:
            without["cuda_graph_impl"] = ""
        assert worst(states_of_launch(flags_of(without))) is not State.REFUSED, name


# Launches of Megatron-LM's own examples and functional tests, by the flags that decide. Models that no flag names, such
# as vision models, are not covered.
UPSTREAM = {
    row["path"]: row["flags"].split()
    for row in csv.DictReader(
        line for line in (ROOT / "tests/data/launches_2026.csv").read_text().splitlines() if not line.startswith("#")
    )
}
# The only reasons to refuse one.
KEPT_OUT = {
    "a YAML configuration",
    "local CUDA graphs",
    "reinforcement learning",
    "activation offloading",
    "combined 1F1B without a pipeline",
}


def test_megatrons_own_launches_train_or_are_told_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    states: Counter[str] = Counter()
    for path, flags in UPSTREAM.items():
        status = main(["check-launch", "--format", "json", "--", *flags])
        result = json.loads(capsys.readouterr().out)
        refused = {feature["name"] for feature in result["features"] if feature["state"] == "refused"}
        assert refused <= KEPT_OUT, path
        assert bool(refused) == (result["state"] == "refused") == (status == 2), path
        states[result["state"]] += 1
    assert len(UPSTREAM) >= 20
    sentence = re.search(
        r"Of (\d+) launches .* calls (\d+) supported, (\d+) guarded and (\d+) refused",
        " ".join((ROOT / "docs/supported.md").read_text().split()),
    )
    assert sentence is not None
    assert tuple(map(int, sentence.groups())) == (len(UPSTREAM), *(states[state] for state in ORDER))


# Launches as scripts write them: dense, experts, hybrid, latent attention, long context and 8 bits.
DENSE = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --bf16"
PIPE = "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 8"
MIXTURE = f"{DENSE} --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear"
UNTIED = "--untie-embeddings-and-output-weights"
LAUNCHES = {
    f"{DENSE} {PIPE}": "supported",
    f"{DENSE} {PIPE} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather": "supported",
    f"{DENSE} {PIPE} --num-layers-per-virtual-pipeline-stage 2": "supported",
    f"{DENSE} {PIPE} --recompute-activations --use-flash-attn": "supported",
    f"{DENSE} {PIPE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1": "supported",
    f"{DENSE} {PIPE} --fp8-format hybrid --fp8-amax-compute-algo max --fp8-param-gather": "guarded",
    f"{DENSE} {PIPE} --tp-comm-overlap": "guarded",
    f"{DENSE} {PIPE} --bpipe --bpipe-strict --tp-comm-overlap": "refused",
    f"{DENSE} {PIPE} --context-parallel-size 2 --cp-comm-type a2a": "supported",
    f"{MIXTURE} {PIPE} --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall": "supported",
    f"{MIXTURE} {PIPE} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep": "guarded",
    f"{MIXTURE} {PIPE} --moe-shared-expert-intermediate-size 2048 --moe-shared-expert-overlap": "guarded",
    f"{MIXTURE} {PIPE} --multi-latent-attention --mtp-num-layers 1": "supported",
    f"{MIXTURE} {PIPE} --overlap-moe-expert-parallel-comm --delay-wgrad-compute": "guarded",
    f"{MIXTURE} {PIPE} --overlap-moe-expert-parallel-comm --bpipe-schedule zb-v": "refused",
    f"{MIXTURE} {PIPE} --cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router": "guarded",
    f"{MIXTURE} {PIPE} --cuda-graph-impl transformer_engine --cuda-graph-modules attn moe": "refused",
    f"{DENSE} {PIPE} --cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp": "refused",
    f"{DENSE} {PIPE} --cuda-graph-impl local": "refused",
    f"{DENSE} {PIPE} --cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad": "guarded",
    f"{DENSE} {PIPE} --bpipe --cuda-graph-impl full_iteration --bpipe-verify all": "refused",
    f"{DENSE} {PIPE} --use-megatron-fsdp": "refused",
    f"{DENSE} {PIPE} --cpu-offloading-num-layers 2": "refused",
    f"{DENSE} {PIPE} --hybrid-layer-pattern M-M*-M-": "supported",
    f"{DENSE} {PIPE} --hybrid-layer-pattern M-M*-M- --bpipe --bpipe-schedule v-half": "supported",
    f"{DENSE} {PIPE} --bpipe-schedule zb-h1 --fp8-format hybrid": "supported",
    f"{DENSE} {PIPE} --bpipe --bpipe-vocabulary 1 --mtp-num-layers 1": "refused",
    f"{DENSE} {PIPE} --bpipe --bpipe-vocabulary 1 --mtp-num-layers 1 {UNTIED}": "supported",
}  # fmt: skip


@pytest.mark.parametrize("launch", LAUNCHES)
def test_launches_are_told_before_they_start(launch: str, capsys: pytest.CaptureFixture[str]) -> None:
    state = LAUNCHES[launch]
    status = main(["check-launch", "--format", "json", "--", *launch.split()])
    result = json.loads(capsys.readouterr().out)
    assert result["state"] == state
    assert status == (2 if state == "refused" else 0)
    assert result["state"] == max(
        [feature["state"] for feature in result["features"]] or ["supported"], key=ORDER.index
    )
    assert all(feature["reason"] for feature in result["features"])
    assert (
        main(["check-launch", "--", "torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", *launch.split()]) == status
    )
    assert f"this launch is {state}" in capsys.readouterr().out


ORDER = ("supported", "guarded", "refused")


def test_a_captured_launch_is_checked_and_may_have_flags_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = "torchrun pretrain_gpt.py --num-layers 32 --tp-comm-overlap --fp8-format hybrid --my-own 8"
    file = tmp_path / "launch.json"
    file.write_text(write_launches([{"words": launch.split(), "environment": {}}]))
    assert main(["check-launch", "--launch", str(file)]) == 0
    printed, warned = capsys.readouterr()
    assert warned == "from the launch: Megatron's parser does not know --my-own; ignore this if your script adds it\n"
    assert re.search(r"^guarded +FP8 ", printed, re.MULTILINE)
    assert re.search(r"^guarded +overlapped tensor-parallel communication ", printed, re.MULTILINE)
    assert main(["check-launch"]) == 2
    assert "name the launch" in capsys.readouterr().err
    assert main(["check-launch", "--", "--bpipe-schedule", "mine.csv"]) == 2
    assert "name a family" in capsys.readouterr().err


def test_check_launch_names_flags_that_megatron_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-launch", "--", "--num-layerz", "8"]) == 0
    printed = capsys.readouterr()
    assert (
        "does not know --num-layerz (did you mean '--num-layers'?); ignore this if your script adds it" in printed.err
    )
    assert printed.out.endswith(
        "this launch is supported: none of its flags is guarded or refused (docs/supported.md)\n"
    )
    assert main(["check-launch", "--", "--bpipe-schedul", "1f1b"]) == 2
    assert "unknown flag --bpipe-schedul, did you mean '--bpipe-schedule'?" in capsys.readouterr().err
