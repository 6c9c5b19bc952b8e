"""Load two functions of the installed Megatron without the rest of it, which takes seconds.

They are oracles: Megatron's own numbers of a model's bytes and FLOPs.
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

from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.config.launch.megatron_settings import MegatronSettings


def _training_folder() -> Path:
    spec = importlib.util.find_spec("megatron.training")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="session")
def megatron_memory() -> ModuleType:
    """theoretical_memory_usage.py, with stand-ins for the two helpers that it imports."""
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
    name = "num_floating_point_operations"
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    namespace: dict[str, Any] = {
        "is_hybrid_model": lambda args: getattr(args, "hybrid_layer_pattern", None) is not None,
        "is_linear_attention_variant": lambda variant: False,
    }
    exec(compile(ast.Module([function], []), "training.py", "exec"), namespace)
    return namespace[name]  # type: ignore[no-any-return]


@pytest.fixture
def megatron_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patterns of hybrid models, also compiled alone, where `num_floating_point_operations` imports them."""
    name = "megatron.core.models.hybrid.hybrid_layer_allocation"
    path = _training_folder().parent / "core" / "models" / "hybrid" / "hybrid_layer_allocation.py"
    names = ("Symbols", "ParsedHybridPattern", "parse_hybrid_pattern", "get_hybrid_layer_counts", "_validate_pattern")
    parts: list[ast.stmt] = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) in names]
    module = ModuleType(name)
    module.__dict__.update(dataclass=dataclass, Dict=dict, Optional=Optional)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(ast.Module(parts, []), str(path), "exec"), module.__dict__)


@pytest.fixture
def megatron_args() -> Callable[[Any], SimpleNamespace]:
    """Megatron's arguments for a Setup."""

    def args(setup: Any) -> SimpleNamespace:
        model, experts = setup.model, setup.model.experts
        values = vars(MegatronSettings.from_flags(megatron_flags(setup)).values)
        # What validation derives, and what none of our flags sets.
        values |= {
            "num_query_groups": model.num_query_groups,
            "padded_vocab_size": setup.padded_vocabulary,
            "virtual_pipeline_model_parallel_size": setup.num_chunks if setup.num_chunks > 1 else None,
            "data_parallel_size": setup.data,
            "world_size": setup.cluster.num_devices,
            "expert_tensor_parallel_size": setup.tensor,
            "add_bias_linear": model.linear_bias,
            "moe_layer_freq": [int(model.kind(layer).experts) for layer in range(model.num_layers)],
            "moe_router_topk": experts.top_k if experts else 0,
            **dict.fromkeys(("moe_latent_size", "experimental_attention_variant", "attention_output_gate")),
        }
        return SimpleNamespace(**values)

    return args
