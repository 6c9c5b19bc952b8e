"""Train a recipe of Megatron-Bridge with its own `pretrain` on the CPU, first plain, then with `install`.

Exits with 0 if both runs have the same bits.

Takes the launcher's environment and two free ports; prints a line per rank. Bridge's imports that need a GPU or are not
installed are replaced by empty modules (`STOOD_IN_FOR`, which is printed). The training loop, step, model, data and
optimizer are Bridge's own.
"""

# ruff: noqa: E402

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any

from bpipe.transport.config import TransferConfig
from megatron.scheduling import install, place
from megatron.scheduling.start import startup

startup.prepare()

# isort: split
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from bpipe.balance.config import BalanceConfig
from megatron.scheduling.options.arguments import SchedulingConfig

# Megatron has already looked for these, and must continue not to find them.
CANDIDATES = ("transformer_engine", "nvidia_resiliency_ext", "megatron.energon")
STOOD_IN_FOR = tuple(name for name in CANDIDATES if importlib.util.find_spec(name) is None)


class _Anything(type):
    """A class that has any attribute, so that it can be inherited from and named in annotations."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Empty(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Anything(name, (), {}))
        return self.__dict__[name]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if any(name == missing or name.startswith(f"{missing}.") for missing in STOOD_IN_FOR):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training import config as bridge
from megatron.bridge.training import train as bridge_train
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

STEPS: list[tuple[Any, ...]] = []
WEIGHTS: list[str] = []


def observe() -> None:
    """Record what Bridge's own step returns, and hash the weights after it."""
    step = bridge_train.train_step

    def observed(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        STEPS.append(
            (sorted((name, float(value).hex()) for name, value in result[0].items()), result[1], float(result[5]).hex())
        )
        model = kwargs["model"] if "model" in kwargs else args[2]
        digest = hashlib.sha256()
        for chunk in model:
            for name, parameter in sorted(chunk.named_parameters()):
                digest.update(name.encode())
                digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
        WEIGHTS.append(digest.hexdigest())
        return result

    bridge_train.train_step = observed


def recipe(chunks: int) -> Any:
    """Return the configuration of a small GPT on mock data that a CPU can train."""
    model = GPTModelProvider(
        num_layers=4 * chunks,
        hidden_size=64,
        num_attention_heads=4,
        seq_length=64,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=False,
    )
    return bridge.ConfigContainer(
        model=model,
        train=bridge.TrainingConfig(train_iters=3, global_batch_size=16, micro_batch_size=2),
        validation=bridge.ValidationConfig(eval_iters=0, eval_interval=1000),
        optimizer=bridge.OptimizerConfig(optimizer="adam", lr=3e-3, min_lr=3e-4),
        scheduler=bridge.SchedulerConfig(
            lr_decay_style="cosine", lr_warmup_iters=0, lr_decay_iters=3, start_weight_decay=0.01, end_weight_decay=0.01
        ),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=False, overlap_grad_reduce=False),
        dataset=bridge.MockGPTDatasetConfig(
            random_seed=1234,
            seq_length=64,
            split="9999,8,2",
            dataloader_type="single",
            num_workers=0,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        ),
        logger=bridge.LoggerConfig(log_interval=1),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        checkpoint=bridge.CheckpointConfig(save=None, load=None),
        rng=bridge.RNGConfig(seed=1234),
        dist=bridge.DistributedInitConfig(distributed_backend="gloo"),
    )


def train(port: str, chunks: int) -> tuple[list[Any], list[str]]:
    os.environ["MASTER_PORT"] = port
    STEPS.clear()
    WEIGHTS.clear()
    pretrain(recipe(chunks), forward_step)
    return list(STEPS), list(WEIGHTS)


def main(ports: list[str]) -> None:
    torch.set_num_threads(1)
    if os.environ["RANK"] == "0":
        print(f"stood in for: {', '.join(STOOD_IN_FOR)}", flush=True)
    observe()
    rank = place(pipeline=4)
    for chunks in (1, 2):
        plain = train(ports.pop(), chunks)
        installed = install(
            SchedulingConfig(
                num_ranks=4,
                num_chunks=chunks,
                balance=BalanceConfig(),
                transfers=TransferConfig(minimum_bytes=1024, poison=True, timeout_s=60.0),
            )
        )
        balanced = train(ports.pop(), chunks)
        installed.remove()
        assert len(plain[0]) == 3, plain
        assert len(set(plain[1])) == 3, "weights that do not change would make any two runs equal"
        assert plain == balanced, f"the bits differ: {plain} {balanced}"
        print(f"rank {rank}, {chunks} chunks: Bridge's steps are equal, balanced and plain", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
