"""What the patch table does to a real Megatron."""

import argparse
import contextlib
import inspect
import io
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import training
from megatron.training.arguments import add_megatron_arguments

import megatron.scheduling
from bpipe.balance.config import BalanceConfig
from megatron.scheduling.hooks import patches, upstream
from megatron.scheduling.options.arguments import SchedulingConfig
from tests.unit.scheduling.test_docs import table

CONFIG = SchedulingConfig(num_ranks=4, num_chunks=1, balance=BalanceConfig())


PATCHES = [patch for patch in vars(patches).values() if isinstance(patch, patches.Patch)]


def functions() -> list[object]:
    return [
        getattr(module, patch.name)
        for patch in PATCHES
        for module in (schedules, training)
        if hasattr(module, patch.name)
    ]


def check_a_class_gets_back_what_it_had() -> None:
    """A plain function in the place of a static method would be handed the instance."""
    kind = layers.LinearWithGradAccumulationAndAsyncCommunication
    before = inspect.getattr_static(kind, "backward")
    installed = patches.install({patches.LINEAR_BACKWARD: lambda backward: lambda *arguments: arguments})
    assert isinstance(inspect.getattr_static(kind, "backward"), staticmethod)
    assert kind().backward(1, 2) == kind.backward(1, 2) == (1, 2)
    installed.remove()
    assert inspect.getattr_static(kind, "backward") is before
    gone = replace(patches.LINEAR_BACKWARD, name="LinearWithout.backward")
    assert patches.differences(gone) == ["megatron.core.tensor_parallel.layers.LinearWithout.backward is missing"]


def check_removing_restores_megatrons_own() -> None:
    before = functions()
    installed = megatron.scheduling.install(CONFIG)
    assert schedules.forward_step is not before[0]
    assert functions() != before
    installed.remove()
    assert functions() == before


def check_what_a_training_has_is_given_back_once_and_told_how_it_ended() -> None:
    for failed in (False, True):
        installed, ended = patches.install({}), []
        installed.closing(ended.append)
        installed.remove(failed=failed)
        installed.remove(failed=True)
        assert ended == [failed]


def check_signatures_are_those_that_were_read() -> None:
    assert [problem for patch in (*PATCHES, *patches.LEAVES) for problem in patches.differences(patch)] == []


def check_another_signature_is_refused_with_nothing_replaced() -> None:
    before = functions()
    changed = replace(patches.BACKWARD_STEP, parameters=("input_tensor", "output_tensor", "gradient", "config"))
    missing = replace(patches.FORWARD_STEP, name="forward_leap")
    try:
        patches.install({patches.FORWARD_STEP: lambda f: print, changed: lambda f: print, missing: lambda f: print})
    except RuntimeError as error:
        message = str(error)
    assert f"is not the one bpipe was written against ({upstream.TRIED_VERSIONS[0]})" in message
    assert "schedules.backward_step: new parameters output_tensor_grad and missing parameters gradient" in message
    assert "schedules.forward_leap is missing" in message
    assert functions() == before


def said_with_version(version: str) -> str:
    """What two installations print if the running megatron-core reports this version."""
    printed = io.StringIO()
    upstream.remark.cache_clear()
    with mock.patch.object(megatron.core, "__version__", version), contextlib.redirect_stdout(printed):
        for _ in range(2):
            patches.install({patches.FORWARD_STEP: lambda function: function}).remove()
    return printed.getvalue()


def check_the_megatron_that_runs_is_named_once() -> None:
    place = Path(megatron.core.__file__).parent
    tried = f"bpipe: megatron-core 0.19.2 from {place}\n"
    assert said_with_version("0.19.2") == tried
    assert said_with_version("0.19.2+a1b2c3d") == tried.replace("0.19.2 from", "0.19.2+a1b2c3d from"), (
        "a build of a version that was tried"
    )
    assert said_with_version("0.20.0+a1b2c3d") == (
        f"bpipe: megatron-core 0.20.0+a1b2c3d from {place}\n"
        "bpipe: megatron-core 0.20.0 is not among the tested versions (0.19.2); the functions that bpipe replaces "
        "have the expected parameters\n"
    )


def check_what_is_only_observed_may_have_other_parameters() -> None:
    """0.18 calls the trainer's functions with fewer parameters, but we read none of them."""
    fewer = replace(patches.BACKWARD_STEP, parameters=("config",), observes=True)
    assert patches.differences(fewer) == []
    assert "missing parameters grad" in patches.differences(replace(fewer, parameters=("config", "grad")))[0]


def check_further_parameters_need_defaults() -> None:
    """Megatron's main adds some, each with a default, and our own calls leave them out."""

    def later(input_tensor, output_tensor, output_tensor_grad, config, scale=None): ...  # type: ignore[no-untyped-def]

    def needed(input_tensor, output_tensor, output_tensor_grad, config, scale): ...  # type: ignore[no-untyped-def]

    for patch in (patches.BACKWARD_STEP, replace(patches.BACKWARD_STEP, hands_on=False)):
        with mock.patch.object(schedules, "backward_step", later):
            assert patches.differences(patch) == []
        with mock.patch.object(schedules, "backward_step", needed):
            assert patches.differences(patch)[0].endswith("backward_step: new parameters scale")


def check_a_further_parameter_is_handed_on_or_has_its_default() -> None:
    """A wrapper with a fixed signature must not ignore a parameter that it does not know."""

    def later(input_tensor: str, output_tensor: str, output_tensor_grad: str, config: str, scale: int = 1) -> str:
        return f"{input_tensor} {config} {scale}"

    def wrap(step: Callable[..., str]) -> Callable[..., str]:
        return lambda input_tensor, output_tensor, output_tensor_grad, config, **more: step(
            input_tensor, output_tensor, output_tensor_grad, config, **more
        )

    with mock.patch.object(schedules, "backward_step", later):
        installed = patches.install({patches.BACKWARD_STEP: wrap})
        assert schedules.backward_step("in", "out", "gradient", "config", scale=2) == "in config 2"
        installed.remove()
        strictly = replace(patches.BACKWARD_STEP, hands_on=False)
        installed = patches.install({strictly: lambda step: lambda a, b, c, config: step(a, b, c, config)})
        for default in ((), (1,)):
            assert schedules.backward_step("in", "out", "gradient", "config", *default) == "in config 1"
        for value in (2, None, torch.ones(2)):
            with pytest.raises(upstream.Unfit, match=r"^backward_step: bpipe does not know its parameter scale, which"):
                schedules.backward_step("in", "out", "gradient", config="config", scale=value)
        installed.remove()


def check_a_roll_may_be_asked_for_no_sum() -> None:
    """Megatron's main of 2026-08-22 has `return_sum`, with which slices were refused as unfit."""

    def roll_tensor(
        tensor: str,
        shifts: int = -1,
        dims: int = -1,
        cp_group: Any = None,
        packed_seq_params: Any = None,
        return_sum: bool = True,
    ) -> tuple[str, int | None]:
        return tensor, 1 if return_sum else None

    with mock.patch.object(multi_token_prediction, "roll_tensor", roll_tensor):
        installed = patches.install({patches.ROLL: lambda roll: lambda tensor, **more: roll(tensor, **more)})
        assert multi_token_prediction.roll_tensor("row", return_sum=False) == ("row", None)
        installed.remove()


def check_a_script_that_imported_a_name_asks_the_replacement() -> None:
    """Public scripts import `is_pipeline_last_stage` by its name, before anything is replaced."""
    own = parallel_state.is_pipeline_last_stage
    script = ModuleType("a_script")
    vars(script)["is_pipeline_last_stage"] = own
    with mock.patch.dict(sys.modules, {"a_script": script}):
        installed = patches.install({patches.LAST_STAGE: lambda ask: lambda **arguments: "ours"})
        assert script.is_pipeline_last_stage() == parallel_state.is_pipeline_last_stage() == "ours"
        installed.remove()
    assert script.is_pipeline_last_stage is parallel_state.is_pipeline_last_stage is own


# Parts of the names of flags that may affect the pipeline, or what a forward saves for its backward.
NEAR = re.compile(
    "pipeline|virtual|micro-?batch|(global|rampup|^-)-batch-size|step-batch|activation|recompute|offload|p2p|overlap|(context|tensor|sequence)-.*parallel|cuda-graph|fsdp"
    "|fp8|fp4|expert|moe|wgrad|dgrad|mtp|packing|inprocess|rerun|fake|perform-rl|sft|yaml|shards|ring-exchange|latent-attention|cp-comm"
    "|grad-reduce|param-gather|parallel-layout|per-dp-cp-rank|inter-document"
)


# Flags that sound as if they affected the pipeline or its activations, but do not, or not by themselves.
HARMLESS = {
    "an iteration is planned for each number of micro-batches": (
        "--micro-batch-size --global-batch-size --decrease-batch-size-if-needed --train-samples"
    ),
    "Megatron 0.19.2 ignores the first and refuses the others itself": (
        "--rampup-batch-size --batch-size --checkpoint-activations"
    ),
    "transfers have process groups of their own": (
        "--pipeline-model-parallel-comm-backend --high-priority-stream-groups"
    ),
    "they set what a layer computes, or makes copies of": (
        "--cp-comm-type --hierarchical-context-parallel-sizes --max-seqlen-per-dp-cp-rank --mtp-loss-scaling-factor "
        "--mtp-detach-heads --mtp-hybrid-override-pattern --activation-func-clamp-value --use-te-activation-func "
        "--no-dsa-* --disable-bias-linear --position-embedding-type --save-activations-interval "
        "--save-wgrads-interval --save-dgrads-interval --mtp-standalone"
    ),
    "gradients, weights and the optimizer's state never move": (
        "--grad-reduce-in-bf16 --optimizer-cpu-offload --optimizer-cuda-graph --optimizer-offload-fraction "
        "--use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d"
    ),
    "a step that runs again is a complete iteration": "--rerun-mode",
    "they set how experts route and compute; those that are guarded are in the table of features": (
        "--moe-* --expert-* --use-grouped-gemm-for-shared-expert --overlap-dispatch-backward-with-experts-wgrad "
        "--ep-overlap-early-attn-memory-release --save-tokens-per-expert-interval"
    ),
    "they have no effect without a feature that is guarded or refused": (
        "--fp8-* --no-fp8-* --fp4-* --keep-fp8-transpose-cache --reuse-grad-buf-for-mxfp8-param-ag --cuda-graph-* "
        "--external-cuda-graph --delay-offload-until-cuda-graph --cpu-offloading-retain-pinned-cpu-buffers "
        "--offload-modules --min-offloaded-tensor-size --delta-offload-bytes-across-pp-ranks "
        "--activation-offload-fraction --fine-grained-offloading-* --tp-comm-* --no-tp-comm-* --fsdp-* "
        "--megatron-fsdp-* --torch-fsdp2-* --no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load "
        "--inprocess-* --rl-* --no-rl-* --sft-tokenizer-prompt-format"
    ),
    "they affect generation, not training": "--inference-* --no-inference-* --decode-only-cuda-graphs",
}


def check_every_flag_near_the_pipeline_is_in_a_table() -> None:
    """A flag that a new Megatron adds must be reviewed before it is taken for harmless."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    cells = [
        *(cell for row in table("By Megatron's loops") for cell in row[1:2]),
        *(row[2] for row in table("What is refused")),
    ]
    # Our own flags, which remedies name, are not Megatron's.
    patterns = [flag for cell in cells for flag in re.findall(r"`(--(?!bpipe-)[^ `]+)", cell)] + " ".join(
        HARMLESS.values()
    ).split()
    missing = []
    for action in parser._actions:
        near = [flag for flag in action.option_strings if NEAR.search(flag)]
        if near and not any(fnmatch(flag, pattern) for flag in action.option_strings for pattern in patterns):
            missing.append(near[0])
    assert not missing, (
        f"docs/supported.md and HARMLESS say nothing of {missing}: are they supported, refused, or do they make no difference?"
    )
    flags = {flag for action in parser._actions for flag in action.option_strings}
    gone = [pattern for pattern in patterns if not any(fnmatch(flag, pattern) for flag in flags)]
    assert not gone, f"docs/supported.md or HARMLESS names flags that Megatron does not have: {gone}"


def check_the_tested_version_lacks_no_setting() -> None:
    """A setting that a new Megatron renames would never be refused again."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    # Derived from flags when the arguments are validated.
    fields = dict.fromkeys(("gtp_weight_remat_size", "expert_gtp_weight_remat_size"), 1)
    arguments = argparse.Namespace(**{**vars(parser.parse_args([])), **fields})
    configuration = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    switched_on = ("", "mtp_num_layers", "moe_aux_loss_coeff", "recompute_granularity", "cuda_graph_impl")
    for source, experts in ((arguments, "num_experts"), (configuration, "num_moe_experts")):
        for name in (*switched_on, experts):
            if name:
                setattr(source, name, 2)
            assert upstream.absent(source, configuration=source is configuration) == [], name
    upstream.require(configuration)
