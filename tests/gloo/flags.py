"""Flags that several test files train with.

Each is one string; `Case` splits it as a shell would. `{folder}` is the folder of the launch, and `{case}` the name of
the run.
"""

from __future__ import annotations

# A GPT small enough that a run takes seconds, and large enough that its activations are moved; dropout is on.
TINY = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 "
    "--lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--split 949,50,1 --eval-iters 0 --eval-interval 1000 --log-interval 1"
)
ITERATIONS = "--train-iters 3"
# One received input of this model, in 32 bits: tokens, micro-batch, hidden size.
INPUT_BYTES = 64 * 2 * 64 * 4

BPIPE = "--bpipe --bpipe-min-bytes 1024 --bpipe-poison --bpipe-timeout 60"
GLOO, PEER = (f"{BPIPE} --bpipe-transport {name}" for name in ("gloo", "peer"))
REPORT = "--bpipe-report {folder}/{case}"
MEASURED = f"--bpipe-min-bytes 1024 {REPORT}"
WHOLE = "--bpipe-keep-weights-halves none"

# Dropout depends on the rank that draws it, and clipping on a norm whose sum depends on the order of the ranks.
QUIET = "--attention-dropout 0 --hidden-dropout 0"
UNCLIPPED = f"{QUIET} --clip-grad 0"
EIGHT_LAYERS = f"{UNCLIPPED} --num-layers 8"

FOUR, TWO = (f"--pipeline-model-parallel-size {size}" for size in (4, 2))
# Two stages; the other two of four ranks belong to another dimension.
TWO_STAGES = f"--num-layers 2 {TWO}"
CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
INTERLEAVED = "--num-layers 8 --num-layers-per-virtual-pipeline-stage 1"
LAYOUT = "--pipeline-model-parallel-layout"
TENSOR = "--tensor-model-parallel-size 2"
SEQUENCE = f"{TENSOR} --sequence-parallel"

UNTIED = "--untie-embeddings-and-output-weights"
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention --num-query-groups 2 "
    f"--disable-bias-linear {UNTIED}"
)
# Some steps overflow and are skipped: the first halves the loss scale, and two others double it.
FP16 = "--fp16 --initial-loss-scale 1048576 --hysteresis 1 --loss-scale-window 2 --train-iters 8"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EVALUATED = "--eval-interval 2 --eval-iters 2"
# 4, then 8 micro-batches.
GROWS = "--step-batch-size-schedule '0:8 1024:16' --train-samples 48 --lr-decay-samples 48"
FURTHER = "--mtp-num-layers 2 --position-embedding-type rope"
# Every expert takes exactly its capacity of tokens, so every micro-batch saves the same bytes.
EXPERTS = (
    "--num-layers 8 --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --disable-bias-linear "
    "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity --moe-token-dispatcher-type alltoall"
)
EXPERT_PAIR = f"{EXPERTS} --expert-model-parallel-size 2"
# Megatron's own CPU attention supports neither context parallelism nor latent attention.
PLAIN_ATTENTION = "--spec tests.gloo.layers attending_plainly"
CONTEXT = f"--context-parallel-size 2 {PLAIN_ATTENTION}"
LATENT = (
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    f"--v-head-dim 16 --position-embedding-type rope --rope-type rope --normalization RMSNorm {PLAIN_ATTENTION}"
)
# The weight gradient of the output layer is deferred to the end of the iteration, inside its matrix product.
DEFERRED = "--stand-in fused --defer-embedding-wgrad-compute --spec tests.gloo.layers computing_at_once"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
BUCKETS = "--ddp-bucket-size 20000"
UNALIGNED = f"{OVERLAPS} --no-align-grad-reduce --no-align-param-gather"
# A distributed optimizer whose state is saved by weight.
RESHARDABLE = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"


def batch(microbatches: int, size: int = 2) -> str:
    """Return the flag for a global batch of this many micro-batches of one replica."""
    return f"--global-batch-size {size * microbatches}"
