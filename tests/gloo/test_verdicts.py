"""What `bpipe check-launch` says of a launch is what happens to it: drawn launches, about half of them impossible, are
judged and then started on real ranks, where one that starts trains an iteration."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bpipe.cli import main
from bpipe.commands import launch
from bpipe.config.launch import validation
from bpipe.config.launch.validation import Judgement
from megatron.scheduling.cpu import ARGUMENTS
from tests.gloo.conftest import ROOT, finish, start
from tests.gloo.flags import TINY
from tests.gloo.ports import free_ports

NUM_LAUNCHES, MOST_CHANGES, SEED = 60, 2, 1
BASE = f"{' '.join(ARGUMENTS)} {TINY} --train-iters 1 --num-layers 4 --pipeline-model-parallel-size 2"
# Each line changes BASE; a launch draws a few lines, each of another group.
CHANGES = """
--num-layers 2
--num-layers 3
--num-layers 6
--num-layers 8
--num-layers 0

--pipeline-model-parallel-size 1
--pipeline-model-parallel-size 4
--pipeline-model-parallel-size 0
--pipeline-model-parallel-size 1 --tensor-model-parallel-size 2
--pipeline-model-parallel-size 2 --pipeline-model-parallel-size 2

--tensor-model-parallel-size 2
--tensor-model-parallel-size 2 --sequence-parallel
--sequence-parallel
--tensor-model-parallel-size 3
--tensor-model-parallel-size 2 --tp-comm-overlap

--context-parallel-size 2
--cp-comm-type a2a
--seq-length 63 --max-position-embeddings 63

--num-attention-heads 3
--hidden-size 66
--num-attention-heads 8 --kv-channels 16
--group-query-attention --num-query-groups 2
--group-query-attention --num-query-groups 3
--num-query-groups 2
--ffn-hidden-size 129
--multi-latent-attention
--qk-layernorm

--num-virtual-stages-per-pipeline-rank 1
--num-virtual-stages-per-pipeline-rank 2
--num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication
--num-virtual-stages-per-pipeline-rank 3
--num-layers-per-virtual-pipeline-stage 1
--num-layers-per-virtual-pipeline-stage 2
--num-layers-per-virtual-pipeline-stage 1 --overlap-p2p-communication-warmup-flush
--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 4
--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 1
--pipeline-model-parallel-layout Ett|ttL
--pipeline-model-parallel-layout Et|ttt|L
--pipeline-model-parallel-layout Et|t|t|tL
--pipeline-model-parallel-layout Et*3|tL
--pipeline-model-parallel-layout E|ttttL
--pipeline-model-parallel-layout tt|ttL
--decoder-first-pipeline-num-layers 1
--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3
--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1
--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
--account-for-embedding-in-pipeline-split
--num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2
--num-virtual-stages-per-pipeline-rank 2 --decoder-first-pipeline-num-layers 2
--pipeline-model-parallel-layout Ett|ttL --num-virtual-stages-per-pipeline-rank 2
--pipeline-model-parallel-layout Ett|ttL --decoder-first-pipeline-num-layers 2
--no-overlap-p2p-communication
--overlap-p2p-communication-warmup-flush
--pipeline-model-parallel-layout Etx|ttL

--global-batch-size 4
--global-batch-size 6
--global-batch-size 8
--global-batch-size 16
--global-batch-size 3
--micro-batch-size 1 --global-batch-size 7
--rampup-batch-size 2 2 8 --global-batch-size 8
--train-samples 8
--micro-batch-size 3
--micro-batch-size 0
--global-batch-size 0
--global-batch-size -4

--recompute-activations
--recompute-granularity full
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--recompute-granularity full --recompute-method block --recompute-num-layers 9
--recompute-granularity full --recompute-method uniform
--recompute-granularity selective --recompute-modules core_attn layernorm
--recompute-granularity selective --recompute-modules moe
--recompute-granularity selective --recompute-modules moe_act
--recompute-granularity selective --recompute-modules attention
--recompute-method uniform
--recompute-activations --recompute-granularity full
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --distribute-saved-activations

--use-distributed-optimizer
--use-distributed-optimizer --overlap-grad-reduce
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--overlap-param-gather
--use-distributed-optimizer --overlap-param-gather
--overlap-grad-reduce --no-align-grad-reduce
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --overlap-param-gather-with-optimizer-step
--use-distributed-optimizer --num-distributed-optimizer-instances 2
--optimizer-cpu-offload
--optimizer sgd
--use-precision-aware-optimizer
--ddp-bucket-size 20000 --ddp-average-in-collective

--bf16
--fp16
--fp16 --bf16
--fp16 --initial-loss-scale 1024
--bf16 --main-grads-dtype bf16
--bf16 --main-grads-dtype bf16 --use-distributed-optimizer
--bf16 --accumulate-allreduce-grads-in-fp32
--fp8-param-gather
--apply-query-key-layer-scaling
--attention-softmax-in-fp32
--bf16 --grad-reduce-in-bf16
--bf16 --use-distributed-optimizer --exp-avg-dtype bf16

--num-experts 4 --disable-bias-linear
--num-experts 4 --disable-bias-linear --expert-model-parallel-size 2
--num-experts 3 --disable-bias-linear --expert-model-parallel-size 2
--num-experts 4 --disable-bias-linear --moe-router-topk 5
--num-experts 4 --disable-bias-linear --moe-token-dispatcher-type alltoall
--num-experts 4 --disable-bias-linear --moe-expert-capacity-factor 1.0
--num-experts 4 --disable-bias-linear --moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.0
--num-experts 4 --disable-bias-linear --moe-shared-expert-intermediate-size 64
--num-experts 4 --disable-bias-linear --moe-shared-expert-overlap
--num-experts 4 --disable-bias-linear --moe-layer-freq 2
--num-experts 4 --disable-bias-linear --moe-layer-freq [1]*3
--num-experts 4 --disable-bias-linear --moe-router-topk 4 --moe-router-num-groups 2 --moe-router-group-topk 3
--num-experts 4 --disable-bias-linear --moe-router-score-function sigmoid --moe-router-enable-expert-bias
--expert-model-parallel-size 2
--num-experts 4 --disable-bias-linear --moe-grouped-gemm
--num-experts 4 --disable-bias-linear --moe-pad-expert-input-to-capacity
--num-experts 4 --disable-bias-linear --moe-router-load-balancing-type sinkhorn
--num-experts 4 --disable-bias-linear --moe-token-dispatcher-type flex
--num-experts 4 --disable-bias-linear --expert-tensor-parallel-size 2
--num-experts 4 --disable-bias-linear --moe-aux-loss-coeff 0.01 --moe-router-dtype fp32
--num-experts 4 --disable-bias-linear --moe-router-pre-softmax
--num-experts 0
--moe-router-topk 2

--position-embedding-type rope
--position-embedding-type rope --rotary-percent 0.5
--position-embedding-type none
--position-embedding-type yarn
--position-embedding-type mrope
--max-position-embeddings 32
--swiglu --normalization RMSNorm --untie-embeddings-and-output-weights
--swiglu --squared-relu
--mtp-num-layers 1
--mtp-num-layers 1 --position-embedding-type rope
--window-size 8,0
--normalization RMSNorm --norm-epsilon 1e-6

--tokenizer-type ByteLevelTokenizer --vocab-size 300
--tokenizer-type ByteLevelTokenizer --vocab-size 200
--tokenizer-type HuggingFaceTokenizer
--tokenizer-type SentencePieceTokenizer
--make-vocab-size-divisible-by 100
--vocab-size 0

--lr-warmup-fraction 0.1 --lr-warmup-iters 1
--lr-warmup-iters 2
--lr-decay-iters 1 --lr-warmup-iters 1
--train-iters 0
--save-interval 2
--calculate-per-token-loss
--check-for-nan-in-loss-and-grad
--eval-iters 1 --eval-interval 1
--cross-entropy-loss-fusion
--save somewhere
--save somewhere --save-interval 1 --ckpt-format torch
--load nowhere --exit-on-missing-checkpoint
--async-save
--attention-backend flash
--attention-backend local
--use-flash-attn
--cuda-graph-impl local
--lr 0.0001 --min-lr 0.1
--attention-dropout 0 --hidden-dropout 0 --deterministic-mode
--exit-duration-in-mins 1 --exit-interval 1
--init-method-std -1
--log-interval 0
--eval-interval 0
--clip-grad 0
--weight-decay 0.1 --start-weight-decay 0.1
--empty-unused-memory-level 3
--use-cpu-initialization --init-model-with-meta-device
--overlap-moe-expert-parallel-comm
--delay-wgrad-compute
--fine-grained-activation-offloading
--cpu-offloading-num-layers 1
--defer-embedding-wgrad-compute
--use-tp-pp-dp-mapping

--bpipe
--bpipe --bpipe-transport gloo
--bpipe --bpipe-transport peer
--bpipe --bpipe-transport nccl
--bpipe --bpipe-bound 1
--bpipe --bpipe-bound 2,2
--bpipe --bpipe-bound 2,2,2
--bpipe --bpipe-memory 1
--bpipe --bpipe-memory 1KiB
--bpipe-bound 2
--bpipe --bpipe-hosts memory
--bpipe --bpipe-hosts pool
--bpipe-schedule v-half
--bpipe-schedule zb-h1
--bpipe-schedule zb-h1 --bpipe
--bpipe-schedule bitpipe
--bpipe-schedule grouped-interleaved --num-virtual-stages-per-pipeline-rank 2
--bpipe-schedule interleaved-1f1b
--bpipe-schedule 1f1b --bpipe-slices 2
--bpipe-slices 2
--bpipe-slices 3
--bpipe-vocabulary 1
--bpipe-vocabulary 2
--bpipe-schedule nothing
--bpipe --bpipe-placement adjacent
--bpipe-executor
--bpipe --bpipe-report here
--bpipe --bpipe-report here --bpipe-report-iterations 2
--bpipe --bpipe-strict
--bpipe --bpipe-verify 1 --bpipe-poison
--bpipe --bpipe-sync-transfers
--bpipe --bpipe-min-bytes 0
--bpipe-schedule zb-v
--bpipe-schedule v-min --bpipe
--bpipe-schedule interleaved-1f1b --num-virtual-stages-per-pipeline-rank 2
--bpipe-schedule 1f1b-split --bpipe-keep-weights-halves none
--bpipe-schedule zb-h1 --bpipe-vocabulary 2
--bpipe-vocabulary 1 --bpipe-input-shards
--bpipe-slices 2 --bpipe-slice-lengths 40,24
--bpipe-slices 2 --bpipe-slice-lengths 40,25
--bpipe --bpipe-memory auto
--bpipe --bpipe-memory auto:1
--bpipe --bpipe-memory 1 --bpipe-bound 2
--bpipe --bpipe-cluster h100-80g
--terra-audit 2
--terra-audit 1
"""
# Where Megatron refuses without a reason, or an iteration ends for it.
OUR_WORDS = (
    "layers together",
    "must be at most num_experts",
    "must be a multiple of num_query_groups",
    "needs vocab_size",
)
GROUPS = [group.splitlines() for group in CHANGES.strip().split("\n\n")]


def drawn(seed: int, number: int) -> list[tuple[int, str]]:
    """Return launches: the number of ranks, and the flags behind BASE."""
    chance = random.Random(seed)
    launches = {}
    while len(launches) < number:
        world = chance.choice((2, 2, 2, 4))
        groups = chance.sample(GROUPS, chance.randint(1, MOST_CHANGES))
        launches[world, " ".join(chance.choice(group) for group in groups)] = None
    return list(launches)


def judged(launches: list[tuple[int, str]]) -> list[Judgement]:
    """Return what the installed Megatron says of each, by one process."""
    asked = [(shlex.split(f"{BASE} {flags}"), (1, world)) for world, flags in launches]
    ended = subprocess.run(
        [sys.executable, "-m", validation.PROGRAM],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=True,
    )
    answers = json.loads(ended.stdout.splitlines()[-1])["judgements"]
    return [validation.judgement_from(answer, "") for answer in answers]


def words_in(text: str) -> list[str]:
    return re.findall(r"\w+", text)


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_a_launch_starts_if_and_only_if_it_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launches = drawn(SEED, NUM_LAUNCHES)
    wrong, verdicts = [], []
    for number, ((world, flags), judgement) in enumerate(zip(launches, judged(launches), strict=True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        words = shlex.split(f"{BASE} {flags}")
        script = [str(ROOT / "pretrain_gpt.py"), *words]
        outcome = finish(start(world, script, folder, free_ports(1)[0]), folder, 60)
        monkeypatch.setattr(launch, "judge", lambda *_, judgement=judgement: judgement)
        launcher = ["torchrun", "--nproc-per-node", str(world), "pretrain_gpt.py"]
        refused = main(["check-launch", "--", *launcher, *words]) == 2
        said, logs = capsys.readouterr().out, "".join(outcome.logs)
        verdicts.append(refused)
        if refused != any(outcome.codes):
            wrong.append(f"{world} ranks, {flags}: {outcome.codes}: {logs[-600:]}\n{said}")
        elif judgement.refused is not None:
            reason = judgement.refused.partition(" (--")[0]
            # As words: a set has another order in each process. The trainer may end it before Megatron does.
            lacks = {*words_in(reason)} - {*words_in(logs)}
            if lacks and "bpipe: error" not in logs and not any(own in reason for own in OUR_WORDS):
                wrong.append(f"{world} ranks, {flags}: not in these words: {reason}: {logs[-600:]}")
    assert not wrong, "\n\n".join(wrong)
    assert 0.4 * NUM_LAUNCHES < sum(verdicts) < 0.6 * NUM_LAUNCHES
