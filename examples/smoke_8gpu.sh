#!/usr/bin/env bash
# For continuous integration on one node of 8 GPUs: a small GPT on mock data, trained without and with --bpipe in three layouts, then
# compared. Fails where a loss or a gradient norm differs in any bit, or a run does not end. Everything it leaves is in runs/smoke.
# Usage: [DRY_RUN=1] [ON_CPU=1] [PYTHON=...] examples/smoke_8gpu.sh [more flags of Megatron, for all runs]
#
#   ON_CPU=1  run it on the CPU, one process a rank, where there are no 8 GPUs: a smaller model, the same comparison
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

PYTHON="${PYTHON:-python}"
ITERATIONS=5
HIDDEN=1024
SEQUENCE=1024
RUNS=runs/smoke

DEVICE_ARGS=()
if [[ -n "${ON_CPU:-}" ]]; then
    HIDDEN=64
    SEQUENCE=64
    export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
else
    if [[ -z "${DRY_RUN:-}" ]]; then
        gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
        if ((gpus < 8)); then
            say "needs 8 GPUs, and torch sees $gpus. Remedy: another machine, or ON_CPU=1"
            exit 2
        fi
    fi
    # Without these a GPU may add the same numbers in another order the second time, balanced or not.
    export CUBLAS_WORKSPACE_CONFIG=:4096:8 NCCL_ALGO=Ring CUDA_DEVICE_MAX_CONNECTIONS=1
    DEVICE_ARGS+=(--bf16 --deterministic-mode)
    if ! "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("transformer_engine") is None)'; then
        DEVICE_ARGS+=(--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion)
        DEVICE_ARGS+=(--no-masked-softmax-fusion --no-rope-fusion)
    fi
fi

DISTRIBUTED_ARGS=(--standalone --local-addr 127.0.0.1 --nproc-per-node 8)

GPT_MODEL_ARGS=(
    --num-layers 8 --hidden-size "$HIDDEN" --num-attention-heads 8
    --seq-length "$SEQUENCE" --max-position-embeddings "$SEQUENCE"
)

TRAINING_ARGS=(
    --micro-batch-size 2 --global-batch-size 32 --train-iters "$ITERATIONS"
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
)

DATA_ARGS=(--mock-data --split "99,1,0" --tokenizer-type NullTokenizer --vocab-size 1024)

LOGGING_ARGS=(--log-interval 1 --eval-interval 1000 --eval-iters 0 --distributed-timeout-minutes 5)

# smoke NAME STAGES FLAG...: both runs of one layout, and their comparison.
smoke() {
    local name=$1 stages=$2 kind
    shift 2
    run rm -rf "${RUNS:?}/$name"
    for kind in plain balanced; do
        local arguments=(
            "${GPT_MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "${DEVICE_ARGS[@]}"
            --pipeline-model-parallel-size "$stages" --bpipe-report "$RUNS/$name/$kind" "$@"
        )
        if [[ "$kind" == balanced ]]; then arguments+=(--bpipe); fi
        say "$name, $kind"
        run "$PYTHON" -m torch.distributed.run "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${arguments[@]}"
    done
    run "$PYTHON" scripts/compare_runs.py "$RUNS/$name/plain" "$RUNS/$name/balanced" --stages "$stages" --iterations "$ITERATIONS"
}

smoke pipeline 8 "$@"
smoke tensor 4 --tensor-model-parallel-size 2 --sequence-parallel "$@"
smoke interleaved 4 --tensor-model-parallel-size 2 --sequence-parallel --num-virtual-stages-per-pipeline-rank 2 "$@"
if [[ -z "${DRY_RUN:-}" ]]; then say "all three layouts train as they do without --bpipe"; fi
