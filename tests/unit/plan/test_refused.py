"""A plan prints no row that the trainer refuses by its own table of features."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bpipe.cli import main
from bpipe.config.features.table import FEATURES, PLACED, SHARDED, SLICED
from bpipe.plan.refusals import Launchable, refused, runs_ours, without_overlap
from bpipe.plan.search import search
from bpipe.plan.space import Space
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layout import EVENLY
from bpipe.predict.model import gpt
from bpipe.predict.training import Switches

# Flags of a launch that use each feature. Features that only a model's configuration sets have none.
FLAGS = {
    "CUDA graphs of an iteration": ("--cuda-graph-impl", "full_iteration"),
    "differing sizes in a CUDA graph of an iteration": (
        "--cuda-graph-impl",
        "full_iteration",
        "--bpipe-differing-sizes",
    ),
    "checks of replays": ("--cuda-graph-impl", "full_iteration", "--bpipe-verify", "all"),
    "shards of the vocabulary or slices in a CUDA graph of an iteration": (
        *("--cuda-graph-impl", "full_iteration", "--bpipe-slices", "2"),
    ),
    "two pipelines in a CUDA graph of an iteration": (
        *("--cuda-graph-impl", "full_iteration", "--bpipe-schedule", "chimera"),
    ),
    "CUDA graphs of whole layers": ("--cuda-graph-impl", "transformer_engine"),
    "local CUDA graphs": ("--cuda-graph-impl", "local"),
    "CUDA graphs of parts of layers": ("--cuda-graph-impl", "transformer_engine", "--cuda-graph-modules", "attn"),
    "FP8": ("--fp8-format", "hybrid"),
    "FP4": ("--fp4-format", "e2m1"),
    "activation offloading": ("--cpu-offloading-num-layers", "1"),
    "fine-grained activation offloading": ("--fine-grained-activation-offloading",),
    "fine-grained offloading in our loop": ("--fine-grained-activation-offloading",),
    "combined 1F1B": ("--overlap-moe-expert-parallel-comm",),
    "combined 1F1B in our loop": ("--overlap-moe-expert-parallel-comm",),
    "combined 1F1B without a pipeline": ("--overlap-moe-expert-parallel-comm",),
    "paged stash": ("--moe-paged-stash",),
    "packed sequences on context-parallel ranks": ("--sft", "--context-parallel-size", "2"),
    "the flex dispatcher of experts": ("--num-experts", "8", "--moe-token-dispatcher-type", "flex"),
    "overlapped shared experts": ("--moe-shared-expert-overlap",),
    "hybrid context parallelism": ("--hybrid-context-parallel",),
    "distributed saved activations": ("--distribute-saved-activations",),
    "recomputation of the MLP with biases": (
        "--recompute-granularity",
        "selective",
        "--recompute-modules",
        "core_attn",
        "mlp",
    ),
    "experts with biases and a fused activation": ("--num-experts", "8", "--no-bias-dropout-fusion"),
    "grouped experts with biases and a fused dropout": ("--num-experts", "8", "--moe-grouped-gemm", "--swiglu"),
    "overlapped tensor-parallel communication": ("--tp-comm-overlap",),
    "ring exchange": ("--use-ring-exchange-p2p",),
    "FSDP": ("--use-megatron-fsdp",),
    "in-process restart": ("--inprocess-restart",),
    "reinforcement learning": ("--perform-rl-step",),
    "a fake process group": ("--fake-process-group",),
    "a YAML configuration": ("--yaml-cfg", "run.yaml"),
    "checkpoints by rank": ("--save", "here", "--ckpt-format", "torch"),
    "local checkpoints": ("--non-persistent-ckpt-type", "local"),
    "further tokens apart from the loss": ("--mtp-num-layers", "1", "--pipeline-model-parallel-layout", "Et|tm|L"),
    "skipped iterations": ("--iterations-to-skip", "3", "4"),
    "further tokens without a whole embedding": ("--mtp-num-layers", "1"),
    "heads of further tokens that train alone": ("--mtp-num-layers", "1", "--mtp-detach-heads"),
    "deferred gradients of the output layer": ("--defer-embedding-wgrad-compute",),
    "models without weights at first": ("--init-model-with-meta-device",),
    "context parallelism": ("--context-parallel-size", "2"),
    "packed sequences": ("--sft",),
    "hybrid models in slices": ("--hybrid-layer-pattern", "M-M*"),
    "other attention": ("--experimental-attention-variant", "gated_delta_net"),
    "fused softmax": ("--transformer-impl", "local", "--bf16"),
    "one layer for all further tokens": ("--mtp-num-layers", "2", "--mtp-use-repeated-layer"),
    "further tokens in a layout of slices": ("--mtp-num-layers", "1", "--pipeline-model-parallel-layout", "t|t"),
    "capacity of experts": ("--num-experts", "8", "--moe-expert-capacity-factor", "2"),
    "routing of a whole micro-batch": ("--num-experts", "8", "--moe-router-load-balancing-type", "sinkhorn"),
    "losses of experts computed again": (
        *("--num-experts", "8", "--moe-aux-loss-coeff", "0.01"),
        *("--recompute-granularity", "full"),
    ),
    "losses of experts by token": (
        *("--num-experts", "8", "--moe-aux-loss-coeff", "0.01", "--calculate-per-token-loss"),
    ),
    "fused rotary positions of latent attention": ("--multi-latent-attention",),
}
# Features of a launch without flags, and flags that avoid them.
UNLESS = {"Transformer Engine's attention": ("--transformer-impl", "local")}
# Set only in a model's configuration, by Megatron from flags with which no launch is read, or by a flag of ours.
WITHOUT_A_FLAG = {
    "further tokens in slices and shards",
    "variable lengths in shards",
    "variable lengths in slices",
    "partial recomputation of micro-batches",
    "weights sharded beyond tensor parallelism",
}
EVERY = (*FEATURES, *PLACED, *SHARDED, *SLICED)
SPACE = Space(
    gpt("small", 16, 4096, 32, vocabulary=131072, sequence=2048),
    parse_cluster("a100-80g:8"),
    16,
    2048,
    recompute=("none",),
    schedules=("1f1b", "interleaved-1f1b", "grouped-interleaved", "v-half"),
    max_micro_batch=2,
    max_chunks=2,
    vocabulary_parallel=("none", "1"),
)
OVERLAP = Switches(tp_comm_overlap=True)


def test_every_refusal_has_its_flags() -> None:
    assert {refusal.name for refusal in EVERY} == FLAGS.keys() | WITHOUT_A_FLAG | UNLESS.keys()


def test_no_row_is_one_that_the_trainer_refuses() -> None:
    """Rows with shards, another schedule or balancing keep guarded features, unless the launch refuses these."""
    rows = [row.setup for row in search(replace(SPACE, switches=OVERLAP), 60).rows]
    ours = [setup for setup in rows if runs_ours(setup) and setup.tensor > 1]
    assert any(setup.is_sharded for setup in ours)
    assert [setup for setup in rows if refused(setup)] == []
    assert all(setup.switches.tp_comm_overlap for setup in rows if setup.tensor > 1)
    strict = (("--bpipe-strict", ""),)
    balanced = replace(next(setup for setup in ours if not setup.is_sharded), balance=EVENLY)
    assert Launchable(()).of(balanced) == balanced
    assert Launchable(strict).of(balanced) == without_overlap(balanced)
    # Without balancing nothing moves, so nothing is refused.
    assert Launchable(strict).of(replace(balanced, balance=None)) == replace(balanced, balance=None)


LAUNCH = "--num-layers 16 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --vocab-size 131072".split()
LAUNCH += "--max-position-embeddings 2048 --bf16 --use-distributed-optimizer --tensor-model-parallel-size 2".split()
LAUNCH += "--sequence-parallel --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 16".split()


def test_simulate_says_that_a_launch_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    message = "the trainer refuses this: --bpipe-vocabulary 1: an in-process restart cannot rebuild the pairs"
    for more, is_refused in (
        (["--bpipe-vocabulary", "1", "--inprocess-restart"], True),
        (["--inprocess-restart"], False),
    ):
        assert main(["simulate", "--cluster", "a100-80g:8", "--", *LAUNCH, *more]) == 0
        assert (message in capsys.readouterr().out) is is_refused
