"""Peak bytes of each pipeline rank, and the chance that a bad iteration does not fit.

peak = weights + gradients + optimizer + kept activations of all live micro-batches + one layer's working set + head
       + what the framework holds

Kept activations: 1F1B keeps pp - rank micro-batches alive on a rank, interleaving as many chunks as the closed form's
m_g (arXiv 2511.21431 equation 1). The usable fraction alpha covers fragmentation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import sympy as sp
from numpy.typing import NDArray

from memfine_fx.errors import BudgetInfeasible
from memfine_fx.memory import closed_form
from memfine_planner.costs.architectures import Architecture, LayerKind
from memfine_planner.costs.strategy import Recompute, Strategy
from memfine_planner.hardware.systems import System
from memfine_planner.training.activations import LayerActivations, layer_activation_bytes
from memfine_planner.training.routing import Routing, sample_rank_rows
from memfine_planner.training.stages import Stage, stages
from memfine_planner.training.step import local_params

__all__ = ["ALPHA", "OomRisk", "RankMemory", "choose_chunks", "choose_rows", "memory", "oom_risk", "peak_expression"]

ALPHA = 0.94
"""Usable fraction of a GPU's memory; the rest is fragmentation and the driver."""
UNLIMITED_ROWS = 1 << 40
_FRAMEWORK_BYTES = 3.0e9
"""CUDA context, NCCL buffers, cuBLAS workspaces, as Megatron runs report beyond the allocator."""


@dataclass(frozen=True)
class RankMemory:
    """One pipeline rank's peak under balanced routing, linear in the rows that a layer receives.

    Args:
        terms: (name, bytes) that add up to `peak`.
        saved_per_row: bytes per received row, summed over the layers kept at once (each with its own rows).
        working_per_row: bytes per row of the fullest layer, in backward.
        moe_sets: how many (layer, micro-batch) pairs keep rows.
    """

    rank: int
    terms: tuple[tuple[str, float], ...]
    saved_per_row: float
    working_per_row: float
    moe_sets: float
    balanced_rows: float
    rows_cap: float

    @property
    def peak(self) -> float:
        return sum(num_bytes for _, num_bytes in self.terms)

    @property
    def without_rows(self) -> float:
        return self.peak - self._row_bytes(self.balanced_rows, self.balanced_rows)

    def _row_bytes(self, mean_rows: float, most_rows: float) -> float:
        capped = min(most_rows, self.rows_cap) if self.rows_cap else most_rows
        return self.saved_per_row * self.moe_sets * mean_rows + self.working_per_row * capped

    def peak_with(self, mean_rows: float, most_rows: float) -> float:
        """Peak when the layers receive `mean_rows` on average and the fullest `most_rows`."""
        return self.without_rows + self._row_bytes(mean_rows, most_rows)


def memory(arch: Architecture, sys: System, s: Strategy) -> tuple[RankMemory, ...]:
    """Peak of every pipeline rank under balanced routing."""
    return tuple(_rank_memory(arch, stage, s) for stage in stages(arch, s.pp, s.vp))


def live_sets(s: Strategy, rank: int) -> float:
    """Micro-batches whose activations a rank keeps at once, as a multiple of its whole stage."""
    if s.vp == 1:
        return min(s.pp - rank, s.micro_batches)
    chunks = closed_form.activation_sets(closed_form.Parallel(p=s.pp, v=s.vp), rank, recomputes_fully=False)
    return min(chunks, s.micro_batches * s.vp) / s.vp


def _layers(arch: Architecture, kind: LayerKind, s: Strategy) -> list[tuple[float, LayerActivations]]:
    """A kind of layer with and without recomputation, by share of the layers, less what is offloaded."""
    on_device = 1 - s.offload_layers / arch.layers
    share = 1.0 if s.recompute_layers is None else s.recompute_layers / arch.layers
    found = [(share * on_device, _activations(arch, kind, s))]
    if share < 1:
        plain = replace(s, recompute="none", recompute_layers=None, chunks=1, rows_per_round=0)
        found.append(((1 - share) * on_device, _activations(arch, kind, plain)))
    return [entry for entry in found if entry[0] > 0 or len(found) == 1]


def _activations(arch: Architecture, kind: LayerKind, s: Strategy) -> LayerActivations:
    """Looked up by what activations depend on, so that strategies share them."""
    return _shared_activations(
        arch,
        kind,
        s.tp,
        s.cp,
        s.micro_batch,
        s.seq,
        s.precision,
        s.recompute,
        s.chunks,
        s.sequence_parallel,
        s.attention,
        s.saves_expert_output,
    )


@lru_cache(maxsize=20_000)
def _shared_activations(
    arch: Architecture,
    kind: LayerKind,
    tp: int,
    cp: int,
    micro_batch: int,
    seq: int,
    precision: str,
    recompute: Recompute,
    chunks: int,
    sequence_parallel: bool,
    attention: Literal["flash", "unfused"],
    saves_expert_output: bool,
) -> LayerActivations:
    alone = Strategy(
        gpus=tp * cp,
        tp=tp,
        cp=cp,
        micro_batch=micro_batch,
        seq=seq,
        precision=precision,
        recompute=recompute,
        chunks=chunks,
        sequence_parallel=sequence_parallel,
        attention=attention,
        saves_expert_output=saves_expert_output,
    )
    return layer_activation_bytes(arch, kind, alone)


def static_terms(arch: Architecture, stage: Stage, s: Strategy) -> tuple[tuple[str, float], ...]:
    """Weights, gradients and optimizer state of a stage on one rank."""
    dense, experts = local_params(arch, stage, s)
    over, expert_over = s.dp * s.cp, s.expert_dp
    owned = dense / over + experts / expert_over
    held = dense + experts
    weights = 2.0 * (owned if s.zero == 3 else held)
    gradients = s.grad_bytes * (owned if s.zero >= 2 else held)
    terms = [
        ("weights", weights),
        ("gradients", gradients),
        ("optimizer state", s.optimizer_bytes * (owned if s.zero >= 1 else held)),
    ]
    if s.zero == 3:
        # Two layers gathered at a time: one in use, one in flight, with the gradient of one.
        largest = held / max(1, stage.num_layers)
        terms.append(("gathered weights", largest * (4.0 + s.grad_bytes)))
    return tuple(terms)


@lru_cache(maxsize=50_000)
def _rank_memory(arch: Architecture, stage: Stage, s: Strategy) -> RankMemory:
    live = live_sets(s, stage.rank)
    kept = rows_saved = moe_sets = working = working_per_row = balanced = 0.0
    for kind, count in stage.kinds:
        for share, layer in _layers(arch, kind, s):
            kept += live * count * share * layer.fixed
            working = max(working, layer.working)
            if kind.is_moe:
                rows_saved += live * count * share * layer.per_row
                moe_sets += live * count * share
                working_per_row = max(working_per_row, layer.working_per_row)
                balanced = layer.balanced_rows
    n = s.local_tokens
    head = 6.0 * n * arch.vocab / s.tp + 2.0 * n * arch.hidden if stage.has_head else 0.0
    embedding = 2.0 * n * arch.hidden * live if stage.has_embedding and s.recompute != "full" else 0.0
    capped = min(balanced, s.rows_per_round) if s.rows_per_round else balanced
    terms = (
        *static_terms(arch, stage, s),
        ("kept activations", kept + embedding),
        ("kept expert rows", rows_saved * balanced),
        ("working set", max(working, head)),
        ("working expert rows", working_per_row * capped),
        ("framework", _FRAMEWORK_BYTES),
    )
    per_set = rows_saved / moe_sets if moe_sets else 0.0
    return RankMemory(stage.rank, terms, per_set, working_per_row, moe_sets, balanced, float(s.rows_per_round))


def peak_expression(rank: RankMemory) -> sp.Expr:
    """The peak as an expression in `rows`, the rows every layer receives (no bound by rounds applied)."""
    rows = sp.Symbol("rows", nonnegative=True)
    return sp.Float(rank.without_rows) + (sp.Float(rank.saved_per_row * rank.moe_sets) + rank.working_per_row) * rows


def most_rows_that_fit(sys: System, rank: RankMemory) -> float:
    """s'_max: the rows per layer at which `peak_expression` reaches the usable memory; infinite without experts.

    Raises:
        BudgetInfeasible: what does not depend on the routing does not fit.
    """
    usable = ALPHA * sys.memory_bytes
    if rank.without_rows > usable:
        largest = sorted(((name, int(size)) for name, size in rank.terms), key=lambda term: -term[1])
        raise BudgetInfeasible(int(usable), int(rank.without_rows), largest[:4])
    slope = rank.saved_per_row * rank.moe_sets + rank.working_per_row
    return (usable - rank.without_rows) / slope if slope else float("inf")


def choose_chunks(sys: System, rank: RankMemory, measured_rows: float, s: Strategy) -> int:
    """MACT: the paper's c for a layer that receives `measured_rows` (equation 4 and its bins)."""
    whole = unchunked(rank, s.chunks)
    return closed_form.chunk_count(measured_rows, most_rows_that_fit(sys, whole))


def unchunked(rank: RankMemory, chunks: int) -> RankMemory:
    """The same rank with its working rows unchunked."""
    terms = tuple((name, size * chunks if name == "working expert rows" else size) for name, size in rank.terms)
    return replace(rank, terms=terms, working_per_row=rank.working_per_row * chunks, rows_cap=0.0)


def choose_rows(sys: System, rank: RankMemory) -> int:
    """R: the most rows a round may receive so that any routing fits, a multiple of 128 (0 if not even 128 fit).

    A rank without experts does not limit it: the answer is then `UNLIMITED_ROWS`.
    """
    rows = most_rows_that_fit(sys, replace(rank, rows_cap=0.0))
    return UNLIMITED_ROWS if rows == float("inf") else int(rows // 128 * 128)


@dataclass(frozen=True)
class OomRisk:
    """Peaks over iterations of a routing distribution, on the rank where memory is tightest.

    Args:
        percentiles: (percentile, bytes).
        per_iteration: chance that an iteration does not fit.
        per_thousand: chance that at least one of 1,000 does not.
        resolution: smallest chance per iteration that the samples can show.
    """

    rank: int
    percentiles: tuple[tuple[float, float], ...]
    per_iteration: float
    per_thousand: float
    resolution: float
    usable: float


def oom_risk(
    arch: Architecture, sys: System, s: Strategy, routing: Routing, iterations: int = 4000, seed: int = 0
) -> OomRisk:
    """Sample the routing and see how often the tightest rank runs out of memory."""
    ranks = memory(arch, sys, s)
    usable = ALPHA * sys.memory_bytes
    held = stages(arch, s.pp, s.vp)
    worst: NDArray[np.float64] | None = None
    where = 0
    rows = sample_rank_rows(arch, s, routing, iterations, seed) if arch.is_moe else None
    position = {layer: index for index, layer in enumerate(arch.moe_layers)}
    for rank, stage in zip(ranks, held, strict=True):
        own = [position[layer] for chunk in stage.chunks for layer in chunk if layer in position]
        if rows is None or not own:
            peaks = np.full(iterations, rank.peak)
        else:
            most = rows[:, own].max(axis=1)
            capped = np.minimum(most, rank.rows_cap) if rank.rows_cap else most
            kept = rank.saved_per_row * rank.moe_sets * rows[:, own].mean(axis=1)
            peaks = rank.without_rows + kept + rank.working_per_row * capped
        if worst is None or peaks.max() > worst.max():
            worst, where = peaks, rank.rank
    assert worst is not None
    chance = float((worst > usable).mean())
    shown = tuple((p, float(np.percentile(worst, p))) for p in (50.0, 90.0, 99.0, 99.9, 100.0))
    return OomRisk(where, shown, chance, 1 - (1 - chance) ** 1000, 1 / iterations, usable)
