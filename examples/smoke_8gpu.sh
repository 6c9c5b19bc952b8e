#!/usr/bin/env bash
# A check of --bpipe on one node of 8 GPUs, suitable for continuous integration. In each of three layouts it trains a small GPT on mock
# data: with stock Megatron, with --bpipe over every transport, and once with Megatron's own timers. Every --bpipe run is compared with
# the stock run, bit by bit. A run that fails or hangs is stopped and reported, and the others go on. The last lines are the verdicts.
# Exit status: 0 if every loss and every gradient norm is bit-identical to stock Megatron's, 1 otherwise, 2 without 8 GPUs.
# Usage: [DRY_RUN=1] [ONE_GPU=1] [ON_CPU=1] [LAYOUTS=...] [RUNS_WITH=...] [LIMIT=...] [RUNS=...] [PYTHON=...]
#        examples/smoke_8gpu.sh [more Megatron flags, for all runs]
#
#   ONE_GPU=1  share the GPUs there are (one is enough) among the 8 ranks: the same comparison, but no time means anything
#   ON_CPU=1   run on the CPU, if you do not have 8 GPUs: one process per rank, a smaller model, the same comparison
#   LAYOUTS    layouts to try, out of pipeline, tensor and interleaved (default: all)
#   RUNS_WITH  runs to try, out of auto, nccl, peer, host and timers (default: all; on the CPU gloo replaces nccl, and auto is left out)
#   RUNS       folder for reports, logs and verdicts (default runs/smoke)
#   LIMIT      seconds after which a run is stopped (default 900)
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

PYTHON="${PYTHON:-python}"
ITERATIONS=5
HIDDEN=1024
SEQUENCE=1024
RUNS="${RUNS:-runs/smoke}"
LIMIT="${LIMIT:-900}"
TWO_SIDED=nccl

DEVICE_ARGS=()
if [[ -n "${ON_CPU:-}" ]]; then
    HIDDEN=64
    SEQUENCE=64
    TWO_SIDED=gloo
    export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
else
    if [[ -z "${DRY_RUN:-}" ]]; then
        gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
        needed="${ONE_GPU:+1}"
        if ((gpus < ${needed:=8})); then
            say "$needed GPUs are needed, but torch sees $gpus: use another machine, ONE_GPU=1 to share one, or ON_CPU=1"
            exit 2
        fi
    fi
    # Without these settings a GPU may add the same numbers in a different order in every run, balanced or not.
    export CUBLAS_WORKSPACE_CONFIG=:4096:8 NCCL_ALGO=Ring CUDA_DEVICE_MAX_CONNECTIONS=1
    DEVICE_ARGS+=(--bf16 --deterministic-mode)
    if ! "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("transformer_engine") is None)'; then
        DEVICE_ARGS+=(--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion)
        DEVICE_ARGS+=(--no-masked-softmax-fusion --no-rope-fusion)
    fi
fi

if [[ -n "${ONE_GPU:-}" ]]; then DEVICE_ARGS+=(--bpipe-share-gpus); fi

read -r -a layouts <<<"${LAYOUTS:-pipeline tensor interleaved}"
if [[ -n "${ON_CPU:-}" ]]; then RUNS_WITH="${RUNS_WITH:-gloo peer host timers}"; fi
read -r -a runs_with <<<"${RUNS_WITH:-auto nccl peer host timers}"

DISTRIBUTED_ARGS=(--standalone --local-addr 127.0.0.1 --nproc-per-node 8)

GPT_MODEL_ARGS=(
    --num-layers 8 --hidden-size "$HIDDEN" --num-attention-heads 8
    --seq-length "$SEQUENCE" --max-position-embeddings "$SEQUENCE"
)

# 32 micro-batches: with only 16, plans for 8 stages have no point at which a misplaced wait could cause a deadlock.
TRAINING_ARGS=(
    --micro-batch-size 2 --global-batch-size 64 --train-iters "$ITERATIONS"
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
)

DATA_ARGS=(--mock-data --split "99,1,0" --tokenizer-type NullTokenizer --vocab-size 1024)

LOGGING_ARGS=(--log-interval 1 --eval-interval 1000 --eval-iters 0 --distributed-timeout-minutes 5)

# layout_args NAME: set STAGES and LAYOUT_ARGS.
layout_args() {
    case "$1" in
        pipeline) STAGES=8 LAYOUT_ARGS=() ;;
        tensor) STAGES=4 LAYOUT_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel) ;;
        interleaved)
            STAGES=4
            LAYOUT_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel --num-virtual-stages-per-pipeline-rank 2)
            ;;
        *)
            say "LAYOUTS: unknown layout $1: choose from pipeline, tensor, interleaved"
            exit 2
            ;;
    esac
}

# run_args NAME: set RUN_ARGS. Megatron's timers wait for the device, and a transfer that both ends post must not wait with them.
run_args() {
    case "$1" in
        stock) RUN_ARGS=() ;;
        auto | nccl | gloo | peer | host) RUN_ARGS=(--bpipe --bpipe-transport "$1") ;;
        timers) RUN_ARGS=(--bpipe --bpipe-transport "$TWO_SIDED" --timing-log-level 2) ;;
        *)
            say "RUNS_WITH: unknown run $1: choose from auto, $TWO_SIDED, peer, host, timers"
            exit 2
            ;;
    esac
}

# train FOLDER FLAG...: train once, within the time limit, and write a log next to the report. Returns the run's exit status.
train() {
    local folder=$1
    shift
    local command=(
        timeout --kill-after 30 "$LIMIT" "$PYTHON" -m torch.distributed.run "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py
        "${GPT_MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" ${DEVICE_ARGS[@]+"${DEVICE_ARGS[@]}"}
        --pipeline-model-parallel-size "$STAGES" ${LAYOUT_ARGS[@]+"${LAYOUT_ARGS[@]}"} ${RUN_ARGS[@]+"${RUN_ARGS[@]}"}
        --bpipe-report "$folder" "$@"
    )
    if [[ -n "${DRY_RUN:-}" ]]; then
        run "${command[@]}"
        return
    fi
    mkdir -p "$folder"
    local status=0
    "${command[@]}" >"$folder.log" 2>&1 || status=$?
    if ((status)); then tail -n 20 "$folder.log" >&2; fi
    return "$status"
}

# verdict FOLDER STATUS: print the result of a run that ended with this exit status, compared with the stock run.
verdict() {
    local compared=0
    if (($2 == 124 || $2 == 137)); then
        echo "stopped after $LIMIT s"
    elif (($2)); then
        echo "failed with status $2"
    elif grep -L '"balanced": true' "$1"/rank_*.json | grep -q .; then
        echo "not balanced"
    else
        "$PYTHON" -m bpipe compare "$(dirname "$1")/stock" "$1" >"$1.compared" 2>&1 || compared=$?
        case "$compared" in
            0) echo identical ;;
            1) echo DIFFERS ;;
            *) echo "not comparable" ;;
        esac
        if ((compared)); then tail -n 3 "$1.compared" >&2; fi
    fi
}

# smoke LAYOUT FLAG...: the stock run of one layout, then all others.
smoke() {
    local layout=$1 folder="$RUNS/$1" name status said
    shift
    layout_args "$layout"
    if [[ -z "${DRY_RUN:-}" ]]; then rm -rf "${folder:?}"; fi
    for name in stock "${runs_with[@]}"; do
        run_args "$name"
        say "$layout, $name"
        status=0
        train "$folder/$name" "$@" || status=$?
        if [[ -n "${DRY_RUN:-}" ]]; then continue; fi
        if [[ "$name" == stock ]] && ((status == 0)); then continue; fi
        said="$(verdict "$folder/$name" "$status")"
        say "$layout, $name: $said"
        printf '%s\t%s\t%s\n' "$layout" "$name" "$said" >>"$RUNS/verdicts.tsv"
        # Without the stock run there is nothing to compare with.
        if [[ "$name" == stock ]]; then return; fi
    done
}

for layout in "${layouts[@]}"; do layout_args "$layout"; done
for name in "${runs_with[@]}"; do run_args "$name"; done
if [[ -z "${DRY_RUN:-}" ]]; then
    mkdir -p "$RUNS"
    : >"$RUNS/verdicts.tsv"
fi
for layout in "${layouts[@]}"; do smoke "$layout" "$@"; done
if [[ -n "${DRY_RUN:-}" ]]; then exit; fi
cat "$RUNS/verdicts.tsv"
if [[ ! -s "$RUNS/verdicts.tsv" ]] || grep -qv $'\tidentical$' "$RUNS/verdicts.tsv"; then
    echo "NOT as stock Megatron: see above"
    exit 1
fi
echo "all $(wc -l <"$RUNS/verdicts.tsv") runs train as stock Megatron does, to the last bit"
