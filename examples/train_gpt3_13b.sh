#!/usr/bin/env bash
# GPT-3 13B on one node of 8 GPUs: 8 stages, micro-batch size 1 (Kim et al. 2023: 40 layers, hidden 5120, 40 heads, global batch 32).
# Usage: [DRY_RUN=1] [DATA=...] [TOKENIZER=...] [CHECKPOINTS=...] [TRAIN_ITERS=...] examples/train_gpt3_13b.sh [more Megatron flags]
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

TRAIN_ITERS="${TRAIN_ITERS:-50000}"
data_args 51200
checkpoint_args gpt3_13b

DISTRIBUTED_ARGS=(--standalone --nproc-per-node 8)

GPT_MODEL_ARGS=(
    --num-layers 40 --hidden-size 5120 --num-attention-heads 40
    --seq-length 2048 --max-position-embeddings 2048
)

MODEL_PARALLEL_ARGS=(--pipeline-model-parallel-size 8)

# The paper recomputes attention. Flash attention saves about as much memory. If you have it, drop the last line of this block, and check
# whether balancing still gains (README.md in this folder).
BPIPE_ARGS=(--bpipe)
RECOMPUTE_ARGS=(--recompute-granularity selective --attention-backend unfused)

# Learning rate: Brown et al. 2020, table 2.1.
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 32 --train-iters "$TRAIN_ITERS"
    --bf16 --use-distributed-optimizer
    --lr 1.0e-4 --min-lr 1.0e-5 --lr-decay-style cosine --lr-warmup-fraction 0.001
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
)

LOGGING_ARGS=(--log-interval 10 --log-throughput --eval-interval 1000 --eval-iters 10)

run torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${GPT_MODEL_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${BPIPE_ARGS[@]}" "${RECOMPUTE_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
