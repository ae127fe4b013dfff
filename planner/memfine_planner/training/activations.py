"""Bytes that one layer keeps from forward to backward, tensor by tensor, and what its backward needs on top.

GPT-2 style layers with unfused attention follow arXiv 2205.05198 (section 4: 34 s b h + 5 a s^2 b, sharded by
tensor and sequence parallelism). For MoE rows the closed form of MemFine (`memory.closed_form.row_bytes`, equation 1)
is the base; what it leaves out is added here: the activation's output, shared experts, backward's temporaries.

Every figure is linear in the rows that the rank's experts receive: `fixed + per_row * rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from memfine_fx.memory import closed_form
from memfine_planner.costs.architectures import Architecture, LayerKind
from memfine_planner.costs.strategy import Strategy

__all__ = ["LayerActivations", "layer_activation_bytes", "row_bytes"]


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one layer and micro-batch on one rank.

    Args:
        tensors: (name, bytes) kept whatever the routing.
        per_row: bytes kept for each received row.
        working: bytes of backward's temporaries that do not depend on the routing.
        working_per_row: temporaries per row of the largest chunk, what recomputation restores included.
        balanced_rows: rows under balanced routing.
    """

    tensors: tuple[tuple[str, float], ...]
    per_row: float
    working: float
    working_per_row: float
    balanced_rows: float

    @property
    def fixed(self) -> float:
        return sum(num_bytes for _, num_bytes in self.tensors)

    @property
    def total(self) -> float:
        """Kept bytes under balanced routing."""
        return self.fixed + self.per_row * self.balanced_rows


def row_bytes(arch: Architecture, s: Strategy) -> float:
    """Bytes kept per received row without recomputation: MemFine's (2h + 2g) and the activation's output g.

    Less the expert's output (h) where the routing weight is applied before the second projection.
    """
    model = closed_form.Architecture(
        s=s.seq,
        h=arch.hidden,
        a=arch.heads,
        h_d=arch.head_dim,
        k_a=arch.kv_heads,
        g_e=arch.moe_ffn,
        e_n=arch.experts,
        t_k=arch.top_k,
    )
    paper = closed_form.row_bytes(model, closed_form.Parallel())
    saved_by_fp8 = (2.0 - _linear_input(s)) * (arch.hidden + arch.moe_ffn)
    output = 0.0 if s.saves_expert_output else 2.0 * arch.hidden
    return paper + 2.0 * arch.moe_ffn - output - saved_by_fp8


@lru_cache(maxsize=20_000)
def layer_activation_bytes(arch: Architecture, kind: LayerKind, s: Strategy) -> LayerActivations:
    """Bytes of one layer under the strategy's recomputation, all `recompute_layers` restrictions ignored."""
    n = float(s.local_tokens)
    m = n / s.tp if s.is_sequence_parallel else n
    full = _tensors(arch, kind, s, n, m)
    rows = n / s.tp * arch.top_k if kind.is_moe else 0.0
    per_row = row_bytes(arch, s) if kind.is_moe else 0.0
    # Backward of an expert holds the gradients of its output, of gate and up, and of the activation.
    gradient_rows = 2.0 * (arch.hidden + 3 * arch.moe_ffn) if kind.is_moe else 0.0
    ffn = arch.shared_ffn if kind.is_moe else arch.ffn
    working = 2.0 * n * 3 * ffn / s.tp + 4.0 * n * arch.hidden
    all_of_it = sum(num_bytes for _, num_bytes, _ in full)
    if s.recompute == "full":
        kept: tuple[tuple[str, float], ...] = (("layer input", 2.0 * arch.hidden * m),)
        chunk = 1.0 / s.chunks
        return LayerActivations(kept, 0.0, working + all_of_it, (per_row + gradient_rows) * chunk, rows)
    if s.recompute == "experts":
        kept = tuple((name, num_bytes) for name, num_bytes, _ in full)
        return LayerActivations(kept, 0.0, working, (per_row + gradient_rows) / s.chunks, rows)
    if s.recompute == "selective":
        kept = tuple((name, num_bytes) for name, num_bytes, cheap in full if not cheap)
        dropped = 0.0 if s.attention == "unfused" else _linear_input(s) * arch.moe_ffn
        restored = all_of_it - sum(num_bytes for _, num_bytes in kept)
        extra = dropped + gradient_rows if kind.is_moe else 0.0
        return LayerActivations(kept, max(0.0, per_row - dropped), working + restored, extra, rows)
    return LayerActivations(
        tuple((name, num_bytes) for name, num_bytes, _ in full), per_row, working, gradient_rows, rows
    )


def _linear_input(s: Strategy) -> float:
    """Bytes per element of a saved linear input: FP8 recipes keep the cast copy."""
    return 2.0 if s.numbers.matmul in ("FP16", "BF16") else 1.0


def _tensors(arch: Architecture, kind: LayerKind, s: Strategy, n: float, m: float) -> list[tuple[str, float, bool]]:
    """(name, bytes, dropped by selective recomputation) of everything kept outside the routed experts."""
    h, heads, t = arch.hidden, arch.heads, s.tp
    kv_heads = max(float(t), float(arch.kv_heads))
    linear = _linear_input(s)
    flash = s.attention == "flash"
    found = [("attention norm input", 2.0 * h * m, False), ("qkv input", linear * h * m, flash)]
    if arch.latent is None:
        found.append(("query, key, value", 2.0 * n * (heads + 2 * kv_heads) * arch.head_dim / t, False))
    else:
        lat = arch.latent
        latents = lat.q_lora_rank + lat.kv_lora_rank + lat.qk_rope_head_dim
        found.append(("latents", 2.0 * n * latents, False))
        found.append(("query, key, value", 2.0 * n * heads * (2 * arch.qk_dim + lat.v_head_dim) / t, flash))
    context = n * heads * arch.v_dim / t
    if flash:
        found.append(("attention output", 2.0 * context + (1.0 if linear == 1.0 else 0.0) * context, False))
        found.append(("log-sum-exp", 4.0 * n * heads / t, False))
    else:
        scores = n * s.seq * heads / t
        found.append(("scores", (5.0 if arch.dropout else 2.0) * scores, True))
        found.append(("attention output", 2.0 * context, False))
    found.append(("ffn norm input", 2.0 * h * m, False))
    if arch.dropout:
        found.append(("dropout masks", 2.0 * h * m, False))
    ffn, inputs = (arch.shared_ffn if kind.is_moe else arch.ffn), (2 if arch.gated else 1)
    if ffn or kind.is_moe:
        found.append(("ffn input", linear * h * m, flash))
    if ffn:
        found.append(("ffn gate and up" if arch.gated else "ffn hidden", 2.0 * inputs * n * ffn / t, False))
        found.append(("ffn activation", linear * n * ffn / t, flash))
    if kind.is_moe:
        # Probabilities, indices and the map of the permutation.
        found.append(("router", n / t * (4.0 * arch.experts + 16.0 * arch.top_k), False))
    return found
