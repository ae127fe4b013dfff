"""Open MoE models by the sizes of their published configs, for pages and for the scale of `fit`.

Written down from memory, so that no network is needed; the parameters that `fit` counts stand beside each model on the
page. Those of Qwen3-30B-A3B, GPT-OSS-120B, DeepSeek-V3 and Llama-4-Maverick were compared with what their makers state;
of the others the count agrees with the number of all parameters in the name, where there is one. Multimodal ones are
their language model alone, and layers that predict further tokens are left out.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KNOWN_MODELS", "known_config", "with_adapters"]

KNOWN_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "OLMoE-1B-7B": (
        "olmoe",
        dict(
            hidden_size=2048, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=16,
            num_key_value_heads=16, num_experts=64, num_experts_per_tok=8, vocab_size=50304,
        ),
    ),
    "Qwen1.5-MoE-A2.7B": (
        "qwen2_moe",
        dict(
            hidden_size=2048, intermediate_size=5632, moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16,
            num_key_value_heads=16, num_experts=60, num_experts_per_tok=4, vocab_size=151936,
        ),
    ),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        dict(
            hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27,
            num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
            qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
            first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="greedy", vocab_size=102400,
        ),
    ),
    "GPT-OSS-20B": (
        "gpt_oss",
        dict(
            hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
            num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4, vocab_size=201088,
        ),
    ),
    "ERNIE-4.5-21B-A3B": (
        "ernie4_5_moe",
        dict(
            hidden_size=2560, intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=28,
            num_attention_heads=20, num_key_value_heads=4, moe_num_experts=64, moe_k=6, moe_num_shared_experts=2,
            moe_layer_start_index=1, vocab_size=103424,
        ),
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        dict(
            hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
            num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
            vocab_size=151936, max_position_embeddings=40960,
        ),
    ),
    "Phi-3.5-MoE": (
        "phimoe",
        dict(
            hidden_size=4096, intermediate_size=6400, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, num_local_experts=16, num_experts_per_tok=2, vocab_size=32064,
        ),
    ),
    "Mixtral-8x7B": (
        "mixtral",
        dict(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, vocab_size=32000,
        ),
    ),
    "GLM-4.5-Air": (
        "glm4_moe",
        dict(
            hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=46,
            num_attention_heads=96, num_key_value_heads=8, head_dim=128, n_routed_experts=128, n_shared_experts=1,
            num_experts_per_tok=8, first_k_dense_replace=1, n_group=1, topk_group=1, vocab_size=151552,
            attention_bias=True,
        ),
    ),
    "GPT-OSS-120B": (
        "gpt_oss",
        dict(
            hidden_size=2880, intermediate_size=2880, num_hidden_layers=36, num_attention_heads=64,
            num_key_value_heads=8, head_dim=64, num_local_experts=128, num_experts_per_tok=4, vocab_size=201088,
        ),
    ),
    "Mixtral-8x22B": (
        "mixtral",
        dict(
            hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48,
            num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, vocab_size=32768,
        ),
    ),
    "dots.llm1": (
        "dots1",
        dict(
            hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=62,
            num_attention_heads=32, num_key_value_heads=32, head_dim=128, n_routed_experts=128, n_shared_experts=2,
            num_experts_per_tok=6, first_k_dense_replace=1, n_group=1, topk_group=1, vocab_size=152064,
        ),
    ),
    "Qwen3-235B-A22B": (
        "qwen3_moe",
        dict(
            hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=94,
            num_attention_heads=64, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
            vocab_size=151936, max_position_embeddings=40960,
        ),
    ),
    "DeepSeek-V2": (
        "deepseek_v2",
        dict(
            hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=60,
            num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=160, n_shared_experts=2,
            num_experts_per_tok=6, first_k_dense_replace=1, n_group=8, topk_group=3, vocab_size=102400,
        ),
    ),
    "ERNIE-4.5-300B-A47B": (
        "ernie4_5_moe",
        dict(
            hidden_size=8192, intermediate_size=28672, moe_intermediate_size=3584, num_hidden_layers=54,
            num_attention_heads=64, num_key_value_heads=8, moe_num_experts=64, moe_k=8, moe_num_shared_experts=0,
            moe_layer_start_index=3, vocab_size=103424,
        ),
    ),
    "GLM-4.5": (
        "glm4_moe",
        dict(
            hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=92,
            num_attention_heads=96, num_key_value_heads=8, head_dim=128, n_routed_experts=160, n_shared_experts=1,
            num_experts_per_tok=8, first_k_dense_replace=3, n_group=1, topk_group=1, vocab_size=151552,
            attention_bias=True,
        ),
    ),
    "Llama-4-Maverick": (
        "llama4_text",
        dict(
            hidden_size=5120, intermediate_size=8192, intermediate_size_mlp=16384, num_hidden_layers=48,
            num_attention_heads=40, num_key_value_heads=8, head_dim=128, num_local_experts=128, num_experts_per_tok=1,
            interleave_moe_layer_step=2, vocab_size=202048,
        ),
    ),
    "Qwen3-Coder-480B-A35B": (
        "qwen3_moe",
        dict(
            hidden_size=6144, intermediate_size=8192, moe_intermediate_size=2560, num_hidden_layers=62,
            num_attention_heads=96, num_key_value_heads=8, head_dim=128, num_experts=160, num_experts_per_tok=8,
            vocab_size=151936, max_position_embeddings=262144,
        ),
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        dict(
            hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61,
            num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256, n_shared_experts=1,
            num_experts_per_tok=8, first_k_dense_replace=3, n_group=8, topk_group=4, vocab_size=129280,
        ),
    ),
    "Kimi-K2": (
        "deepseek_v3",
        dict(
            hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61,
            num_attention_heads=64, num_key_value_heads=64, q_lora_rank=1536, kv_lora_rank=512,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=384, n_shared_experts=1,
            num_experts_per_tok=8, first_k_dense_replace=1, n_group=1, topk_group=1, vocab_size=163840,
        ),
    ),
}  # fmt: skip
"""Name -> (model type of transformers, fields), by size."""


def known_config(name: str) -> Any:
    from transformers import CONFIG_MAPPING

    known: Any = CONFIG_MAPPING
    model_type, fields = KNOWN_MODELS[name]
    return known[model_type](**fields, use_cache=False, pad_token_id=None)


def with_adapters(model: Any, rank: int) -> Any:
    """With PEFT's LoRA on attention's projections and on both tables of the experts, which alone are trained."""
    import torch
    from peft import LoraConfig, get_peft_model

    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    chosen = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=attention, target_parameters=experts)
    model = get_peft_model(model, chosen)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros at first, by which A has no gradient
            torch.nn.init.normal_(parameter, std=0.02)
    return model
