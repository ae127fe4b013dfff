"""Small instances of real transformers architectures, with random weights: for `explain`, tests and sweeps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memfine_fx.compat.transformers import config_with_experts, model_classes
from memfine_fx.demo.tiny_config import VOCABULARY, shrink_config
from memfine_fx.errors import ConfigError, MemfineError

__all__ = ["TinyModel", "names_experts", "tiny_causal_lm", "tiny_model"]

_LAYER_COUNTS = (2, 4, 8)
_EXPERTS = re.compile(r"(Experts?|MoE|Moe|MoA|MoeBlock|SparseMLP)$")
_TEXT_CONFIGS = ("text_config", "thinker_config", "decoder")
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


@dataclass(frozen=True)
class TinyModel:
    """A model at toy size and one call's inputs.

    Args:
        module: in train mode.
        inputs: keyword arguments; with labels where the model computes a loss.
        has_loss: whether its output carries a loss.
    """

    module: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    has_loss: bool


def tiny_model(
    model_type: str,
    *,
    batch: int = 2,
    length: int = 16,
    layers: int | None = None,
    experts_implementation: str | None = None,
    wants_experts: bool = True,
    **overrides: Any,
) -> TinyModel:
    """Return any transformers architecture at toy size: the text model where it has one, else the whole.

    Args:
        model_type: as in transformers' configs, e.g. "mixtral", "llama4", "switch_transformers".
        batch, length: sizes of the inputs, in sequences and tokens.
        layers: as many, where that leaves room for experts.
        experts_implementation: how transformers spells the experts; None for the model's own default.
        wants_experts: add layers until the model holds experts (in many the first layers are dense).
        **overrides: config fields.

    Raises:
        MemfineError: transformers is not installed.
        ConfigError: transformers knows no such model, or none of its classes can be built at toy size;
            the message holds the error of each attempt.
    """
    _need_transformers()
    failures: list[str] = []
    for num_layers in _LAYER_COUNTS if layers is None else (layers, *_LAYER_COUNTS):
        for auto_class, config_class in _ways_to_build(model_type):
            try:
                config = shrink_config(config_class, num_layers=num_layers, **overrides)
                if experts_implementation is not None:
                    config_with_experts(config, experts_implementation)
                module = auto_class.from_config(config)
            except Exception as error:  # NOTE: the reasons are as many as there are model classes; all are reported
                failures.append(f"{auto_class.__name__} of {config_class.__name__}: {_first_line(error)}")
                continue
            if not wants_experts or any(map(names_experts, module.modules())):
                return _with_inputs(module.train(), config, batch, length)
            failures.append(f"{auto_class.__name__} of {config_class.__name__}: no experts in {num_layers} layers")
    reasons = "; ".join(dict.fromkeys(failures)) or "none of the auto classes tried has a class for it"
    raise ConfigError(f"transformers cannot build {model_type!r} at toy size: {reasons}")


def names_experts(module: torch.nn.Module) -> bool:
    """Return whether the module's class is named as a layer of experts; for sweeps, never for decisions."""
    return _EXPERTS.search(type(module).__name__) is not None


def tiny_causal_lm(model_type: str, *, experts_implementation: str = "grouped_mm", **overrides: Any) -> Any:
    """Return a causal language model of a transformers architecture at toy size, in train mode.

    Args:
        model_type: as in transformers' configs, e.g. "mixtral", "qwen3_moe".
        experts_implementation: how transformers spells the experts ("grouped_mm", "batched_mm", "eager").
        **overrides: config fields.

    Raises:
        MemfineError: transformers is not installed.
        ConfigError: transformers knows no such causal language model.
    """
    _need_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config: Any = AutoConfig.for_model(model_type, **{**_COMMON, **_EXTRA.get(model_type, {}), **overrides})
        config_with_experts(config, experts_implementation)
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config)
    except ValueError as error:
        raise ConfigError(f"transformers cannot build a causal language model {model_type!r}: {error}") from error
    assert isinstance(model, torch.nn.Module)
    return model.train()


def _need_transformers() -> None:
    try:
        import transformers  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise MemfineError("transformers is not installed; install it with: pip install 'memfine-fx[hf]'") from error


def _ways_to_build(model_type: str) -> Iterator[tuple[Any, Any]]:
    """Yield (auto class, config class) pairs worth trying, language models first."""
    import transformers

    known: Any = transformers.CONFIG_MAPPING
    if model_type not in known:
        raise ConfigError(f"transformers {transformers.__version__} knows no model type {model_type!r}")
    config_class = known[model_type]
    nested = getattr(config_class, "sub_configs", {}) or {}
    texts = [nested[name] for name in _TEXT_CONFIGS if name in nested and hasattr(nested[name], "to_dict")]
    names = ("CausalLM", "Seq2SeqLM", "ImageTextToText", "MaskedLM", "TokenClassification")
    autos = [getattr(transformers, f"AutoModelFor{name}") for name in names] + [
        transformers.AutoModel,
        transformers.AutoBackbone,
    ]
    for auto_class in autos:
        for candidate in (config_class, *texts):
            if candidate in model_classes(auto_class):
                yield auto_class, candidate


def _with_inputs(module: Any, config: Any, batch: int, length: int) -> TinyModel:
    if module.main_input_name == "pixel_values":
        images = torch.randn(batch, config.num_channels, *config.image_size)
        return TinyModel(module, {"pixel_values": images, "dataset_index": torch.arange(batch) % 4}, False)
    tokens = torch.randint(5, VOCABULARY // 2, (batch, length))
    has_loss = re.search(r"CausalLM|LMHead|ConditionalGeneration|MaskedLM", type(module).__name__) is not None
    inputs = {"input_ids": tokens} | ({"labels": tokens} if has_loss else {})
    return TinyModel(module, inputs, has_loss)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    return f"{type(error).__name__}: {text}"[:300]
