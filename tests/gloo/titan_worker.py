"""One rank of torchtitan's own trainer on a CPU.

Takes a folder, a name, and torchtitan's own command line. Writes to `<folder>/<name>.rank<r>.json` the losses and
gradient norms of every step in hex, a hash of the weights, and the bytes moved.

The device is the CPU, which has no memory statistics. A tokenizer of bytes and our own text replace the assets of
torchtitan's repository, which its wheel lacks.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

# "none" or "full" replaces the model configuration's selective checkpointing.
RECOMPUTED = "TITAN_RECOMPUTED"


def stand_in_for_a_device() -> None:
    """Make torchtitan use the CPU as its device."""
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
    torch.cpu.get_device_name = lambda *args: "cpu"  # type: ignore[attr-defined]
    properties = SimpleNamespace(total_memory=1 << 34, name="cpu")
    torch.cpu.get_device_properties = lambda *args: properties  # type: ignore[attr-defined]
    torch.cpu.memory_stats = lambda *args: (
        {  # type: ignore[attr-defined]
            f"{kind}_bytes.all.{which}": 0
            for kind in ("active", "reserved", "allocated")
            for which in ("peak", "current")
        }
        | {"num_alloc_retries": 0, "num_ooms": 0}
    )
    barrier = torch.distributed.barrier
    torch.distributed.barrier = lambda group=None, **settings: barrier(group)  # type: ignore[assignment]
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *args: None  # type: ignore[attr-defined]


def stand_in_for_attention() -> None:
    """Compute attention without compiling: compiled flex attention has no backward on a CPU."""
    from torch.nn.attention import flex_attention
    from torchtitan.models.common import attention

    flex_attention._validate_device = lambda *args: None  # type: ignore[assignment]
    attention.FlexAttention._compiled_flex_attn = staticmethod(flex_attention.flex_attention)
    attention._compiled_create_block_mask = flex_attention.create_block_mask


def write_assets(folder: Path) -> None:
    """Write a tokenizer of bytes, and a text to train on."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.BPE(
            {
                **{letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
                "<s>": 256,
                "</s>": 257,
            },
            [],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assets = folder / "assets"
    assets.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(assets / "tokenizer.json"))
    (assets / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    generator = random.Random(5)
    words = ["pipeline", "stage", "rank", "micro-batch", "memory", "balance", "forward", "backward"]
    lines = [{"text": " ".join(generator.choices(words, k=200))} for _ in range(400)]
    text = folder / "text"
    text.mkdir(exist_ok=True)
    (text / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def main(folder: Path, name: str, arguments: list[str]) -> None:
    stand_in_for_a_device()
    torch.set_num_threads(1)
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.tools.logging import init_logger

    stand_in_for_attention()
    init_logger()
    common = ["--hf_assets_path", str(folder / "assets"), "--dataloader.dataset_path", str(folder / "text")]
    config: Any = ConfigManager().parse_args([*arguments, *common])
    if RECOMPUTED in os.environ:
        # The command line cannot select these classes.
        chosen = {"none": None, "full": FullAC.Config()}
        config.activation_checkpoint = chosen[os.environ[RECOMPUTED]]
    trainer: Any = config.build()
    for part in trainer.model_parts:
        for module in part.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                # Gloo cannot average.
                module.set_force_sum_reduction_for_comms(True)
    notes: list[dict[str, str]] = []
    log = trainer.metrics_processor.log

    def noted(step: int, average: float, largest: float, norm: float, *args: Any, **kwargs: Any) -> None:
        notes.append({"step": str(step), "loss": float(average).hex(), "norm": float(norm).hex()})
        log(step, average, largest, norm, *args, **kwargs)

    trainer.metrics_processor.log = noted
    trainer.train()
    weights = hashlib.sha256()
    for part in trainer.model_parts:
        for key, value in sorted(part.state_dict().items()):
            value = value.to_local() if hasattr(value, "to_local") else value
            weights.update(key.encode())
            weights.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    engine = getattr(trainer.pp_schedule, "engine", None)
    shares = [] if engine is None else [share.fraction for share in engine.shares.values()]
    rank = torch.distributed.get_rank()
    result = {"notes": notes, "weights": weights.hexdigest(), "shares": shares}
    result["moved"] = 0 if engine is None else sum(engine.moved_bytes.values())
    (folder / f"{name}.rank{rank}.json").write_text(json.dumps(result))
    trainer.close()
    # The trainer has waited for the other ranks; the teardown after it may hang on a CPU.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
