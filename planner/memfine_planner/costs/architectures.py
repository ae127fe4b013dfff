"""What is trained: the sizes of a dense or MoE transformer, layer by layer.

An `Architecture` is read from a transformers config (object, model type or JSON file) or taken from the
built-in list. Only sizes are kept; nothing here knows about GPUs.

Legend: H hidden, E experts, K top-k, F width of one expert's FFN.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from memfine_fx.errors import ConfigError

__all__ = ["Architecture", "LatentAttention", "LayerKind"]


_POSITIVE = ("layers", "hidden", "vocab", "heads", "kv_heads", "head_dim")
_COUNTS = ("ffn", "experts", "top_k", "moe_ffn", "shared_ffn")


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): ranks and head widths.

    `q_lora_rank` 0 means that queries are projected directly.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class LayerKind:
    """One of the few different layers of a model: its FFN (dense or MoE) and attention window (0: full)."""

    is_moe: bool
    window: int = 0


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder-only transformer.

    Args:
        layers, hidden, vocab, heads, kv_heads, head_dim: as usual; head_dim of the queries for GQA.
        ffn: width of a dense FFN (0 when every layer is MoE).
        gated: SwiGLU-like FFN (two input projections) instead of one projection.
        experts, top_k, moe_ffn: routed experts per MoE layer, experts per token, width F of one.
        shared_ffn: total width of the shared experts.
        moe_layers: indices of the MoE layers.
        windows: attention window per layer, 0 for full attention.
        latent: ranks of latent attention, or None for GQA.
        tied: whether the output projection shares the embedding's weights.
        dropout: GPT-2 style blocks with dropout and GELU, whose activations are larger (arXiv 2205.05198).
        expert_bias: biases in the experts, which frameworks add outside the grouped product, expert by expert.
        expert_clamp: experts that clamp gate and up, which frameworks do outside the fused activation.
    """

    name: str
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int = 0
    gated: bool = True
    experts: int = 0
    top_k: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    moe_layers: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    latent: LatentAttention | None = None
    tied: bool = False
    dropout: bool = False
    expert_bias: bool = False
    expert_clamp: bool = False

    def __post_init__(self) -> None:
        self._check_signs()
        self._check_layers()
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"architecture {self.name}: heads={self.heads} is no multiple of kv_heads={self.kv_heads}"
            )
        if self.moe_layers and not (self.experts >= self.top_k >= 1 and self.moe_ffn >= 1):
            raise ConfigError(
                f"architecture {self.name}: MoE layers need experts >= top_k >= 1 and moe_ffn >= 1, "
                f"got experts={self.experts}, top_k={self.top_k}, moe_ffn={self.moe_ffn}"
            )
        if len(self.moe_layers) < self.layers and self.ffn < 1:
            raise ConfigError(f"architecture {self.name}: it has dense layers, but ffn={self.ffn}")

    def _check_signs(self) -> None:
        positive = {name: getattr(self, name) for name in _POSITIVE}
        if self.latent:
            positive |= {name: value for name, value in vars(self.latent).items() if name != "q_lora_rank"}
        counts = {name: getattr(self, name) for name in _COUNTS}
        counts |= {f"windows[{index}]": window for index, window in enumerate(self.windows)}
        for found, least, kind in ((positive, 1, "positive"), (counts, 0, "non-negative")):
            for name, value in found.items():
                if value < least:
                    raise ConfigError(f"architecture {self.name}: {name}={value}; expected a {kind} integer")

    def _check_layers(self) -> None:
        """The layers that are named exist, and experts that are given lie in some of them."""
        where = f"architecture {self.name}"
        if self.windows and len(self.windows) != self.layers:
            raise ConfigError(f"{where}: {len(self.windows)} attention windows for {self.layers} layers")
        outside = [index for index in self.moe_layers if not 0 <= index < self.layers]
        if outside or len(set(self.moe_layers)) != len(self.moe_layers):
            shown = ", ".join(map(str, outside or self.moe_layers))
            raise ConfigError(f"{where}: moe_layers {shown}: expected different indices from 0 to {self.layers - 1}")
        if self.experts and not self.moe_layers:
            raise ConfigError(f"{where}: experts={self.experts}, but none of its {self.layers} layers holds them")

    @property
    def is_moe(self) -> bool:
        return bool(self.moe_layers)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, in order."""
        moe = set(self.moe_layers)
        windows = self.windows or (0,) * self.layers
        return tuple(LayerKind(index in moe, windows[index]) for index in range(self.layers))

    @cached_property
    def kind_counts(self) -> dict[LayerKind, int]:
        return dict(Counter(self.kinds))

    @property
    def qk_dim(self) -> int:
        """Width of one head's query and key."""
        return self.latent.qk_nope_head_dim + self.latent.qk_rope_head_dim if self.latent else self.head_dim

    @property
    def v_dim(self) -> int:
        return self.latent.v_head_dim if self.latent else self.head_dim

    @cached_property
    def attention_params(self) -> int:
        """Projection weights of one layer's attention."""
        if self.latent is None:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        lat = self.latent
        query = (
            lat.q_lora_rank * (self.hidden + self.heads * self.qk_dim)
            if lat.q_lora_rank
            else self.hidden * self.heads * self.qk_dim
        )
        key_value = self.hidden * (lat.kv_lora_rank + lat.qk_rope_head_dim)
        key_value += lat.kv_lora_rank * self.heads * (lat.qk_nope_head_dim + lat.v_head_dim)
        return query + key_value + self.heads * lat.v_head_dim * self.hidden

    @property
    def _projections(self) -> int:
        return 3 if self.gated else 2

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert."""
        return self._projections * self.hidden * self.moe_ffn

    def dense_params(self, kind: LayerKind) -> int:
        """Weights of a layer without its routed experts: attention, norms, dense or shared FFN, router."""
        ffn = self.shared_ffn if kind.is_moe else self.ffn
        router = self.hidden * self.experts if kind.is_moe else 0
        return self.attention_params + self._projections * self.hidden * ffn + router + 2 * self.hidden

    @property
    def embedding_params(self) -> int:
        return self.vocab * self.hidden

    @cached_property
    def params(self) -> int:
        """All weights."""
        layers = sum(count * self.dense_params(kind) for kind, count in self.kind_counts.items())
        experts = len(self.moe_layers) * self.experts * self.expert_params
        return layers + experts + self.embedding_params * (1 if self.tied else 2) + self.hidden

    @cached_property
    def active_params(self) -> int:
        """Weights that one token meets, the embedding look-up left out."""
        layers = sum(count * self.dense_params(kind) for kind, count in self.kind_counts.items())
        return layers + len(self.moe_layers) * self.top_k * self.expert_params + self.embedding_params

    def attention_flops(self, kind: LayerKind, seq: int) -> float:
        """Forward FLOPs of one token's scores and values in one layer, causal, averaged over the sequence."""
        return 2.0 * self.heads * (self.qk_dim + self.v_dim) * mean_context(seq, kind.window)

    def model_flops(self, seq: int) -> float:
        """FLOPs of a training step per token (forward and backward, nothing recomputed), causal attention."""
        attention = sum(count * self.attention_flops(kind, seq) for kind, count in self.kind_counts.items())
        return 6.0 * self.active_params + 3.0 * attention


def mean_context(seq: int, window: int) -> float:
    """Keys that a query sees on average under a causal mask, with a sliding window if it is not 0."""
    if not window or window >= seq:
        return seq / 2
    return window - window * window / (2 * seq)
