"""Shrink any transformers config to toy size: find the fields that say how big a model is, and reduce them.

Rules go by the field's name, because configs agree on names far more than on structure. Fields that count layers,
and lists with one entry a layer, follow `num_layers`; nested configs (text, vision, audio) shrink the same way. Dropout
and router noise are switched off, so that two runs of one model compare.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

__all__ = ["HIDDEN", "VOCABULARY", "shrink_config"]

HIDDEN = 32
VOCABULARY = 128
_FIRST_SPECIAL_TOKEN = 96
_HEADS, _HEAD_DIM = 2, 16

_LAYERS = re.compile(r"^(num_(hidden_|encoder_|decoder_)?layers|n_layers?|(encoder|decoder|num_mtp)_layers|depth)$")
_SIZES: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile(pattern), size)
    for pattern, size in (
        (r"^(num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts|num_selected_experts)$", 2),
        (r"^(n_shared_experts|num_shared_experts|moe_num_shared_experts)$", 1),
        (r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts)$", 4),
        (r"^(zero_expert_num|n_group|num_expert_group)$", 2),
        (r"^(topk_group|topk_groups)$", 1),
        (r"^expert_capacity$", 16),
        (r"(moe|expert).*(intermediate|ffn|hidden).*size|share_expert_dim|^moe_latent_size", 24),
        (r"ffn_hidden_size|intermediate_size|ffn_dim|^d_ff$|^mlp_(hidden_)?(size|dim)$", 48),
        (r"^(embedding_size|.*hidden_size.*|d_model|n_embd|.*embed_dim|hidden_dim|projector_.*_dim)$", HIDDEN),
        (r"(kv|key_value)_heads$|_n_groups$|^n_groups$", _HEADS),
        (r"^mamba_(n|num)_heads$", 4),
        (r"heads$|^n_heads?$|^(en|de)coder_attention_heads$", _HEADS),
        (r"^qk_(nope|rope)_head_dim$|^v_head_dim$|lora_rank$", 8),
        (r"^(d_kv|head_dim|.*_head_dim|mamba_d_head|kv_channels)$", _HEAD_DIM),
        (r"^(.*vocab_size.*)$", VOCABULARY),
        (r"^(max_position_embeddings|num_position_embeddings|.*max_source_positions)$", 256),
    )
)
_EXPERT_COUNT = _SIZES[2][0]
_SWITCHES = {"use_cache": False, "is_moe": True, "enable_moe_block": True}
_UNSET = {"num_key_value_heads": _HEADS, "head_dim": _HEAD_DIM, "moe_intermediate_size": 24}
"""Values for fields that some configs leave to their checkpoints."""
_BEYOND_NAMES: dict[str, Callable[[int], dict[str, Any]]] = {
    "dbrx": lambda layers: {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0, "kv_n_heads": 2}},
    "gemma4_text": lambda layers: {"global_head_dim": _HEAD_DIM, "hidden_size_per_layer_input": 0},
    "deepseek_ocr2_text": lambda layers: {"mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1)},
    "diffusion_gemma_text": lambda layers: {"global_head_dim": _HEAD_DIM},
    "lfm2_moe": lambda layers: {"layer_types": ["conv", "full_attention"] * (layers // 2), "num_dense_layers": 1},
    "mimo_v2_flash": lambda layers: {"num_attention_heads": 4, "num_key_value_heads": 2},
    "step3p5": lambda layers: {"sliding_window": 16},
    "vitpose_backbone": lambda layers: {"num_experts": 4, "part_features": 8},
    "switch_transformers": lambda layers: {"decoder_start_token_id": 0},
    "t5": lambda layers: {"decoder_start_token_id": 0},
}
"""Values that names do not tell, by model type: fields without a default, and widths that depend on one another."""
_NOISE = re.compile(r"dropout|layerdrop|drop_path|jitter")
_KEPT = re.compile(r"chunk_size|kernel|^patch_size|vocab_size_per_layer_input$")


def shrink_config(config_class: Any, *, num_layers: int = 2, **overrides: Any) -> Any:
    """Return a config of `config_class` at toy size.

    Args:
        config_class: a transformers config class with defaults for all its fields.
        num_layers: layers of every stack in it.
        **overrides: fields that the rules would miss; a dict for a nested config is merged into its fields.
    """
    return config_class(**_changes(config_class, num_layers, overrides))


def _changes(config_class: Any, num_layers: int, overrides: dict[str, Any]) -> dict[str, Any]:
    default = config_class()
    nested: dict[str, Any] = getattr(config_class, "sub_configs", {}) or {}
    changes: dict[str, Any] = {}
    for name, value in _fields_of(default).items():
        new = _shrunk(name, value, num_layers)
        if new is not None and name not in nested:
            changes[name] = new
    overrides = {**_beyond_names(default.model_type, num_layers), **overrides}
    changes |= {name: value for name, value in overrides.items() if name not in nested}
    for name in nested:
        sub_config = getattr(default, name, None)
        sub_class = nested[name] if sub_config is None else type(sub_config)
        if hasattr(sub_class, "to_dict"):
            type_field = {"model_type": sub_class.model_type} if sub_class is not nested[name] else {}
            changes[name] = type_field | _changes(sub_class, num_layers, dict(overrides.get(name, {})))
    rotated = getattr(default, "qk_rope_head_dim", None)
    if "qk_rope_head_dim" in changes and getattr(default, "head_dim", None) in (None, rotated):
        changes["head_dim"] = changes["qk_rope_head_dim"]
    _cut_layer_lists(config_class, default, changes)
    _fit_rope_sections(default, changes)
    return changes


def _beyond_names(model_type: str, num_layers: int) -> dict[str, Any]:
    special = _BEYOND_NAMES.get(model_type)
    return special(num_layers) if special else {}


def _fields_of(config: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if not name.startswith("_")}


def _shrunk(name: str, value: Any, num_layers: int) -> Any:
    """Return the toy value of one field; None where it stays."""
    if name in _SWITCHES:
        return _SWITCHES[name]
    if isinstance(value, bool) or _KEPT.search(name):
        return None
    if isinstance(value, float) and _NOISE.search(name):
        return 0.0
    if re.search(r"token_(id|index)$", name):
        return _special_token(name, value)
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        return _shrunk_list(name, value, num_layers)
    if value is None or (value == 0 and _EXPERT_COUNT.search(name)):
        return next((size for pattern, size in _SIZES[:3] if pattern.search(name)), _UNSET.get(name))
    if not isinstance(value, int) or value <= 0:
        return None
    if _LAYERS.search(name):
        return num_layers
    if name == "first_k_dense_replace":
        return 1
    for pattern, size in _SIZES:
        if pattern.search(name):
            return min(value, size)
    return None


def _special_token(name: str, value: Any) -> int | None:
    """Return an id inside the toy vocabulary, distinct per field and above every token of a toy batch."""
    if not isinstance(value, int) or value < 0:
        return 0 if name == "pad_token_id" else None
    return value if value < 4 else _FIRST_SPECIAL_TOKEN + sum(map(ord, name)) % (VOCABULARY - _FIRST_SPECIAL_TOKEN)


def _shrunk_list(name: str, value: list[int], num_layers: int) -> list[int] | None:
    if re.search(r"index(es)?$|indices$", name):
        return list(range(min(len(value), num_layers)))
    return None


def _cut_layer_lists(config_class: Any, default: Any, changes: dict[str, Any]) -> None:
    """Cut lists with one entry per layer that do not follow the number of layers by themselves."""
    counts = {getattr(default, name) for name in changes if _LAYERS.search(name)}
    try:
        config = config_class(**changes)
    except Exception:  # NOTE: the lists themselves may be what the config's own validation rejects
        config = default
    target = next((changes[name] for name in changes if _LAYERS.search(name)), None)
    for name, value in _fields_of(config).items():
        if isinstance(value, list) and target is not None and len(value) in counts and len(value) > target:
            changes.setdefault(name, value[:target])


def _fit_rope_sections(default: Any, changes: dict[str, Any]) -> None:
    """Make multi-axis rotary sections add up to half of the rotated width."""
    rope = getattr(default, "rope_parameters", None)
    if not isinstance(rope, dict) or "mrope_section" not in rope | _class_sections(default):
        return
    head_dim = changes.get("head_dim", changes["hidden_size"] // changes.get("num_attention_heads", _HEADS))
    width = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    count = len(rope.get("mrope_section", (0, 0, 0)))
    rest = width // count
    sections = [(width - rest) // 2] * 2 + [rest] if count == 3 else [rest] * count
    sections[-1] += width - sum(sections)
    changes.setdefault("rope_parameters", {**rope, "mrope_section": sections})


def _class_sections(default: Any) -> dict[str, Any]:
    """Return the rope fields that a config's class declares to read, even without defaults for them."""
    return dict.fromkeys(getattr(type(default), "ignore_keys_at_rope_validation", None) or ())
