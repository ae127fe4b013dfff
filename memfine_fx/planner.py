"""Planner: from a region's byte terms and a budget to its chunk plan; pure functions, no torch.

Terms of a region's own working set in one step (T tokens, R rows a chunk, N = T*K):
    output        the combined [T,H_out], and its fp32 accumulator where the model is in low precision
    hidden grad   the same for the gradient of the tokens, in backward
    weight grads  the gradients of the expert parameters, allocated by the region's backward
    index         order (4 N) and offsets, kept from forward to backward; the sort's own arrays in forward
    chunk         R rows: gathered rows and gradients, the body's peak, casts and staging

The peak is the larger of forward and backward. It is affine and increasing in R piece by piece, so the
largest R that fits is found exactly by bisection over integers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import sympy

from memfine_fx.config import Axis
from memfine_fx.errors import BudgetInfeasible
from memfine_fx.memory.symbols import GROUPS, ROWS
from memfine_fx.records import ChunkPlan

__all__ = ["KNEE_ROWS", "RegionBytes", "plan_region", "region_peak"]

KNEE_ROWS = {"cpu": 2048, "cuda": 32768}
"""Rows a chunk at which time stops falling; docs/design.md, "The throughput knee", has the measurement (CPU) and
the reasoning where it is not measured yet (CUDA)."""


@dataclass(frozen=True)
class RegionBytes:
    """What the planner knows of a region.

    Args:
        top_k, num_experts, hidden, out_width: K, E, H, H_out.
        item_bytes, out_item_bytes, contribution_item_bytes, accumulator_item_bytes: bytes per element of the
            tokens, the region's output, a row's contribution and the sums over choices.
        weight_item_bytes: bytes per element of the routing weight, 0 without one.
        param_bytes: bytes of all expert parameters whose gradient is wanted.
        staging_bytes: fp32 gradients of one expert, where a split expert needs them.
        forward_peak, backward_peak: of one body call, in R (and G).
        takes_group: whether a chunk may hold several experts.
        device_type: "cpu" or "cuda".
    """

    top_k: int
    num_experts: int
    hidden: int
    out_width: int
    item_bytes: int
    out_item_bytes: int
    contribution_item_bytes: int
    accumulator_item_bytes: int
    weight_item_bytes: int
    param_bytes: int
    staging_bytes: int
    forward_peak: sympy.Expr
    backward_peak: sympy.Expr
    takes_group: bool
    device_type: str


def region_peak(region: RegionBytes, num_tokens: int, rows: int, axis: Axis = "rows") -> dict[str, int]:
    """Bytes of each term at the peak, with R = `rows`; the larger of forward and backward.

    Args:
        region: its byte terms.
        num_tokens: T.
        rows: R, at most N rows matter.
        axis: token slices come back to every expert, so they stage all experts' gradients.
    """
    num_routed = num_tokens * region.top_k
    rows = max(1, min(rows, num_routed))
    forward = _forward_terms(region, num_tokens, rows)
    backward = _backward_terms(region, num_tokens, rows)
    if region.staging_bytes:
        backward["gradient staging"] = region.staging_bytes * (region.num_experts if axis == "tokens" else 1)
    return max(forward, backward, key=lambda terms: sum(terms.values()))


def plan_region(
    region: RegionBytes,
    num_tokens: int,
    *,
    axis: Axis,
    rows_per_chunk: int | None = None,
    tokens_per_chunk: int | None = None,
    budget_bytes: int | None = None,
    available_bytes: int | None = None,
    min_rows: int = 64,
) -> ChunkPlan:
    """The plan of one region in one step.

    Args:
        region: its byte terms.
        num_tokens: T of this step.
        axis: which way to chunk.
        rows_per_chunk, tokens_per_chunk: fixed by the user, or None.
        budget_bytes: what the user asked for, for the message.
        available_bytes: what of it this region may use, or None without a limit.
        min_rows: smallest chunk worth planning.

    Raises:
        BudgetInfeasible: not even `min_rows` a chunk fits.
    """
    num_routed = max(1, num_tokens * region.top_k)
    knee = min(KNEE_ROWS.get(region.device_type, KNEE_ROWS["cuda"]), num_routed)
    if axis == "tokens":  # at most one row of an expert a token, as top-k gives: rows are bounded by tokens
        wanted = tokens_per_chunk or max(1, (rows_per_chunk or knee) // region.top_k)
        rows, reason = max(1, min(wanted, num_tokens)), f"token slices of {wanted} (FCDA)"
    elif rows_per_chunk is not None:
        rows, reason = min(rows_per_chunk, num_routed), "rows per chunk fixed by the config"
    else:
        rows, reason = knee, f"throughput knee of {region.device_type}"

    def total(candidate: int) -> int:
        return sum(region_peak(region, num_tokens, candidate, axis).values())

    if available_bytes is not None and total(rows) > available_bytes:
        low = min(min_rows, rows)
        if total(low) > available_bytes:
            terms = region_peak(region, num_tokens, low, axis)
            raise _infeasible(terms, budget_bytes, available_bytes)
        rows, reason = (
            _largest(low, rows, lambda candidate: total(candidate) <= available_bytes),
            (f"largest chunk within {available_bytes:,} B left for this region"),
        )
    elif available_bytes is not None:
        reason = f"{reason}, within the budget"
    return ChunkPlan(axis, rows, rows if axis == "tokens" else 0, total(rows), reason)


def _infeasible(terms: dict[str, int], budget_bytes: int | None, available_bytes: int) -> BudgetInfeasible:
    budget = available_bytes if budget_bytes is None else budget_bytes
    largest = sorted(terms.items(), key=lambda term: -term[1])[:4]
    return BudgetInfeasible(budget, budget + sum(terms.values()) - available_bytes, largest)


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number that fits, between `low`, which does, and `high`, which does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _forward_terms(region: RegionBytes, num_tokens: int, rows: int) -> dict[str, int]:
    chunk = rows * (region.hidden * region.item_bytes + region.weight_item_bytes)
    chunk += _body(region.forward_peak, region, rows) + _cast_bytes(region, rows) + _index_chunk(rows)
    return {
        "output": num_tokens * region.out_width * _held(region.out_item_bytes, region.accumulator_item_bytes),
        "index": _index_bytes(region, num_tokens),
        "chunk": chunk,
    }


def _backward_terms(region: RegionBytes, num_tokens: int, rows: int) -> dict[str, int]:
    rows_grad = rows * region.out_width * (region.out_item_bytes + region.contribution_item_bytes)
    if region.out_item_bytes == region.contribution_item_bytes:
        rows_grad //= 2
    chunk = rows * (region.hidden * region.item_bytes + region.weight_item_bytes) + rows_grad
    chunk += _body(region.backward_peak, region, rows) + _index_chunk(rows)
    if region.accumulator_item_bytes != region.item_bytes:
        chunk += rows * region.hidden * region.accumulator_item_bytes
    return {
        "output grad": num_tokens * region.out_width * region.out_item_bytes,
        "hidden grad": num_tokens * region.hidden * _held(region.item_bytes, region.accumulator_item_bytes),
        "routing weight grad": num_tokens * region.top_k * region.weight_item_bytes,
        "expert weight grads": region.param_bytes,
        "index": _index_bytes(region, num_tokens),
        "chunk": chunk,
    }


def _held(item_bytes: int, accumulator_bytes: int) -> int:
    """Bytes per element while a sum and its cast are both alive."""
    return accumulator_bytes if item_bytes == accumulator_bytes else item_bytes + accumulator_bytes


def _cast_bytes(region: RegionBytes, rows: int) -> int:
    if region.contribution_item_bytes == region.accumulator_item_bytes:
        return 0
    return rows * region.out_width * region.accumulator_item_bytes


def _body(peak: sympy.Expr, region: RegionBytes, rows: int) -> int:
    return int(_function_of(peak)(rows, region.num_experts))


@functools.lru_cache(maxsize=1024)
def _function_of(peak: sympy.Expr) -> Callable[[int, int], float]:
    """The expression in (R, G) as a function: plans are solved while a step waits."""
    function: Callable[[int, int], float] = sympy.lambdify((ROWS, GROUPS), peak, modules="math")
    return function


def _index_chunk(rows: int) -> int:
    return 3 * 8 * rows


def _index_bytes(region: RegionBytes, num_tokens: int) -> int:
    """Order and offsets, with the sort's values and places, which die with the dispatch."""
    return num_tokens * region.top_k * (4 + 8 + 8) + 3 * 8 * (region.num_experts + 1)
