"""What one layer does on one GPU in forward: matrix products, memory traffic, attention, collectives.

Pure counting: sizes in, `Work` records out, already divided by the strategy's parallel sizes. How long a record
takes is the business of `timing`. Backward follows from forward: two products for each product, 2.5 times the
attention FLOPs (scores are recomputed), and each collective's mirror image.

Legend: n tokens of a micro-batch on this rank, m the same after sequence parallelism, H hidden, F expert width,
rows = m K routed rows that this rank sends, and receives when the routing is balanced.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from memfine_planner.costs.architectures import Architecture, LayerKind, mean_context
from memfine_planner.costs.strategy import Strategy
from memfine_planner.hardware.systems import System

__all__ = ["Part", "Work", "head_work", "layer_work"]

Part = Literal["attention", "ffn", "router", "experts", "head", "embedding"]
Collective = Literal["all_gather", "all_reduce", "all_to_all", "ring"]

_DENSE_LAUNCHES = 60
_MOE_LAUNCHES = 120
_BIAS_LAUNCHES = 8
_EXCHANGE_LAUNCHES = 20
_KEY_BLOCK = 128


@dataclass(frozen=True)
class Work:
    """One thing that forward does.

    Args:
        name, part: for the breakdown.
        kind: "gemm" of `count` products (m, n, k); "attention" of `flops` with head width k; "memory" of `num_bytes`;
            a collective of `num_bytes` a rank over the group "tp", "cp" or "ep".
        backward: memory traffic of backward as a multiple of forward's.
        low_precision: whether a product runs in the recipe's format (else in 16 bits).
        remote: for an all-to-all, fraction of the bytes that leaves the NVLink domain.
        recompute: the lightest recomputation that does this again: "selective", "experts" or "full".
        launches: kernels that the host launches for it, forward and backward.
    """

    name: str
    part: Part
    kind: Literal["gemm", "attention", "memory", "collective"]
    m: float = 0.0
    n: float = 0.0
    k: float = 0.0
    count: int = 1
    flops: float = 0.0
    num_bytes: float = 0.0
    backward: float = 1.5
    low_precision: bool = True
    collective: Collective = "all_gather"
    group: Literal["tp", "cp", "ep"] = "tp"
    remote: float = 0.0
    recompute: Literal["selective", "experts", "full"] = "full"


@dataclass(frozen=True)
class Launches:
    """Kernels that the host launches per layer and micro-batch, forward and backward.

    Args:
        fixed: outside the routed experts; CUDA graphs can capture them.
        ragged: around the routed experts, whose row counts change from step to step, so that graphs cannot.
        experts: units of a grouped linear's loop over its local experts (casts, scales, products).
    """

    fixed: float
    ragged: float
    experts: float


def launches(arch: Architecture, kind: LayerKind, s: Strategy, rows: float | None = None) -> Launches:
    """Counted from the modules of a Megatron-like layer.

    Token chunks launch the routed experts again, rounds only the exchange.
    """
    if not kind.is_moe:
        return Launches(_DENSE_LAUNCHES, 0.0, 0.0)
    local_experts = arch.experts / s.ep
    units = s.numbers.expert_launches * local_experts
    ragged = _BIAS_LAUNCHES * local_experts if arch.expert_bias else 0.0
    if s.chunks > 1:
        return Launches(_DENSE_LAUNCHES + _MOE_LAUNCHES, (ragged + _EXCHANGE_LAUNCHES) * s.chunks, units * s.chunks)
    if s.rows_per_round:
        balanced = s.local_tokens / s.tp * arch.top_k
        ragged += _EXCHANGE_LAUNCHES * num_passes(s, balanced if rows is None else rows)
    return Launches(_DENSE_LAUNCHES + _MOE_LAUNCHES, ragged, units)


def layer_work(arch: Architecture, kind: LayerKind, s: Strategy, sys: System, rows: float | None = None) -> list[Work]:
    """Forward work of one layer and micro-batch on one rank.

    Args:
        rows: rows that the rank's experts receive; None for balanced routing.
    """
    work = _attention(arch, kind, s)
    if kind.is_moe:
        work += _experts(arch, s, sys, rows)
        if arch.shared_ffn:
            work += _ffn(arch, s, arch.shared_ffn, "shared expert", has_norm=False)
    else:
        work += _ffn(arch, s, arch.ffn, "ffn", has_norm=True)
    return work


def head_work(arch: Architecture, s: Strategy) -> list[Work]:
    """Final norm, logits and loss of one micro-batch on the last stage; vocabulary sharded over TP."""
    n, m = _tokens(s)
    logits = n * arch.vocab / s.tp
    return [
        _norm("final norm", "head", arch.hidden * m),
        *_gather("head", s, arch.hidden * n, name="logits"),
        Work("logits", "head", "gemm", m=n, n=arch.vocab / s.tp, k=arch.hidden, low_precision=False),
        Work("cross entropy", "head", "memory", num_bytes=10.0 * logits, backward=0.6),
    ]


def _tokens(s: Strategy) -> tuple[float, float]:
    n = float(s.local_tokens)
    return n, n / s.tp if s.is_sequence_parallel else n


def _attention(arch: Architecture, kind: LayerKind, s: Strategy) -> list[Work]:
    n, m = _tokens(s)
    h, heads = arch.hidden, arch.heads / s.tp
    kv_heads = max(1.0, arch.kv_heads / s.tp)
    work = [_norm("attention norm", "attention", h * m, dropout=arch.dropout), *_gather("attention", s, h * n)]
    if arch.latent is None:
        width = (heads + 2 * kv_heads) * arch.head_dim
        work += _linear("qkv", "attention", s, n, width, h)
        work.append(Work("rotary", "attention", "memory", num_bytes=4.0 * n * (heads + kv_heads) * arch.head_dim))
        kv_width = 2 * kv_heads * arch.head_dim
    else:
        lat = arch.latent
        down = lat.q_lora_rank + lat.kv_lora_rank + lat.qk_rope_head_dim
        q_in = lat.q_lora_rank or h
        work += _linear("latent down", "attention", s, n, down, h)
        work += _linear("q up", "attention", s, n, heads * arch.qk_dim, q_in, recompute="selective")
        kv_up = heads * (lat.qk_nope_head_dim + lat.v_head_dim)
        work += _linear("kv up", "attention", s, n, kv_up, lat.kv_lora_rank, recompute="selective")
        # Norms of the latents, rotary on part of each head, keys assembled by concatenation.
        moved = 2.0 * down + 2.0 * heads * (2 * arch.qk_dim + lat.v_head_dim)
        work.append(Work("rotary, concat", "attention", "memory", num_bytes=2.0 * n * moved, recompute="selective"))
        kv_width = heads * (arch.qk_dim + lat.v_head_dim)
    work += _core(arch, kind, s, n, heads)
    if s.cp > 1:
        exchanged = 2.0 * n * (s.cp - 1) * kv_width
        work.append(
            Work("key/value ring", "attention", "collective", num_bytes=exchanged, collective="ring", group="cp")
        )
    work += _linear("output projection", "attention", s, n, h, heads * arch.v_dim)
    return [*work, *_gather("attention", s, h * n, name="output projection")]


def _core(arch: Architecture, kind: LayerKind, s: Strategy, n: float, heads: float) -> list[Work]:
    if s.attention == "flash":
        # Kernels work on blocks of keys: a window costs one block more than it shows.
        context = min(s.seq / 2, mean_context(s.seq, kind.window) + (_KEY_BLOCK if kind.window else 0))
        dim = (arch.qk_dim + arch.v_dim) / 2
        return [Work("flash attention", "attention", "attention", flops=4.0 * n * heads * dim * context, k=dim)]
    batch = int(s.micro_batch * heads)
    scores = n * heads * s.seq
    return [
        Work("scores", "attention", "gemm", m=s.seq, n=s.seq, k=arch.qk_dim, count=batch, recompute="selective"),
        # softmax in and out, mask, dropped copy, read once more by the product with the values.
        Work("softmax, dropout", "attention", "memory", num_bytes=9.0 * scores, backward=1.1, recompute="selective"),
        Work("values", "attention", "gemm", m=s.seq, n=arch.v_dim, k=s.seq, count=batch, recompute="selective"),
    ]


def _ffn(arch: Architecture, s: Strategy, width: int, name: str, *, has_norm: bool) -> list[Work]:
    n, m = _tokens(s)
    h, local = arch.hidden, width / s.tp
    inputs = 2 if arch.gated else 1
    work = [_norm("ffn norm", "ffn", h * m, dropout=arch.dropout)] if has_norm else []
    work += _gather("ffn", s, h * n)
    work += _linear(f"{name} in", "ffn", s, n, inputs * local, h)
    work.append(
        Work(f"{name} activation", "ffn", "memory", num_bytes=2.0 * (inputs + 1) * local * n, recompute="selective")
    )
    work += _linear(f"{name} out", "ffn", s, n, h, local)
    return [*work, *_gather("ffn", s, h * n, name=f"{name} out")]


def _experts(arch: Architecture, s: Strategy, sys: System, received: float | None) -> list[Work]:
    n, m = _tokens(s)
    h, width = arch.hidden, arch.moe_ffn
    # Without sequence parallelism every TP rank holds all tokens and routes its own share of them.
    tokens = m if s.is_sequence_parallel or s.tp == 1 else n / s.tp
    sent = tokens * arch.top_k
    rows = sent if received is None else received
    local_experts = max(1, arch.experts // s.ep)
    passes = num_passes(s, rows)
    # Token chunks come back to every expert; rounds walk the experts once and cut only those at their edges.
    products = local_experts * s.chunks if s.chunks > 1 else local_experts + passes - 1
    per_expert = rows / products
    inputs = 2 if arch.gated else 1
    fused = s.dispatcher == "hierarchical"
    # Copies of a row around the exchange: permute and sort by expert, and back; a fused dispatcher saves one each.
    copies = 4.0 * h * (1 if fused or s.ep == 1 else 2)
    work = [
        _norm("moe norm", "router", h * m),
        Work("router", "router", "gemm", m=tokens, n=arch.experts, k=h, low_precision=False),
        Work("top-k", "router", "memory", num_bytes=16.0 * tokens * arch.experts),
        Work("permute", "experts", "memory", num_bytes=copies * rows, recompute="experts"),
        *_dispatch("dispatch", arch, s, sys, sent, passes),
        *_linear("experts in", "experts", s, per_expert, inputs * width, h, count=products, recompute="experts"),
        Work(
            "expert activation",
            "experts",
            "memory",
            num_bytes=2.0 * (inputs + 1) * width * rows,
            recompute="selective",
        ),
        *_linear("experts out", "experts", s, per_expert, h, width, count=products),
        *_dispatch("combine", arch, s, sys, sent, passes),
        Work("unpermute", "experts", "memory", num_bytes=(copies - 2.0 * h) * rows + 2.0 * h * tokens),
    ]
    if arch.expert_bias:
        # Eager kernels, expert by expert: bias times routing weight in fp32 (4), the sum (10), their concatenation (8),
        # back to 16 bits (6); backward the casts (12), both factors' gradients (24) and the pieces' concatenation (4).
        work.append(Work("expert bias", "experts", "memory", num_bytes=28.0 * h * rows, backward=40 / 28))
    if arch.expert_clamp:
        # Eager kernels too: both halves are clamped (4 bytes an element) and put together again (4); backward compares,
        # masks (11 on average of a one-sided and a two-sided clamp) and puts the halves' gradients together (4).
        clamped = 8.0 * inputs * width * rows
        work.append(
            Work("expert clamp", "experts", "memory", num_bytes=clamped, backward=15 / 8, recompute="selective")
        )
    if s.chunks > 1:
        # Every token chunk comes back to every expert: its weights are read, its gradients added once more.
        weights = local_experts * arch.expert_params * (s.chunks - 1)
        work.append(Work("weights again", "experts", "memory", num_bytes=2.0 * weights, backward=s.grad_bytes + 1.0))
    return work


def num_passes(s: Strategy, rows: float) -> int:
    """Exchanges in which a layer's rows arrive: token chunks, or rounds of at most R rows."""
    if s.rows_per_round:
        return max(1, ceil(rows / s.rows_per_round))
    return s.chunks


def _dispatch(name: str, arch: Architecture, s: Strategy, sys: System, rows: float, passes: int) -> list[Work]:
    if s.ep == 1:
        return []
    domains = -(-s.ep // sys.nvlink_domain)
    remote = 1 - 1 / domains
    if s.dispatcher == "hierarchical" and domains > 1:
        # A token crosses once per domain that holds one of its experts, not once per expert.
        reached = domains * (1 - (1 - 1 / domains) ** arch.top_k)
        remote *= reached / arch.top_k
    recompute: Literal["experts", "full"] = "experts" if name == "dispatch" else "full"
    return [
        Work(
            f"{name} ({passes} exchanges)" if passes > 1 else name,
            "experts",
            "collective",
            num_bytes=2.0 * arch.hidden * rows * (s.ep - 1) / s.ep,
            collective="all_to_all",
            group="ep",
            count=passes,
            remote=remote,
            recompute=recompute,
        )
    ]


def _linear(
    name: str,
    part: Part,
    s: Strategy,
    m: float,
    n: float,
    k: float,
    count: int = 1,
    recompute: Literal["selective", "experts", "full"] = "full",
) -> list[Work]:
    work = [Work(name, part, "gemm", m=m, n=n, k=k, count=count, recompute=recompute)]
    if s.numbers.quantise_bytes:
        traffic = s.numbers.quantise_bytes * m * k * count
        # Backward casts the gradient of the output instead of the input.
        work.append(Work("quantise", part, "memory", num_bytes=traffic, backward=n / k, recompute=recompute))
    return work


def _norm(name: str, part: Part, elements: float, *, dropout: bool = False) -> Work:
    # Residual add and norm in one kernel: reads both, writes both; dropout adds its mask and another pass.
    return Work(name, part, "memory", num_bytes=(13.0 if dropout else 8.0) * elements)


def _gather(part: Part, s: Strategy, elements: float, name: str = "input") -> list[Work]:
    """The tensor parallel collective before a column-split or after a row-split product."""
    if s.tp == 1:
        return []
    if s.is_sequence_parallel:
        label = f"TP gather ({name})"
        return [Work(label, part, "collective", num_bytes=2.0 * elements, collective="all_gather", group="tp")]
    if name == "input":
        # Identity forward, all-reduce backward: charged half on each side.
        return [Work("TP reduce (input)", part, "collective", num_bytes=elements, collective="all_reduce", group="tp")]
    return [Work(f"TP reduce ({name})", part, "collective", num_bytes=elements, collective="all_reduce", group="tp")]
