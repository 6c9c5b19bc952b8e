"""Load two functions of the installed Megatron without the rest of it, which takes seconds.

In: nothing. Out: the functions.

They are oracles: what Megatron itself says a model weighs and computes.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

import pytest


def _training_folder() -> Path:
    spec = importlib.util.find_spec("megatron.training")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="session")
def megatron_memory() -> ModuleType:
    """theoretical_memory_usage.py beside stand-ins for the two helpers it imports."""
    package, utils = ModuleType("theoretical"), ModuleType("theoretical.utils")
    package.__path__ = []
    utils.is_hybrid_model = lambda args: False  # type: ignore[attr-defined]
    utils.print_rank_0 = print  # type: ignore[attr-defined]
    sys.modules |= {"theoretical": package, "theoretical.utils": utils}
    spec = importlib.util.spec_from_file_location(
        "theoretical.memory", _training_folder() / "theoretical_memory_usage.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def megatron_flops() -> Callable[..., float]:
    """`num_floating_point_operations` of training.py, compiled by itself."""
    tree = ast.parse((_training_folder() / "training.py").read_text())
    wanted = "num_floating_point_operations"
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == wanted)
    namespace: dict[str, Any] = {
        "is_hybrid_model": lambda args: getattr(args, "hybrid_layer_pattern", None) is not None,
        "is_linear_attention_variant": lambda variant: False,
    }
    exec(compile(ast.Module([function], []), "training.py", "exec"), namespace)
    return namespace[wanted]  # type: ignore[no-any-return]


@pytest.fixture
def megatron_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `num_floating_point_operations` imports of hybrid models' patterns, where it looks for it: compiled by
    itself, too."""
    name = "megatron.core.models.hybrid.hybrid_layer_allocation"
    path = _training_folder().parent / "core" / "models" / "hybrid" / "hybrid_layer_allocation.py"
    wanted = ("Symbols", "ParsedHybridPattern", "parse_hybrid_pattern", "get_hybrid_layer_counts", "_validate_pattern")
    parts: list[ast.stmt] = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) in wanted]
    module = ModuleType(name)
    module.__dict__.update(dataclass=dataclass, Dict=dict, Optional=Optional)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(ast.Module(parts, []), str(path), "exec"), module.__dict__)


@pytest.fixture
def megatron_args() -> Callable[[Any], SimpleNamespace]:
    """Megatron's arguments for a Setup."""

    def args(setup: Any) -> SimpleNamespace:
        model = setup.model
        experts, latent = model.experts, model.latent
        return SimpleNamespace(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_attention_heads,
            num_query_groups=model.num_query_groups,
            group_query_attention=model.num_query_groups != model.num_attention_heads,
            kv_channels=model.kv_channels,
            ffn_hidden_size=model.ffn_hidden_size,
            swiglu=model.gated,
            normalization="RMSNorm" if model.rms_norm else "LayerNorm",
            padded_vocab_size=setup.padded_vocabulary,
            untie_embeddings_and_output_weights=not model.tied_embedding,
            seq_length=setup.sequence,
            micro_batch_size=setup.micro_batch,
            tensor_model_parallel_size=setup.tensor,
            pipeline_model_parallel_size=setup.pipeline,
            virtual_pipeline_model_parallel_size=setup.num_chunks if setup.num_chunks > 1 else None,
            data_parallel_size=setup.data,
            world_size=setup.cluster.num_devices,
            use_distributed_optimizer=setup.distributed_optimizer,
            expert_tensor_parallel_size=setup.tensor,
            expert_model_parallel_size=1,
            add_bias_linear=model.linear_bias,
            multi_latent_attention=latent is not None,
            q_lora_rank=latent and latent.q_lora_rank,
            kv_lora_rank=latent and latent.kv_lora_rank,
            qk_head_dim=latent and latent.qk_head_dim,
            qk_pos_emb_head_dim=latent and latent.qk_pos_emb_head_dim,
            v_head_dim=latent and latent.v_head_dim,
            attention_output_gate=False,
            experimental_attention_variant=None,
            num_experts=experts and experts.num_experts,
            moe_layer_freq=[int(model.kind(layer).experts) for layer in range(model.num_layers)],
            moe_ffn_hidden_size=experts and experts.ffn_hidden_size,
            moe_router_topk=experts.top_k if experts else 0,
            moe_latent_size=None,
            moe_shared_expert_intermediate_size=(experts and experts.shared_size) or None,
            mtp_num_layers=model.mtp_num_layers,
        )

    return args
