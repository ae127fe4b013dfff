"""Architectures from transformers configs, JSON files and the built-in list.

A config is read by attribute, so any object or JSON with transformers' field names works; transformers itself
is imported only to look up a model type that is not built in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field

from memfine_fx.errors import ConfigError
from memfine_planner.costs.architectures import Architecture, LatentAttention
from memfine_planner.files import read_json, refuse_misspelt, validated

__all__ = ["architecture", "architecture_from_config", "architecture_from_sizes", "builtin_architectures"]

_NOT_GATED = frozenset({"bloom", "falcon", "gpt_neox", "gptj", "nemotron", "opt", "phi", "starcoder2"})
_OTHER_LAYERS = (
    "mamba_d_state",
    "ssm_state_size",
    "linear_num_key_heads",
    "attn_layer_period",
    "zero_expert_num",
    "ffn_config",
)
_DATA = Path(__file__).parent / "data" / "architectures.json"


def architecture(model: str | Mapping[str, Any] | object) -> Architecture:
    """An Architecture from a built-in name, a transformers model type, a path to a JSON file or a config object.

    Raises:
        ConfigError: the name is unknown (the known ones are listed) or sizes are missing.
    """
    if isinstance(model, Architecture):
        return model
    if isinstance(model, Mapping):
        return _from_mapping(model, str(model.get("name") or model.get("model_type") or "model"), "the model")
    if not isinstance(model, str):
        return architecture_from_config(model)
    if model in builtin_architectures():
        return builtin_architectures()[model]
    if model.endswith(".json"):
        return _from_json(Path(model))
    return _from_model_type(model)


@cache
def builtin_architectures() -> dict[str, Architecture]:
    """The built-in models by name."""
    entries = json.loads(_DATA.read_text())
    return {name: architecture_from_sizes(name, entry, _DATA.name) for name, entry in entries["architectures"].items()}


def architecture_from_config(config: object, name: str | None = None) -> Architecture:
    """An Architecture from an object with the field names of transformers' configs."""
    config = getattr(config, "text_config", None) or config
    if isinstance(config, Mapping):
        config = SimpleNamespace(**config)
    name = name or str(getattr(config, "model_type", "") or type(config).__name__)
    _refuse_other_layers(config, name)
    layers = _first(config, name, "num_hidden_layers", "n_layer")
    hidden = _first(config, name, "hidden_size", "n_embd")
    heads = _first(config, name, "num_attention_heads", "n_head")
    experts = _optional(config, "n_routed_experts", "num_experts", "num_local_experts")
    moe_layers = _moe_layers(config, layers) if experts else ()
    moe_ffn = _optional(config, "moe_intermediate_size") or (_optional(config, "intermediate_size") if experts else 0)
    dense_ffn = _optional(config, "intermediate_size_mlp", "intermediate_size", "n_inner")
    is_gpt2 = hasattr(config, "n_embd")
    model_type = getattr(config, "model_type", "")
    latent = _latent(config)
    return Architecture(
        name=name,
        layers=layers,
        hidden=hidden,
        vocab=_first(config, name, "vocab_size"),
        heads=heads,
        kv_heads=heads if latent else (_optional(config, "num_key_value_heads") or heads),
        head_dim=(latent.qk_nope_head_dim if latent else _optional(config, "head_dim")) or hidden // heads,
        ffn=0 if len(moe_layers) == layers else (dense_ffn or 4 * hidden),
        gated=not is_gpt2 and model_type not in _NOT_GATED,
        experts=experts,
        top_k=_optional(config, "num_experts_per_tok", "top_k") if experts else 0,
        moe_ffn=moe_ffn if experts else 0,
        shared_ffn=_shared_width(config, moe_ffn) if experts else 0,
        moe_layers=moe_layers,
        windows=_windows(config, layers),
        latent=latent,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        dropout=is_gpt2,
        expert_bias=model_type == "gpt_oss",
        expert_clamp=model_type == "gpt_oss",
    )


def _refuse_other_layers(config: object, name: str) -> None:
    """ConfigError for models whose layers are not attention and an FFN: their cost would be silently wrong."""
    types = getattr(config, "layer_types", None) or ()
    names = {kind for kind in types if isinstance(kind, str)}
    other = {kind for kind in names if "attention" not in kind or kind == "linear_attention"}
    other |= {field for field in _OTHER_LAYERS if getattr(config, field, None)}
    if other:
        raise ConfigError(
            f"{name}: {', '.join(sorted(map(str, other)))}: only layers of softmax attention and a dense or routed FFN "
            "are modelled"
        )


_Size = Annotated[int, Field(ge=1)]
_Count = Annotated[int, Field(ge=0)]


class _Sizes(BaseModel):
    """The short form of data/architectures.json; what is null or absent keeps its default."""

    model_config = ConfigDict(strict=True)

    layers: _Size
    hidden: _Size
    vocab: _Size
    heads: _Size
    kv_heads: _Size | None = None
    head_dim: _Size | None = None
    ffn: _Count | None = None
    gated: bool | None = None
    experts: _Count | None = None
    top_k: _Count | None = None
    moe_ffn: _Count | None = None
    shared_experts: _Count | None = None
    dense_layers: _Count | None = None
    sliding_window: _Count | None = None
    sliding_every_other: bool | None = None
    q_lora_rank: _Count | None = None
    kv_lora_rank: _Size | None = None
    qk_nope_head_dim: _Size | None = None
    qk_rope_head_dim: _Size | None = None
    v_head_dim: _Size | None = None
    tied: bool | None = None
    dropout: bool | None = None
    expert_bias: bool | None = None
    expert_clamp: bool | None = None

    @property
    def latent(self) -> LatentAttention | None:
        if self.kv_lora_rank is None:
            return None
        widths = [self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim]
        known = [width for width in widths if width is not None]
        if len(known) < len(widths):
            raise ConfigError("kv_lora_rank comes with qk_nope_head_dim, qk_rope_head_dim and v_head_dim")
        return LatentAttention(self.q_lora_rank or 0, self.kv_lora_rank, *known)

    @property
    def windows(self) -> tuple[int, ...]:
        window = self.sliding_window or 0
        shown = (window if index % 2 == 0 or not self.sliding_every_other else 0 for index in range(self.layers))
        return tuple(shown) if window else ()


def architecture_from_sizes(name: str, fields: object, where: str) -> Architecture:
    """An Architecture from the short field names of data/architectures.json.

    Raises:
        ConfigError: a field is missing or of another kind; the message starts with `where`.
    """
    sizes = validated(_Sizes, fields, where)
    refuse_misspelt(cast(Mapping[str, Any], fields), _Sizes.model_fields, where)
    try:
        return _from_sizes(name, sizes)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _from_sizes(name: str, sizes: _Sizes) -> Architecture:
    latent, moe_ffn = sizes.latent, sizes.moe_ffn or 0
    return Architecture(
        name=name,
        layers=sizes.layers,
        hidden=sizes.hidden,
        vocab=sizes.vocab,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads or sizes.heads,
        head_dim=sizes.head_dim or (latent.qk_nope_head_dim if latent else sizes.hidden // sizes.heads),
        ffn=sizes.ffn or 0,
        gated=sizes.gated is not False,
        experts=sizes.experts or 0,
        top_k=sizes.top_k or 0,
        moe_ffn=moe_ffn,
        shared_ffn=(sizes.shared_experts or 0) * moe_ffn,
        moe_layers=tuple(range(sizes.dense_layers or 0, sizes.layers)) if sizes.experts else (),
        windows=sizes.windows,
        latent=latent,
        tied=bool(sizes.tied),
        dropout=bool(sizes.dropout),
        expert_bias=bool(sizes.expert_bias),
        expert_clamp=bool(sizes.expert_clamp),
    )


def _from_json(path: Path) -> Architecture:
    loaded = read_json(path, "the model config")
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected an object with a config's fields, got {type(loaded).__name__}")
    return _from_mapping(loaded, str(loaded.get("name") or loaded.get("model_type") or path.stem), str(path))


def _from_mapping(fields: Mapping[str, Any], name: str, where: str) -> Architecture:
    """Read either form: transformers' field names, or the short ones of data/architectures.json."""
    if "layers" in fields and "hidden" in fields:
        return architecture_from_sizes(name, fields, where)
    try:
        return architecture_from_config(SimpleNamespace(**fields), name=name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _from_model_type(model_type: str) -> Architecture:
    known = ", ".join(sorted(builtin_architectures()))
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ConfigError(
            f"unknown model {model_type!r}; built in: {known}; install transformers to use its model types, "
            f"or pass a config's .json file"
        ) from None
    try:
        config = AutoConfig.for_model(model_type)
    except ValueError:
        raise ConfigError(
            f"unknown model {model_type!r}; built in: {known}; or a transformers model type (default sizes), "
            f"or a config's .json file"
        ) from None
    return architecture_from_config(config, name=model_type)


def _optional(config: object, *names: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, (int, type(None))):
            raise ConfigError(
                f"the config of {getattr(config, 'model_type', 'the model')}: {name}={value!r}; expected an integer"
            )
        if value:
            return value
    return 0


def _first(config: object, model: str, *names: str) -> int:
    value = _optional(config, *names)
    if not value:
        raise ConfigError(f"the config of {model} has none of {', '.join(names)}")
    return value


def _moe_layers(config: object, layers: int) -> tuple[int, ...]:
    listed = _indices(config, "moe_layers")
    if listed is not None:
        return listed
    types = getattr(config, "mlp_layer_types", None)
    if isinstance(types, (list, tuple)) and len(types) == layers:
        return tuple(index for index, kind in enumerate(types) if kind != "dense")
    first = _optional(config, "first_k_dense_replace")
    step = _optional(config, "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq") or 1
    dense = set(_indices(config, "mlp_only_layers") or ())
    return tuple(i for i in range(first, layers) if (i + 1) % step == 0 and i not in dense)


def _indices(config: object, name: str) -> tuple[int, ...] | None:
    listed = getattr(config, name, None)
    if listed is None:
        return None
    if not isinstance(listed, (list, tuple)) or not all(type(index) is int for index in listed):
        model = getattr(config, "model_type", "the model")
        raise ConfigError(f"the config of {model}: {name}={listed!r}; expected a list of layer indices")
    return tuple(listed)


def _shared_width(config: object, moe_ffn: int) -> int:
    width = _optional(config, "shared_expert_intermediate_size", "shared_intermediate_size")
    if not width:
        width = _optional(config, "n_shared_experts", "num_shared_experts") * moe_ffn
    return width or (moe_ffn if getattr(config, "model_type", "") == "llama4_text" else 0)


def _windows(config: object, layers: int) -> tuple[int, ...]:
    window = _optional(config, "sliding_window", "attention_chunk_size")
    types = getattr(config, "layer_types", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return ()
    if isinstance(types, (list, tuple)) and len(types) == layers:
        return tuple(0 if kind == "full_attention" else window for kind in types)
    return (window,) * layers


def _latent(config: object) -> LatentAttention | None:
    rank = _optional(config, "kv_lora_rank")
    if not rank:
        return None
    return LatentAttention(
        q_lora_rank=_optional(config, "q_lora_rank"),
        kv_lora_rank=rank,
        qk_nope_head_dim=_optional(config, "qk_nope_head_dim"),
        qk_rope_head_dim=_optional(config, "qk_rope_head_dim"),
        v_head_dim=_optional(config, "v_head_dim"),
    )
