# shellcheck shell=bash disable=SC2034  # the arrays are used by the scripts that source this file
# Functions that the scripts of this folder source: common arguments, and how a run is started.
#
# In: DRY_RUN=1 prints a command instead of running it; DATA and TOKENIZER (without them: mock data), CHECKPOINTS, TRAIN_ITERS and, on
# SLURM, CONTAINER_IMAGE, CONTAINER_MOUNTS, MASTER_PORT and EXIT_MINUTES. Out: the functions below, and the repository root
# as the working directory.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }

# run COMMAND...: run it, or with DRY_RUN=1 print it, quoted as bash would read it.
run() {
    if [[ -n "${DRY_RUN:-}" ]]; then
        printf '%q ' "$@"
        echo
    else
        "$@"
    fi
}

# data_args VOCABULARY: set DATA_ARGS. Training on mock data costs as much time and memory as training on real data.
data_args() {
    if [[ -n "${DATA:-}" ]]; then
        DATA_ARGS=(
            --data-path "$DATA" --split "99,1,0"
            --tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:?name the tokenizer that made the data: TOKENIZER=<folder>}"
        )
    else
        DATA_ARGS=(--mock-data --split "99,1,0" --tokenizer-type NullTokenizer --vocab-size "$1")
    fi
}

# checkpoint_args NAME: set CHECKPOINTS and CHECKPOINT_ARGS. A first start finds nothing to load, and begins at iteration 1.
checkpoint_args() {
    CHECKPOINTS="${CHECKPOINTS:-runs/$1/checkpoints}"
    CHECKPOINT_ARGS=(--save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500)
}

# --- SLURM ------------------------------------------------------------------------------------------------------------------------------

# slurm_args NODES: set SRUN_ARGS and DISTRIBUTED_ARGS, with one torchrun per node. torchrun tells each process how many GPUs its node has,
# and --bpipe uses that number to place both stages of a pair on one node.
slurm_args() {
    # Each job has its own port: with a fixed one, two jobs that share their first node would join each other.
    local nodes="${SLURM_JOB_NUM_NODES:-$1}" head=localhost port="${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-0} % 12000))}"
    if [[ -n "${SLURM_JOB_NODELIST:-}" ]]; then
        head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
    fi
    SRUN_ARGS=(-l --nodes "$nodes" --ntasks "$nodes" --ntasks-per-node 1 --kill-on-bad-exit=1)
    if [[ -n "${CONTAINER_IMAGE:-}" ]]; then
        SRUN_ARGS+=(
            --container-image "$CONTAINER_IMAGE"
            --container-mounts "$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
            --container-workdir "$PWD"
        )
    fi
    DISTRIBUTED_ARGS=(
        --nnodes "$nodes" --nproc-per-node 8
        --rdzv-id "${SLURM_JOB_ID:-0}" --rdzv-backend c10d --rdzv-endpoint "$head:$port"
    )
}

# checkpointed: print the last iteration that was saved, or 0 if there is none.
checkpointed() {
    local iteration=0
    if [[ -f "$CHECKPOINTS/latest_checkpointed_iteration.txt" ]]; then
        iteration="$(<"$CHECKPOINTS/latest_checkpointed_iteration.txt")"
    fi
    # Anything else, such as Megatron's "release", marks a model that has no iteration number.
    if [[ "$iteration" =~ ^[0-9]+$ ]]; then echo "$iteration"; else echo 0; fi
}

# run_and_continue ITERATIONS COMMAND...: run the command. If it succeeds before ITERATIONS, its time was up (--exit-duration-in-mins), and
# the job goes back into the queue. If it saved no further iteration, another job would get no further either, so this one fails.
run_and_continue() {
    local iterations=$1 before after
    shift
    if [[ -n "${DRY_RUN:-}" ]]; then
        run "$@"
        return
    fi
    before="$(checkpointed)"
    run "$@"
    after="$(checkpointed)"
    if ((after >= iterations)); then
        say "all $iterations iterations are done"
    elif ((after > before)); then
        say "iterations $((before + 1)) to $after of $iterations are done; the next job continues"
        scontrol requeue "${SLURM_JOB_ID:?only a SLURM job can be requeued}"
    else
        say "no iteration after $before was saved in $CHECKPOINTS, so another job would get no further. Use a shorter --save-interval," \
            "or give the job more time (sbatch --time, EXIT_MINUTES)"
        return 1
    fi
}
