"""Read a model that Hugging Face's transformers describe. In: a preset's name, or a config.json. Out: a `Model`.

What a kind has that is not modelled (experts, latent attention, capped logits, ...) is refused with its name, and so is a key whose value
would make it another model. Defaults of keys that a file leaves out are those of transformers' own classes. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bpipe.models.model import PRESETS, Model
from bpipe.names import unknown
from bpipe.values import a_whole, load_json


@dataclass(frozen=True, slots=True)
class _Kind:
    """A `model_type`: which activations its MLP may have by its own name, whether embeddings are tied where nothing says so, and what of
    a `Model` differs from LLaMA's."""

    activations: tuple[str, ...] = ("silu", "swish")
    tied: bool = False
    differs: Mapping[str, Any] = field(default_factory=dict)


_GELU = ("gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_KINDS = {
    "gpt2": _Kind(_GELU, tied=True),
    "llama": _Kind(),
    "mistral": _Kind(),
    "qwen2": _Kind(differs={"qkv_bias": True}),
    "qwen3": _Kind(differs={"qk_norm": True}),
    "gemma": _Kind(_GELU, tied=True, differs={"gated_gelu": True}),
    "phi3": _Kind(),
    "nemotron": _Kind(("relu2",), differs={"gated": False, "rms_norm": False, "squared_relu": True}),
}
# Of kinds that are asked for often, what keeps them out.
_MISSING = {
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "llama4", "llama4_text"), "mixtures of experts are not modelled"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "latent attention and mixtures of experts are not modelled"),
    "gemma2": "norms behind attention and MLP, windows and capped logits are not modelled",
    **dict.fromkeys(("gemma3", "gemma3_text"), "norms behind attention and MLP, and windows, are not modelled"),
}
_GPT2 = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "intermediate_size": "n_inner",
}
# Beyond any layer and any vocabulary.
_LARGEST_SIZE = 10**9
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def find_model(name: str) -> Model:
    """A preset, or a Hugging Face config.json (the file or the folder it is in)."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return read_hugging_face(path)
    raise ValueError(f"{unknown('model', name, PRESETS)}, or name a config.json of Hugging Face on disk")


def read_hugging_face(path: Path) -> Model:
    """The model of a config.json. Raises ValueError for a kind that is not modelled, and names the key that is missing."""
    try:
        config: Any = load_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: a config.json holds one object, not {type(config).__name__}")
    try:
        return _model(config, str(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _model(config: dict[str, Any], name: str) -> Model:
    said = config.get("model_type")
    for key in _EXPERTS:
        if config.get(key):
            raise ValueError(f"{key} is {str(config[key])[:40]}: mixtures of experts are not modelled")
    if not isinstance(said, str) or said not in _KINDS:
        why = _MISSING.get(said, "give the sizes as flags") if isinstance(said, str) else "give the sizes as flags"
        raise ValueError(f"model_type {str(said)[:40]!r} is not modelled, only {', '.join(_KINDS)}: {why}")
    kind, keys = _KINDS[said], _GPT2 if said == "gpt2" else {}

    def number(key: str, default: int | None = None) -> int:
        key = keys.get(key, key)
        value = config.get(key)
        return a_whole(default if value is None else value, key, 1, _LARGEST_SIZE)

    activation = config.get("hidden_activation") or config.get(keys.get("hidden_act", "hidden_act"))
    if activation is not None and activation not in kind.activations:
        raise ValueError(f"the activation {str(activation)[:40]!r} is not modelled in a {said}, only {', '.join(kind.activations)}")
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    others: dict[str, Any]
    sizes: dict[str, Any] = {
        "name": name,
        "num_layers": number("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "vocabulary": number("vocab_size"),
        "sequence": number("max_position_embeddings"),
        "tied_embedding": bool(config.get("tie_word_embeddings", kind.tied)),
    }
    if said == "gpt2":
        others = {"num_query_groups": heads, "kv_channels": hidden // heads, "ffn_hidden_size": number("intermediate_size", 4 * hidden)}
        return Model(**sizes, **others)
    others = {
        "num_query_groups": number("num_key_value_heads", heads),
        "kv_channels": number("head_dim", hidden // heads),
        "ffn_hidden_size": number("intermediate_size"),
        "window": number("sliding_window") if config.get("sliding_window") and config.get("use_sliding_window", True) else None,
    }
    like_llama = {"gated": True, "rms_norm": True, "linear_bias": _has_biases(config), "learned_positions": False, "dropout": False}
    return Model(**{**sizes, **others, **like_llama, **kind.differs})


def _has_biases(config: dict[str, Any]) -> bool:
    """Whether all linear layers of a layer have one. Raises ValueError where some do, other than a kind always has."""
    attention, mlp = (bool(config.get(key, False)) for key in ("attention_bias", "mlp_bias"))
    if attention != mlp:
        raise ValueError(f"attention_bias is {attention} and mlp_bias {mlp}: biases of one of the two alone are not modelled")
    return mlp
