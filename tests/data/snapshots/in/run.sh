#!/bin/bash
NODES=${NODES:-4}
ARGS=(
    --num-layers 80 --hidden-size 9984 --num-attention-heads 104 --seq-length 2048 --vocab-size 51200 --fp16
    --sequence-parallel --tensor-model-parallel-size 4 --pipeline-model-parallel-size 8
    --micro-batch-size 2 --global-batch-size 128
    --attention-backend unfused --use-distributed-optimizer --recompute-activations
)
ARGS+=(--bpipe)
torchrun --nnodes $NODES --nproc-per-node 8 pretrain_gpt.py "${ARGS[@]}" --lr 1e-4 --data-path $DATA
