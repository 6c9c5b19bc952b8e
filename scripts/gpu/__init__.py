"""The steps of scripts/gpu_check.py, a file each: what one GPU can show of moving activations. No Megatron anywhere."""
