"""`bpipe check-launch` predicts whether launches start. About half are impossible; each is then started on real
ranks and trains an iteration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bpipe.cli import main
from bpipe.commands import launch
from bpipe.config.launch import validation
from megatron.scheduling.cpu import ARGUMENTS
from tests.gloo.conftest import ROOT, finish, start
from tests.gloo.flags import TINY
from tests.gloo.ports import free_ports
from tests.unit.config.launch.test_validation import judgements_of

BASE = f"{' '.join(ARGUMENTS)} {TINY} --train-iters 1 --num-layers 4 --pipeline-model-parallel-size 2"
EXPERTS = "--num-experts 4 --disable-bias-linear"
# Drawn from 200 changes of BASE, up to two at a time: the number of ranks, and flags after those of BASE.
LAUNCHES = f"""
2 --hidden-size 66
4 --recompute-granularity selective --recompute-modules moe {EXPERTS} --moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.0
2 --num-layers 8 --overlap-moe-expert-parallel-comm
2 --group-query-attention --num-query-groups 2 --mtp-num-layers 1 --position-embedding-type rope
2 --num-layers 2 --bpipe --bpipe-memory auto
2 --expert-model-parallel-size 2 --seq-length 63 --max-position-embeddings 63
2 --tokenizer-type SentencePieceTokenizer
4 --num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 4
2 --ffn-hidden-size 129 --num-layers 0
2 {EXPERTS} --moe-layer-freq 2
2 --mtp-num-layers 1
4 --group-query-attention --num-query-groups 3
4 --bf16 --cpu-offloading-num-layers 1
2 --global-batch-size 8 {EXPERTS} --moe-router-topk 4 --moe-router-num-groups 2 --moe-router-group-topk 3
2 --recompute-activations --recompute-granularity full
2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --overlap-param-gather-with-optimizer-step
2 --swiglu --squared-relu --num-layers 2
2 {EXPERTS} --moe-expert-capacity-factor 1.0 --tensor-model-parallel-size 2 --tp-comm-overlap
2 --optimizer sgd --pipeline-model-parallel-layout Et|t|t|tL
4 {EXPERTS} --moe-aux-loss-coeff 0.01 --moe-router-dtype fp32 --ddp-bucket-size 20000 --ddp-average-in-collective
2 --vocab-size 0 --use-tp-pp-dp-mapping
2 --global-batch-size 4
4 --fp16 --initial-loss-scale 1024 --optimizer-cpu-offload
4 --use-cpu-initialization --init-model-with-meta-device --pipeline-model-parallel-layout Et|t|t|tL
2 --recompute-activations --fp16 --initial-loss-scale 1024
2 --calculate-per-token-loss
2 --save-interval 2
2 --recompute-activations
2 --num-attention-heads 8 --kv-channels 16 --pipeline-model-parallel-size 4
2 {EXPERTS} --moe-shared-expert-overlap
2 --swiglu --squared-relu --decoder-first-pipeline-num-layers 1
2 --ffn-hidden-size 129
2 --tokenizer-type HuggingFaceTokenizer --context-parallel-size 2
2 --bf16 --accumulate-allreduce-grads-in-fp32
2 --num-layers 8
2 --position-embedding-type none
4 --overlap-param-gather --delay-wgrad-compute
2 --global-batch-size 0
2 --num-layers 6 --position-embedding-type none
2 --bpipe --bpipe-hosts memory --ffn-hidden-size 129
2 --num-layers 0
2 --bpipe-schedule 1f1b-split --bpipe-keep-weights-halves none
4 --use-tp-pp-dp-mapping
2 --context-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --overlap-p2p-communication-warmup-flush
4 --recompute-granularity full
4 --use-distributed-optimizer --recompute-granularity selective --recompute-modules core_attn layernorm
4 --num-layers 3 --sequence-parallel
2 --global-batch-size 3 --seq-length 63 --max-position-embeddings 63
2 --bpipe-vocabulary 2 --use-precision-aware-optimizer
4 --pipeline-model-parallel-size 1
2 --tensor-model-parallel-size 2 --sequence-parallel
2 --make-vocab-size-divisible-by 100 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3
2 --num-virtual-stages-per-pipeline-rank 3 --bpipe-schedule 1f1b --bpipe-slices 2
2 --tensor-model-parallel-size 2 --tp-comm-overlap --fp16
2 --global-batch-size 6
4 --cross-entropy-loss-fusion
2 --attention-softmax-in-fp32
4 --apply-query-key-layer-scaling
2 --num-query-groups 2
"""
# Megatron refuses these without a reason, or fails during an iteration.
OUR_WORDS = (
    "layers together",
    "must be at most num_experts",
    "must be a multiple of num_query_groups",
    "needs vocab_size",
)


def words_in(text: str) -> list[str]:
    return re.findall(r"\w+", text)


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_a_launch_starts_if_and_only_if_it_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launches = [line.split(" ", 1) for line in LAUNCHES.strip().splitlines()]
    queries = [(f"{BASE} {flags}".split(), (1, int(world))) for world, flags in launches]
    wrong, verdicts = [], []
    for number, ((words, (_, world)), answer) in enumerate(zip(queries, judgements_of(queries), strict=True)):
        folder, judgement = (
            tmp_path / str(number),
            validation.Judgement("", answer["megatron"], tuple(answer["trainer"])),
        )
        folder.mkdir()
        script = [str(ROOT / "pretrain_gpt.py"), *words]
        outcome = finish(start(world, script, folder, free_ports(1)[0]), folder, 60)
        monkeypatch.setattr(launch, "judge", lambda *_, judgement=judgement: judgement)
        launcher = ["torchrun", "--nproc-per-node", str(world), "pretrain_gpt.py"]
        refused = main(["check-launch", "--", *launcher, *words]) == 2
        verdict, logs = capsys.readouterr().out, "".join(outcome.logs)
        verdicts.append(refused)
        if refused != any(outcome.codes):
            wrong.append(f"{world} ranks, {words}: {outcome.codes}: {logs[-600:]}\n{verdict}")
        elif judgement.refused is not None:
            reason = judgement.refused.partition(" (--")[0]
            # Compare words, because the order of a set differs between processes. The trainer may end before Megatron's
            # check.
            lacks = {*words_in(reason)} - {*words_in(logs)}
            if lacks and "bpipe: error" not in logs and not any(own in reason for own in OUR_WORDS):
                wrong.append(f"{world} ranks, {words}: not in these words: {reason}: {logs[-600:]}")
    assert not wrong, "\n\n".join(wrong)
    assert 0.4 * len(queries) < sum(verdicts) < 0.6 * len(queries)
