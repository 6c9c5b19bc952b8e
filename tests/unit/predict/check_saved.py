"""Compare what Megatron's own layers save on a CPU with predictions for kernels `cpu`: storages and parameters must
agree.

In a process of its own, because importing Megatron takes seconds. Other tensor-parallel ranks are fake. Prints the
number of cases; exits with 0 if all agree.
"""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
warnings.filterwarnings("ignore")

import torch

from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.predict.activations import moved_bytes, stage_saved
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layer_variants import Experts, Routing
from bpipe.predict.layout import Setup
from bpipe.predict.model import Model, gpt, llama
from bpipe.predict.states import stage_parameters
from bpipe.runtime import capture
from megatron.scheduling.record import one_stage
from megatron.scheduling.start import startup

with contextlib.redirect_stdout(io.StringIO()):
    startup.prepare()

from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron.scheduling.options.flags import add_arguments

GPT = gpt("gpt", 4, 64, 4, 256, 32)
LLAMA = llama("llama", 4, 64, 4, 2, 160, 256, 32, 16)
GROUPED = replace(GPT, name="grouped", num_attention_heads=8, num_query_groups=4, kv_channels=16)
ONE_GROUP = replace(GROUPED, name="one group", num_query_groups=1)
ROTARY = replace(GPT, name="rotary", learned_positions=False)

FIRST, INNER, LAST = 0, 1, 3


def setup(
    model: Model,
    precision: str,
    recompute: str,
    tensor: int,
    sequence_parallel: bool,
    micro_batch: int,
    pipeline: int = 4,
) -> Setup:
    cluster, layers = parse_cluster(f"a100-80g:{pipeline * tensor}"), (model.num_layers // pipeline,) * pipeline
    return Setup(
        *(model, cluster, tensor, pipeline, micro_batch, 12, model.sequence, layers, recompute, "unfused"),
        precision=precision,
        sequence_parallel=sequence_parallel,
        kernels="cpu",
    )


def cases() -> list[tuple[Setup, tuple[int, ...]]]:
    """Return setups, and the stages of each to compare."""
    cuts = ((1, True), (2, True), (2, False))
    result = [
        (setup(GPT, precision, recompute, t, sp, 2), (FIRST, INNER, LAST))
        for precision, recompute, (t, sp) in product(("fp32", "bf16"), ("none", "selective", "full"), cuts)
    ]
    for precision, recompute, (t, sp) in product(("fp32", "bf16"), ("none", "selective"), cuts[:2]):
        result.append((setup(LLAMA, precision, recompute, t, sp, 1), (FIRST, INNER, LAST)))
    for model, recompute, micro_batch in product((GROUPED, ONE_GROUP, ROTARY), ("none", "selective"), (1, 2)):
        result.append((setup(model, "fp32", recompute, 1, True, micro_batch), (INNER,)))
    result += experts()
    result += recomputed()
    result += further()
    result.append((setup(replace(LLAMA, dropout=True), "bf16", "full", 1, True, 2), (FIRST, LAST)))
    result.append((setup(replace(GPT, gated=True, rms_norm=True), "bf16", "none", 1, True, 3, pipeline=1), (0,)))
    return result


def experts() -> list[tuple[Setup, tuple[int, ...]]]:
    """Each way of routing, and some models with experts only in some layers.

    Eight experts of another size than the MLP.
    """
    eight = Experts(8, 3, 96)
    routings = [(eight, Routing()), (eight, Routing(dispatcher="allgather")), (replace(eight, sigmoid=True), Routing())]
    routings += [(replace(eight, top_k=1, sigmoid=True), Routing()), (eight, Routing(capacity=1.0, padded=True))]
    routings += [
        (replace(eight, shared_size=128), Routing()),
        (replace(eight, shared_size=128, shared_gate=True), Routing()),
    ]
    result = []
    for (variant, routing), precision in product(routings, ("fp32", "bf16")):
        made_setup = setup(LLAMA, precision, "none", 1, True, 2)
        result.append(
            (replace(made_setup, model=replace(LLAMA, name=f"{variant}", experts=variant), routing=routing), (INNER,))
        )
    mixed = replace(LLAMA, name="some with experts", num_layers=8, experts=replace(eight, pattern=(0, 1)))
    result += [
        (setup(mixed, "bf16", recompute, 1, True, 1), (FIRST, LAST)) for recompute in ("none", "selective", "full")
    ]
    return result


def further() -> list[tuple[Setup, tuple[int, ...]]]:
    """Further tokens on the last stage, or on the one before, with the final norm anywhere."""
    rotary = replace(ROTARY, tied_embedding=False)
    models = (
        replace(rotary, name="gpt and a token", mtp_num_layers=1),
        replace(LLAMA, name="llama and two tokens", mtp_num_layers=2),
        replace(ROTARY, name="gpt and two tokens by one layer", mtp_num_layers=2, mtp_use_repeated_layer=True),
    )
    kinds = (
        ("fp32", "none", 1, True),
        ("bf16", "selective", 2, True),
        ("bf16", "full", 2, False),
        ("bf16", "full:block:1", 1, True),
        ("bf16", "selective:layernorm", 2, True),
    )
    result = [(setup(model, *kind, 2), (FIRST, LAST)) for model, kind in product(models, kinds)]
    for layers, mtp_stage in (((2, 2, 0, 0), 2), ((2, 1, 1, 0), 2), ((1, 1, 2, 0), None)):
        base = setup(models[1], "bf16", "none", 1, True, 1)
        result.append((replace(base, layers=layers, mtp_stage=mtp_stage), (FIRST, INNER, 2, LAST)))
    return result


def recomputed() -> list[tuple[Setup, tuple[int, ...]]]:
    """Some of a stage's three layers, several layers at once, and one or several parts of layers."""
    result = []
    for model, recompute in product(
        (GPT, LLAMA), ("full:block:1", "full:block:2", "full:block:5", "full:uniform:2", "full:uniform:3")
    ):
        deep = replace(model, name=f"{model.name} of 12", num_layers=12)
        result.append((setup(deep, "bf16", recompute, 1, True, 2), (FIRST, INNER, LAST)))
    result.append((setup(replace(GPT, num_layers=12), "fp32", "full:block:1", 2, True, 1), (FIRST, LAST)))
    plain, parts = (
        replace(GPT, name="gpt without biases", linear_bias=False),
        ("mlp", "layernorm", "core_attn+mlp+layernorm"),
    )
    for precision, part, (t, sp) in product(("fp32", "bf16"), parts, ((1, True), (2, True), (2, False))):
        result.append((setup(plain, precision, f"selective:{part}", t, sp, 2), (INNER,)))
    for precision, part in product(("fp32", "bf16"), parts):
        result.append((setup(LLAMA, precision, f"selective:{part}", 1, True, 2), (FIRST, LAST)))
    result += [(setup(GPT, "bf16", "selective:layernorm", 2, True, 1), (FIRST, LAST))]
    eight = Experts(8, 3, 96, shared_size=128, shared_gate=True)
    of_experts = ("moe", "shared_experts", "layernorm", "moe+layernorm", "core_attn+mlp+layernorm+shared_experts")
    for part, pattern in product(of_experts, ((1,), (0, 1))):
        model = replace(LLAMA, name=f"experts {pattern}", num_layers=8, experts=replace(eight, pattern=pattern))
        result.append((setup(model, "bf16", f"selective:{part}", 1, True, 2), (INNER,)))
    mixed = replace(LLAMA, name="some with experts", num_layers=12, experts=Experts(8, 3, 96, pattern=(0, 1)))
    return [
        *result,
        *(
            (setup(mixed, "bf16", recompute, 1, True, 1), (FIRST, INNER))
            for recompute in ("full:block:1", "full:uniform:2")
        ),
    ]


def agree(setup: Setup, measured: Counter[int], predicted: Counter[int]) -> bool:
    """Whether storages agree; with experts only their sum, because the router decides how many tokens each gets."""
    if setup.model.experts is None:
        return measured == predicted
    return sum(size * num for size, num in measured.items()) == sum(size * num for size, num in predicted.items())


def saved_by_megatron(args: Any, stage: int) -> tuple[Counter[int], int, int]:
    """Return the number of storages of each size, the bytes that can be evicted, and the number of parameters.

    What is received counts, although the loop may hold it, too.
    """
    MTPLossLoggingHelper.tracker.clear()
    with one_stage.chunks(args, stage) as (model,):
        runner = one_stage.Runner(args, model, args.micro_batch_size)
        output = runner.forward()
        result = capture.find([output.grad_fn], runner.inputs, torch.device("cpu"))
        received = {tensor.untyped_storage().data_ptr() for tensor in runner.inputs if tensor is not None}
        saved = Counter(storage.nbytes for storage in result if storage.alone or storage.storage.data_ptr() in received)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return saved, sum(storage.nbytes for storage in result if storage.alone), parameters


def main() -> int:
    num_cases = num_wrong = 0
    for case, stages in cases():
        with contextlib.redirect_stdout(io.StringIO()):
            args = one_stage.parse([*megatron_flags(case), "--vocab-size", str(case.model.vocabulary)], add_arguments)
        for stage in stages:
            with contextlib.redirect_stdout(io.StringIO()):
                result, movable, parameters = saved_by_megatron(args, stage)
            predicted: Counter[int] = Counter()
            for row in stage_saved(case, stage):
                predicted[row.nbytes] += row.num
            num_cases += 1
            counts = movable == moved_bytes(case, stage, 1), parameters == stage_parameters(case)[stage]
            if not agree(case, result, predicted) or counts != (True, True):
                num_wrong += 1
                print(
                    f"{case.model.name} {case.precision} {case.recompute} t={case.tensor} b={case.micro_batch} stage {stage}:"
                )
                print(f"  besides {dict(result - predicted)}, missing {dict(predicted - result)}")
                print(f"  {movable} move, {parameters} parameters")
    print(f"{num_cases} cases, {num_wrong} differ")
    return 1 if num_wrong or not num_cases else 0


if __name__ == "__main__":
    sys.exit(main())
