"""Small instances of real transformers architectures, with random weights: for `explain`, tests and sweeps."""

from __future__ import annotations

from typing import Any

import torch

from memfine_fx.errors import ConfigError, MemfineError

__all__ = ["tiny_causal_lm"]

_COMMON: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=64,
    num_experts=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=512,
    pad_token_id=0,
    use_cache=False,
)
_EXTRA: dict[str, dict[str, Any]] = {
    "deepseek_v3": dict(
        n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, head_dim=8,
        q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    ),
    "qwen2_moe": dict(shared_expert_intermediate_size=24),
}  # fmt: skip


def tiny_causal_lm(model_type: str, *, experts_implementation: str = "grouped_mm", **overrides: Any) -> Any:
    """A causal language model of a transformers architecture at toy size, in train mode.

    Args:
        model_type: as in transformers' configs, e.g. "mixtral", "qwen3_moe".
        experts_implementation: how transformers spells the experts ("grouped_mm", "batched_mm", "eager").
        **overrides: config fields.

    Raises:
        MemfineError: transformers is not installed.
        ConfigError: transformers knows no such causal language model.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise MemfineError("transformers is not installed; install it with: pip install 'memfine-fx[hf]'") from error
    try:
        config: Any = AutoConfig.for_model(model_type, **{**_COMMON, **_EXTRA.get(model_type, {}), **overrides})
        config._experts_implementation = experts_implementation
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config)
    except ValueError as error:
        raise ConfigError(f"transformers cannot build a causal language model {model_type!r}: {error}") from error
    assert isinstance(model, torch.nn.Module)
    return model.train()
