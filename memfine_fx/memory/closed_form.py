"""The closed-form memory model of MemFine (arXiv 2511.21431), in the paper's notation; no graph, no torch.

Used where there is no graph to read (planning for clusters) and as the reference for what the paper claims. What
a traced graph knows better is in `graph_peak` and the planner.

Notation (the paper's)
    L layers, s sequence length, h hidden, a heads, h_d head width, k_a key-value heads, g_d and g_e FFN width of a
    dense layer and of an expert, e_n experts, t_k top-k, b micro-batch; parallel sizes t (tensor), p (pipeline),
    c (context), e (expert), d (data); v virtual stages a GPU, l layers a stage, r_pp pipeline rank; D_t bytes an
    element; M_GPU memory of a GPU and alpha its usable fraction; m_g activation sets alive at once.
    s' rows that an MoE layer receives on one GPU, s'' the measured s' of one layer and iteration, s'_max what fits.
    The paper writes c for the number of chunks too; here that is `chunks`.

Equations
    M_sta = v l sum_i S_i (D_para + D_grad + 4 D_opt)
    (1)  M_act = m_g / (t c) D_t b [s (5h + a h_d + 2 k_a h_d + e_n) + s' (2h + 2 g_e)]
         m_g = v p + p - 2 r_pp - 1, or 1 under full recomputation
    (2)  M_sta + M_act <= alpha M_GPU, solved for s' gives s'_max
    (4)  chunks = ceil(s'' / s'_max), raised to the next of the bins

What (1) leaves out, so that it is no bound on a real step: the post-activation rows (s' g_e), shared experts,
temporaries of backward, expert weight gradients, dispatch buffers, stored layer inputs and fragmentation. And (4)
bounds the peak only if the chunks receive equal shares, which skewed routing does not give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from memfine_fx.errors import BudgetInfeasible, ConfigError

__all__ = [
    "PAPER_BINS",
    "Architecture",
    "Parallel",
    "activation_bytes",
    "activation_sets",
    "chunk_count",
    "max_rows",
    "row_bytes",
    "sequence_bytes",
    "snap_to_bins",
    "static_bytes",
]

PAPER_BINS = (1, 2, 4, 8)
"""The numbers of chunks among which the paper chooses."""


@dataclass(frozen=True)
class Architecture:
    """Sizes of a model, see the module's notation."""

    s: int
    h: int
    a: int
    h_d: int
    k_a: int
    g_e: int
    e_n: int
    t_k: int

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True)
class Parallel:
    """Parallel sizes, micro-batch and bytes an element, see the module's notation."""

    t: int = 1
    p: int = 1
    c: int = 1
    e: int = 1
    v: int = 1
    b: int = 1
    D_t: int = 2

    def __post_init__(self) -> None:
        _check_positive(self)


def static_bytes(S: Sequence[float], *, layers: int, D_para: float, D_grad: float, D_opt: float) -> int:
    """Return M_sta, the bytes of parameters, gradients and optimizer tensors on this GPU.

    Args:
        S: elements of the rank's shard of each module of one layer.
        layers: v l, layers on this GPU.
        D_para, D_grad, D_opt: bytes an element of parameters, gradients and each of four optimizer tensors.
    """
    return math.ceil(layers * sum(S) * (D_para + D_grad + 4 * D_opt))


def activation_sets(parallel: Parallel, r_pp: int, *, recomputes_fully: bool) -> int:
    """Return m_g, the number of activation sets alive at once on pipeline rank `r_pp`.

    Raises:
        ConfigError: `r_pp` is no rank of the pipeline.
    """
    if not 0 <= r_pp < parallel.p:
        raise ConfigError(f"r_pp={r_pp} is not a rank of a pipeline of p={parallel.p} stages")
    return 1 if recomputes_fully else parallel.v * parallel.p + parallel.p - 2 * r_pp - 1


def sequence_bytes(model: Architecture, parallel: Parallel, m_g: int = 1) -> float:
    """The part of (1) that the sequence fixes, whatever the routing."""
    return float(_sequence(model, parallel, m_g))


def row_bytes(model: Architecture, parallel: Parallel, m_g: int = 1) -> float:
    """Bytes of (1) for each received row: the row, the gate and up output, the expert's output."""
    return float(_row(model, parallel, m_g))


def _sequence(model: Architecture, parallel: Parallel, m_g: int) -> Fraction:
    heads = model.a * model.h_d + 2 * model.k_a * model.h_d
    return _scale(parallel, m_g) * model.s * (5 * model.h + heads + model.e_n)


def _row(model: Architecture, parallel: Parallel, m_g: int) -> Fraction:
    return _scale(parallel, m_g) * (2 * model.h + 2 * model.g_e)


def activation_bytes(model: Architecture, parallel: Parallel, s_prime: float, *, chunks: int = 1, m_g: int = 1) -> int:
    """M_act of (1), with the received rows in `chunks` equal shares.

    Args:
        s_prime: s', rows received by one GPU in one layer.
        chunks: in how many sequential shares; each frees its rows before the next.
        m_g: see `activation_sets`.
    """
    return math.ceil(_sequence(model, parallel, m_g) + _row(model, parallel, m_g) * s_prime / chunks)


def max_rows(model: Architecture, parallel: Parallel, *, M_sta: float, M_GPU: float, alpha: float, m_g: int = 1) -> int:
    """s'_max: the most rows that satisfy (2).

    Raises:
        ConfigError: `alpha` is not in (0, 1].
        BudgetInfeasible: what the sequence fixes does not fit, even without rows.
    """
    if not 0.0 < alpha <= 1.0:
        raise ConfigError(f"alpha={alpha} must be a fraction in (0, 1] of the GPU's memory")
    fixed, row = _sequence(model, parallel, m_g), _row(model, parallel, m_g)
    rows = math.floor((Fraction(alpha * M_GPU) - Fraction(M_sta) - fixed) / row)
    if rows < 1:
        needed = math.ceil(Fraction(M_sta) + fixed + row)
        terms = [("static", math.ceil(M_sta)), ("sequence activations", math.ceil(fixed))]
        raise BudgetInfeasible(int(alpha * M_GPU), needed, sorted(terms, key=lambda term: -term[1]))
    return rows


def chunk_count(s_second: float, s_max: float, bins: Sequence[int] | None = PAPER_BINS) -> int:
    """Number of chunks by (4).

    Args:
        s_second: s'', rows that this layer received in this iteration.
        s_max: s'_max.
        bins: allowed numbers, or None for the exact one.
    """
    exact = max(1, math.ceil(s_second / s_max))
    return exact if bins is None else snap_to_bins(exact, bins)


def snap_to_bins(chunks: int, bins: Sequence[int]) -> int:
    """The smallest bin of at least `chunks`; beyond the largest bin, the next multiple of it.

    NOTE: the paper does not say what happens beyond its largest bin; staying at it would break (2).
    """
    fitting = [size for size in bins if size >= chunks]
    largest = max(bins)
    return min(fitting) if fitting else -(-chunks // largest) * largest


def _scale(parallel: Parallel, m_g: int) -> Fraction:
    """Exact, so that the smallest budget that a refusal names is one that fits."""
    return Fraction(m_g * parallel.D_t * parallel.b, parallel.t * parallel.c)


def _check_positive(record: Architecture | Parallel) -> None:
    for name, value in vars(record).items():
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{type(record).__name__}.{name}={value!r} must be a positive int")
