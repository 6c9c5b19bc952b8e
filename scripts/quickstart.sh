#!/usr/bin/env bash
# Set up if needed, train a small GPT twice with Megatron's own trainer, first without and then with --bpipe, and show what
# balancing did and that it changed no result.
# Usage: scripts/quickstart.sh [--schedule NAME | --slices K] [more flags of pretrain_gpt.py, for both runs]
#
# With --schedule grouped-interleaved, zb-h1, 1f1b-split or interleaved-1f1b, the second run uses that schedule. The first uses Megatron's
# own loop with the same number of virtual stages, and is bit-identical. Both run without dropout, which depends on the
# order. With --slices K, both runs train every sequence in K slices, and the second balances them.
#
# With 8 GPUs or more it runs one rank per GPU. With 1 to 7 the ranks share them: correct, but slow, so it trains 10 iterations. Without
# GPUs it runs on the CPU. All its files are in runs/quickstart, or in the folder that RUNS names: a log of each run, what each stage
# measured, and report.html, report.txt and trace.json of the balanced run. With --schedule or --slices, the results are
# in a subfolder there, such as zb-h1 or slices-4.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

help_if_asked "$@"

STAGES=8
MICROBATCHES=16
MICRO_BATCH_SIZE=2
ITERATIONS=40
RUNS="${RUNS:-$ROOT/runs/quickstart}"
RESULTS="$RUNS"
LAYERS="$STAGES"
PLAIN="without balancing"
BALANCED="with --bpipe"
BOTH_ARGS=()
SCHEDULE_ARGS=()

if [[ "${1:-}" == --schedule ]]; then
    case "${2:-}" in
        grouped-interleaved | interleaved-1f1b)
            # Twice the layers, so that each virtual stage has one, and half the iterations.
            LAYERS=$((2 * STAGES)) ITERATIONS=$((ITERATIONS / 2))
            BOTH_ARGS+=(--num-virtual-stages-per-pipeline-rank 2)
            ;;
        1f1b-split | zb-h1) ;;
        zb-v | v-half | v-min)
            die "--schedule $2 gives ranks other layers, with other initial weights, so the runs could not be compared with Megatron's" \
                "own loop. Give --schedule grouped-interleaved; docs/megatron.md shows how to train with $2."
            ;;
        *) die "--schedule '${2:-}' is not grouped-interleaved, zb-h1, 1f1b-split or interleaved-1f1b. Give one of these." ;;
    esac
    RESULTS="$RUNS/$2"
    PLAIN="with Megatron's own schedule"
    BALANCED="with $2 and --bpipe"
    BOTH_ARGS+=(--attention-dropout 0 --hidden-dropout 0)
    SCHEDULE_ARGS+=(--bpipe-schedule "$2")
    shift 2
fi
if [[ "${1:-}" == --slices ]]; then
    [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] || die "--slices '${2:-}' is not a number of slices. Give --slices 4."
    RESULTS="$RUNS/slices-$2"
    PLAIN="in $2 slices, without balancing"
    BALANCED="in $2 slices, with --bpipe"
    # Recomputed attention saves the same of each slice.
    BOTH_ARGS+=(--bpipe-slices "$2" --recompute-granularity selective --recompute-modules core_attn)
    shift 2
fi

CALLER="$PWD"
set_up megatron "then training twice (4 to 8 minutes on 2 cores)"
cd "$ROOT"

# Two of these at once would write into each other's folders.
mkdir -p "$RUNS"
if command -v flock >/dev/null; then
    exec 8<"$RUNS"
    flock -n 8 || die "another quickstart is running in $RUNS. Wait for it, or stop it."
fi

# --- The device -------------------------------------------------------------------------------------------------------------------------

num_gpus() {
    # torch also knows CUDA_VISIBLE_DEVICES, but importing it takes seconds, so only if there is a driver.
    if command -v nvidia-smi >/dev/null || [[ -e /dev/nvidiactl ]]; then
        "$PYTHON" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)' 2>/dev/null || echo 0
    else
        echo 0
    fi
}

DEVICE_ARGS=()
GPUS="$(num_gpus)"
if ((GPUS > 0)); then
    # Without these a GPU may add the same numbers in another order in the second run, balanced or not.
    export CUBLAS_WORKSPACE_CONFIG=:4096:8 NCCL_ALGO=Ring
    DEVICE_ARGS+=(--deterministic-mode)
    if ! "$PYTHON" -c 'import transformer_engine' 2>/dev/null; then
        DEVICE_ARGS+=(--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion)
        DEVICE_ARGS+=(--no-masked-softmax-fusion --no-rope-fusion)
    fi
    if ((GPUS >= STAGES)); then
        say "$GPUS GPUs: one rank per GPU, NCCL"
        export CUDA_DEVICE_MAX_CONNECTIONS=1
    else
        say "$GPUS GPUs for $STAGES stages: the ranks share them, so times mean nothing (CUDA_VISIBLE_DEVICES= for the CPU)"
        ITERATIONS=10
        DEVICE_ARGS+=(--bpipe-share-gpus)
    fi
else
    # Eight processes of one thread each, without a look-up of this host's name, which may fail without a network.
    export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
fi
# In the middle, when everything has been allocated and used.
RECORDED=$((ITERATIONS / 2))-$((ITERATIONS / 2 + 2))

# --- The two runs -----------------------------------------------------------------------------------------------------------------------

MODEL_ARGS=(
    --num-layers "$LAYERS" --hidden-size 128 --num-attention-heads 4
    --seq-length 256 --max-position-embeddings 256
)
TRAINING_ARGS=(
    --pipeline-model-parallel-size "$STAGES"
    --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size $((MICRO_BATCH_SIZE * MICROBATCHES))
    --train-iters "$ITERATIONS" --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 5
)
DATA_ARGS=(--mock-data --split "99,1,0" --tokenizer-type NullTokenizer --vocab-size 512)
LOGGING_ARGS=(--log-interval 1 --eval-interval 1000 --eval-iters 0 --distributed-timeout-minutes 10)

# train NAME DESCRIPTION FLAG...: one training run, its iteration lines shown as they come.
train() {
    local name=$1 description=$2
    shift 2
    rm -rf "${RESULTS:?}/$name"
    # When a rank fails, torchrun's own summary is the end of the log, without the reason.
    CAUSES='^(\[rank[0-9]+\]: )?[A-Za-z_.]*(Error|Exception)(: |$)' LABEL="training $description" \
        PROGRESS=' iteration +([0-9]+)/ *([0-9]+)' STATE='iteration \1 of \2' \
        run_logged "$RESULTS/$name.log" '^bpipe: (error|repair skipped)' \
        "$PYTHON" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$STAGES" pretrain_gpt.py \
        "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "${DEVICE_ARGS[@]}" \
        "${BOTH_ARGS[@]}" --bpipe-report "$RESULTS/$name" --bpipe-report-iterations "$RECORDED" "$@" || {
        local status=$?
        ((status > 128)) || say "training $description failed; whole log: $RESULTS/$name.log"
        exit "$status"
    }
}

say "two trainings: $ITERATIONS iterations, $STAGES stages, $MICROBATCHES micro-batches; logs: $RESULTS/*.log"
train plain "$PLAIN" "$@"
repairs="$(grep -c '^bpipe: repaired in memory' "$RESULTS/plain.log" || true)"
if ((repairs > 0)); then say "$repairs defects of Megatron repaired in memory (named in the log; docs/megatron.md)"; fi
train balanced "$BALANCED" --bpipe "${SCHEDULE_ARGS[@]}" "$@"

echo
if ((${#SCHEDULE_ARGS[@]} > 0)); then echo "A trained $PLAIN, B $BALANCED"; fi
bpipe compare "$RESULTS/plain" "$RESULTS/balanced"

# --- The report of the balanced run -----------------------------------------------------------------------------------------------------

bpipe report "$RESULTS/balanced" --baseline "$RESULTS/plain" --html "$RESULTS/report.html" --trace "$RESULTS/trace.json" \
    >"$RESULTS/report.txt"
# Its table: what every stage held, and would have held without balancing.
sed -n '/held activations/,/^$/p' "$RESULTS/report.txt"

# The answer once more at the end, where a terminal shows it: the fullest stage before and after.
"$PYTHON" - "$RESULTS" "$CALLER" <<'PROGRAM'
import json, sys
from pathlib import Path

folder = Path(sys.argv[1])
fullest = [
    max(json.loads(file.read_text())["peak_bytes"] for file in (folder / name).glob("rank_*.json")) / 2**20
    for name in ("plain", "balanced")
]
iterations = len((folder / "balanced/iterations.jsonl").read_text().splitlines())
page = folder / "report.html"
if page.is_relative_to(sys.argv[2]):
    page = page.relative_to(sys.argv[2])
print(f"fullest stage {fullest[0]:.1f} -> {fullest[1]:.1f} MiB, {iterations} iterations identical; open {page}")
PROGRAM
