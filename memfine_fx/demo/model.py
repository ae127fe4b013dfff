"""A small Qwen3-MoE language model from transformers, unmodified, with random weights."""

from dataclasses import dataclass
from typing import Any

import torch

from memfine_fx.errors import MissingPackage


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model: `hidden` is H, `width` F (of an expert), `experts` E and `top_k` K elsewhere."""

    layers: int
    hidden: int
    width: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int


def build_causal_lm(sizes: ModelSizes, *, seed: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the model in train mode. Equal seeds give equal weights on one kind of device."""
    try:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    except ImportError as error:
        raise MissingPackage("transformers", "hf", "building the Qwen3-MoE model") from error
    # A mapping, not keywords: transformers' annotations leave out what it passes on to its base class.
    options: dict[str, Any] = dict(
        num_hidden_layers=sizes.layers,
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.width,
        intermediate_size=sizes.width,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        norm_topk_prob=True,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab,
        max_position_embeddings=sizes.positions,
        use_cache=False,
        output_router_logits=False,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**options))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # not model.to: rotary frequencies stay in fp32
    return model.train()
