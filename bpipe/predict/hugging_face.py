"""Models from presets and from config.json files of Hugging Face's transformers.

A kind that is not modelled is refused by name, and so is a key whose value would make it another model. Of models that
also see, it is the part that reads and writes text. Keys that a file leaves out have the defaults of transformers'
classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bpipe.names import unknown
from bpipe.predict.layer_variants import EXPERTS, MOST_LAYERS, Experts, Hybrid, Latent
from bpipe.predict.model import PRESETS, Model
from bpipe.values import a_flag, a_list, a_text, a_whole, an_object, load_json


@dataclass(frozen=True, slots=True)
class _ExpertKeys:
    """Under which keys experts stand: how many, their size, that of shared ones (`num_shared` says how many of the
    size of one), and the size of the MLP of layers without. Layers have experts from `first` on, one in `step`: the
    last of each, or the first."""

    number: str
    size: str
    shared: str | None = None
    num_shared: str | None = None
    dense: str = "intermediate_size"
    first: str | None = None
    step: str | None = None
    step_begins: bool = False
    shared_gate: bool = False
    sigmoid: bool = False


@dataclass(frozen=True, slots=True)
class _Kind:
    """A `model_type`: which activations its MLP may have by its own name, whether embeddings are tied where nothing
    says so, and what of a `Model` differs from LLaMA's."""

    activations: tuple[str, ...] = ("silu", "swish")
    tied: bool = False
    differs: Mapping[str, Any] = field(default_factory=dict)
    experts: _ExpertKeys | None = None
    latent: bool = False
    qkv_biases: bool = False
    """Whether `attention_bias` is of queries, keys and values alone."""
    hybrid: bool = False
    """Whether a pattern says what each layer is."""


_DEEPSEEK = _ExpertKeys(
    "n_routed_experts",
    "moe_intermediate_size",
    "moe_intermediate_size",
    "n_shared_experts",
    first="first_k_dense_replace",
    step="moe_layer_freq",
    step_begins=True,
)
_QWEN = _ExpertKeys("num_experts", "moe_intermediate_size", step="decoder_sparse_step")
_LLAMA4 = _ExpertKeys(
    "num_local_experts",
    "intermediate_size",
    "intermediate_size",
    dense="intermediate_size_mlp",
    step="interleave_moe_layer_step",
    sigmoid=True,
)
_MIXTRAL = _ExpertKeys("num_local_experts", "intermediate_size")
_GELU = ("gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_KINDS = {
    "gpt2": _Kind(_GELU, tied=True),
    "llama": _Kind(),
    "mistral": _Kind(),
    "qwen2": _Kind(differs={"qkv_bias": True}),
    "qwen3": _Kind(differs={"qk_norm": True}),
    "mixtral": _Kind(experts=_MIXTRAL),
    "qwen2_moe": _Kind(
        differs={"qkv_bias": True}, experts=replace(_QWEN, shared="shared_expert_intermediate_size", shared_gate=True)
    ),
    "qwen3_moe": _Kind(differs={"qk_norm": True}, experts=_QWEN),
    "deepseek_v2": _Kind(experts=_DEEPSEEK, latent=True),
    "deepseek_v3": _Kind(experts=replace(_DEEPSEEK, sigmoid=True), latent=True),
    "llama4_text": _Kind(differs={"qk_norm": True}, experts=_LLAMA4),
    "glm4_moe": _Kind(experts=replace(_DEEPSEEK, step=None, sigmoid=True), qkv_biases=True),
    "minimax_m2": _Kind(experts=replace(_MIXTRAL, sigmoid=True)),
    "nemotron_h": _Kind(
        ("relu2",),
        differs={"gated": False, "squared_relu": True, "no_positions": True},
        experts=replace(_DEEPSEEK, shared="moe_shared_expert_intermediate_size", first=None, step=None, sigmoid=True),
        hybrid=True,
    ),
    "phi3": _Kind(),
    "nemotron": _Kind(("relu2",), differs={"gated": False, "rms_norm": False, "squared_relu": True}),
}
# Kinds that see, too, and the key of what they read and write.
_WITH_TEXT = {"llama4": "text_config"}
# Of kinds that are asked for often, what keeps them out.
_MISSING = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3"), "Megatron has no flags for its layers"),
    "gpt_oss": "attention sinks and biases of experts are not modelled",
    "dbrx": "its own names for sizes are not read",
    "qwen3_next": "linear attention is not modelled",
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
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


def find_model(name: str) -> Model:
    """Return a preset, or a Hugging Face config.json (the file or the folder it is in)."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return read_hugging_face(path)
    raise ValueError(f"{unknown('model', name, PRESETS)}, or name a config.json of Hugging Face on disk")


def read_hugging_face(path: Path) -> Model:
    """Return the model of a config.json. Raises ValueError naming the kind that is not modelled or the missing key."""
    try:
        config: Any = load_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: a config.json must hold one object, not {type(config).__name__}")
    try:
        return _model(config, str(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _model(config: dict[str, Any], name: str) -> Model:
    label = config.get("model_type")
    if isinstance(label, str) and label in _WITH_TEXT:
        return _model(
            {"model_type": f"{label}_text", **an_object(config.get(_WITH_TEXT[label]), _WITH_TEXT[label])}, name
        )
    kind = _kind_of(config, label)
    names = _GPT2 if label == "gpt2" else {}

    def number(key: str, default: int | None = None, largest: int = _LARGEST_SIZE) -> int:
        key = names.get(key, key)
        value = config.get(key)
        return a_whole(default if value is None else value, key, 1, largest)

    acts = ("hidden_activation", names.get("hidden_act", "hidden_act"), "mlp_hidden_act")
    activation = next((config[key] for key in acts if config.get(key)), None)
    if activation is not None and activation not in kind.activations:
        raise ValueError(
            f"the activation {str(activation)[:40]!r} is not modelled in a {label}, only {', '.join(kind.activations)}"
        )
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    shape: dict[str, Any] = {"num_query_groups": heads, "kv_channels": hidden // heads}
    if label == "gpt2":
        shape["ffn_hidden_size"] = number("intermediate_size", 4 * hidden)
    else:
        shape = _like_llama(config, kind, number)
    return Model(
        name=name,
        num_layers=number("num_hidden_layers", largest=MOST_LAYERS),
        hidden_size=hidden,
        num_attention_heads=heads,
        vocabulary=number("vocab_size"),
        sequence=number("max_position_embeddings"),
        tied_embedding=_flag(config, "tie_word_embeddings", kind.tied),
        **shape,
    )


def _kind_of(config: dict[str, Any], label: object) -> _Kind:
    """Return the kind by its name, or by the class that runs it: Kimi K2 is a DeepseekV3ForCausalLM."""
    kind = _KINDS.get(label) if isinstance(label, str) else None
    if kind is None and str(label) not in _MISSING:
        named = {
            str(architecture).removesuffix("ForCausalLM").lower() for architecture in config.get("architectures") or ()
        }
        kind = next((kind for name, kind in _KINDS.items() if name.replace("_", "") in named), None)
    key = next((key for key in _EXPERT_KEYS if config.get(key)), None)
    if key is not None and (kind is None or kind.experts is None):
        raise ValueError(f"{key} is {str(config[key])[:40]}: experts are not modelled in a {str(label)[:40]}")
    if kind is None:
        why = _MISSING.get(str(label), "give the sizes as flags")
        raise ValueError(f"model_type {str(label)[:40]!r} is not modelled, only {', '.join(_KINDS)}: {why}")
    return kind


def _like_llama(config: dict[str, Any], kind: _Kind, number: Callable[..., int]) -> dict[str, Any]:
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    shape = {
        "num_query_groups": number("num_key_value_heads", heads),
        "kv_channels": number("head_dim", hidden // heads),
        "ffn_hidden_size": number(kind.experts.dense if kind.experts else "intermediate_size"),
        **_windows(config, number),
        "chunk": number("attention_chunk_size") if config.get("attention_chunk_size") else None,
        "experts": _experts(config, kind.experts, number) if kind.experts and not kind.hybrid else None,
        "gated": True,
        "rms_norm": True,
        "linear_bias": not kind.qkv_biases and _has_biases(config),
        "qkv_bias": kind.qkv_biases and _flag(config, "attention_bias", False),
        "qk_norm": _flag(config, "use_qk_norm", False),
        "learned_positions": False,
        "dropout": False,
        **kind.differs,
    }
    if kind.latent:
        rank = number("q_lora_rank") if config.get("q_lora_rank") else None
        sizes = map(number, ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        shape |= {"latent": Latent(rank, *sizes), "num_query_groups": heads}
    return shape | (_hybrid(config, kind, number) if kind.hybrid else {})


def _hybrid(config: dict[str, Any], kind: _Kind, number: Callable[..., int]) -> dict[str, Any]:
    """Return the pattern of layers, the sizes of Mamba layers and, if the pattern has some, of experts."""
    pattern = a_text(config.get("hybrid_override_pattern"), "hybrid_override_pattern")
    sizes = (number(key) for key in ("mamba_num_heads", "ssm_state_size", "mamba_head_dim", "n_groups"))
    experts = _experts(config, kind.experts, number) if kind.experts and EXPERTS in pattern else None
    return {"hybrid": Hybrid(pattern, *sizes), "experts": experts}


def _windows(config: dict[str, Any], number: Callable[..., int]) -> dict[str, Any]:
    if not config.get("sliding_window") or not _flag(config, "use_sliding_window", True):
        return {}
    types = a_list(config.get("layer_types") or ["sliding_attention"], "layer_types")
    pattern = tuple(_is_windowed(layer, place) for place, layer in enumerate(types))
    return {"window": number("sliding_window"), "window_pattern": pattern} if any(pattern) else {}


def _is_windowed(kind: object, layer: int) -> int:
    if kind not in ("sliding_attention", "full_attention"):
        shown = f"layer_types[{layer}] is {str(kind)[:40]!r}"
        raise ValueError(f"{shown}: only full_attention and sliding_attention are modelled")
    return int(kind == "sliding_attention")


def _flag(config: dict[str, Any], key: str, default: bool) -> bool:
    """Read a flag strictly: the text "false" would be true."""
    value = config.get(key)
    return default if value is None else a_flag(value, key)


def _experts(config: dict[str, Any], keys: _ExpertKeys, number: Callable[..., int]) -> Experts:
    if config.get("mlp_only_layers"):
        raise ValueError(
            f"mlp_only_layers is {str(config['mlp_only_layers'])[:40]}: single layers without experts cannot be "
            "modelled"
        )
    step = number(keys.step, 1, MOST_LAYERS) if keys.step else 1
    pattern = (1, *(0,) * (step - 1)) if keys.step_begins else (*(0,) * (step - 1), 1)
    first = a_whole(config.get(keys.first) or 0, keys.first, 0, MOST_LAYERS) if keys.first else 0
    if first:
        layers = number("num_hidden_layers", largest=MOST_LAYERS)
        pattern = tuple(int(layer >= first and pattern[layer % step]) for layer in range(layers))
    shared = number(keys.shared) if keys.shared else 0
    if keys.num_shared:
        shared *= a_whole(config.get(keys.num_shared) or 0, keys.num_shared, 0, 1000)
    top_k = number("num_experts_per_tok")
    return Experts(number(keys.number), top_k, number(keys.size), shared, keys.shared_gate, pattern, keys.sigmoid)


def _has_biases(config: dict[str, Any]) -> bool:
    """Whether the linear layers have biases. Raises ValueError if only some do."""
    attention, mlp = (_flag(config, key, False) for key in ("attention_bias", "mlp_bias"))
    if attention != mlp:
        raise ValueError(f"attention_bias is {attention} and mlp_bias {mlp}: biases in one of the two are not modelled")
    return mlp
