"""Chunk plans of regions and heads, from their byte terms and a budget; pure functions, no torch.

The peak is the larger of forward and backward (memory/region_bytes.py has the terms). It is affine and increasing
in R piece by piece, so the solver finds the largest R that fits by bisection over integers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

from memfine_fx.config import Axis
from memfine_fx.errors import BudgetInfeasible
from memfine_fx.memory.head_bytes import HeadBytes
from memfine_fx.memory.region_bytes import RegionBytes, region_peak, rows_of_even_round
from memfine_fx.plan.solve import Rows, StepProblem, solve
from memfine_fx.records import ChunkPlan
from memfine_fx.records.heads import HeadPlan
from memfine_fx.units import readable_bytes

__all__ = [
    "DEVIATIONS",
    "KNEE_ROWS",
    "LEAST_ROWS",
    "LEAST_TOKENS",
    "infeasible",
    "knee_tokens",
    "plan_head",
    "plan_region",
    "tried_anyway",
    "wanted_rows",
]

KNEE_ROWS = {"cpu": 2048, "cuda": 32768}
"""Rows a chunk at which time stops falling, where that is not measured for the layer (`plan.rates`).

docs/design/plan.md, "The throughput knee", has the measurement (CPU) and the reasoning where it is not measured yet
(CUDA)."""
LEAST_ROWS = 64
"""Rows below which no budget pushes a chunk: smaller expert matmuls cost time and no longer save memory, since what is
alive beside so small a chunk decides the peak."""
_KNEE_TOKENS = {"cpu": 256, "cuda": 1024}
"""Tokens a chunk from which on time hardly falls; docs/design/head.md has the measurements."""
LEAST_TOKENS = 64
"""Tokens below which no budget pushes a head's chunk: each chunk reads and writes the whole gradient of the table once,
which at 64 tokens makes a step a third slower than at the knee already (docs/design/head.md)."""
DEVIATIONS = 3
"""Of the rows of an expert, where tokens choose evenly, beyond their mean: chunks hold so many more."""


def plan_region(
    region: RegionBytes,
    num_tokens: int,
    *,
    axis: Axis,
    rows_per_chunk: int | None = None,
    tokens_per_chunk: int | None = None,
    budget_bytes: int | None = None,
    available_bytes: int | None = None,
    min_rows: int = LEAST_ROWS,
    peak_terms: Callable[[int], Mapping[str, int]] | None = None,
    peak_bytes: Callable[[int], int] | None = None,
    refuses: bool = True,
) -> ChunkPlan:
    """The plan of one region in one step.

    Args:
        region: its byte terms.
        num_tokens: T of this step.
        axis: which way to chunk.
        rows_per_chunk, tokens_per_chunk: fixed by the user, or None.
        budget_bytes: what the user asked for, for the message.
        available_bytes: what of it `peak_terms` may use, or None without a limit.
        min_rows: smallest chunk worth planning.
        peak_terms: bytes by term at the peak with R rows a chunk, increasing in R: of the whole step, or by
            default of the region alone.
        peak_bytes: their sum, where it is known without them.
        refuses: whether what fits no chunk is an error; else the smallest is tried.

    Raises:
        BudgetInfeasible: not even `min_rows` a chunk fits.
    """
    rows, reason = wanted_rows(
        region, num_tokens, axis=axis, rows_per_chunk=rows_per_chunk, tokens_per_chunk=tokens_per_chunk
    )

    def terms_of(candidate: int) -> Mapping[str, int]:
        return region_peak(region, num_tokens, candidate, axis) if peak_terms is None else peak_terms(candidate)

    def total(candidate: int) -> int:
        return sum(terms_of(candidate).values()) if peak_bytes is None else peak_bytes(candidate)

    if available_bytes is not None:
        what = "round" if _comes_in_rounds(region, axis) else "chunk"
        rows, reason = _within(
            available_bytes, rows, min_rows, total, reason, what, refuses,
            lambda least: infeasible(terms_of(least), budget_bytes, available_bytes),
        )  # fmt: skip
    predicted = sum(region_peak(region, num_tokens, rows, axis).values())
    if _comes_in_rounds(region, axis):
        return ChunkPlan(axis, region.chunk_rows(rows), 0, predicted, reason, rows_per_round=rows)
    return ChunkPlan(axis, rows, rows if _cuts_tokens(region, axis) else 0, predicted, reason)


def wanted_rows(
    region: RegionBytes,
    num_tokens: int,
    *,
    axis: Axis,
    rows_per_chunk: int | None = None,
    tokens_per_chunk: int | None = None,
) -> tuple[int, str]:
    """Rows a chunk without a budget, and why; arguments as in `plan_region`.

    On the tokens axis these are a slice's rows. Where rows of other ranks come in rounds they are a round's, as many as
    even routing brings: the rounds are what memory follows then, and the planner lowers them first.
    """
    general = region.at_most(KNEE_ROWS.get(region.device_type, KNEE_ROWS["cuda"]), num_tokens)
    if _cuts_tokens(region, axis):  # at most one row of an expert a token, as top-k gives: rows are bounded by tokens
        wanted = tokens_per_chunk or max(1, (rows_per_chunk or general) // region.top_k)
        return max(1, min(wanted, num_tokens)), f"token slices of {wanted} (FCDA)"
    if _comes_in_rounds(region, axis):
        return _round_rows(region, num_tokens, rows_per_chunk or general)
    if rows_per_chunk is not None:
        return region.at_most(rows_per_chunk, num_tokens), "rows per chunk fixed by the config"
    if region.knee_rows is None:
        return general, f"throughput knee of {region.device_type}"
    return _measured_rows(region, region.knee_rows, num_tokens)


def _measured_rows(region: RegionBytes, knee: int, num_tokens: int) -> tuple[int, str]:
    """Rows a chunk at full speed as it was measured, but no more than an expert gets where tokens choose evenly: larger
    chunks would come with skewed routing only, and make its steps larger than others.

    Tokens that choose evenly give an expert n rows at the mean and hardly ever more than n + 3 sqrt(n), so that n alone
    would split every other expert in two.
    """
    even = max(LEAST_ROWS, -(-num_tokens * region.top_k // region.num_experts))
    most = even + DEVIATIONS * math.isqrt(even)
    if most < knee:
        return region.at_most(most, num_tokens), "as many rows as an expert gets where tokens choose evenly"
    return region.at_most(knee, num_tokens), "throughput knee measured here for products of these widths"


def _round_rows(region: RegionBytes, num_tokens: int, chunk_rows: int) -> tuple[int, str]:
    assert region.all_to_all is not None, "rows of a single rank come in no rounds"
    if region.all_to_all.round_rows is not None:
        return region.all_to_all.round_rows, "rows per round fixed by the group"
    return max(chunk_rows, rows_of_even_round(num_tokens * region.top_k)), (
        "rounds of as many rows as even routing brings, with an eighth for its noise"
    )


def _comes_in_rounds(region: RegionBytes, axis: Axis) -> bool:
    return axis == "rows" and region.all_to_all is not None


def _cuts_tokens(region: RegionBytes, axis: Axis) -> bool:
    return axis == "tokens" and region.all_to_all is None


def _within(
    available_bytes: int,
    wanted: int,
    least: int,
    peak_bytes: Callable[[int], int],
    reason: str,
    what: str,
    refuses: bool,
    error_of: Callable[[int], BudgetInfeasible],
) -> tuple[int, str]:
    """Return the most rows per chunk, up to those that time asks for, with which a step fits; and why.

    Args:
        wanted, reason: rows that time asks for, and why.
        least: the smallest chunk worth planning.
        peak_bytes: of the step with so many rows.
        what: "chunk", or "round" of rows that come from other ranks.
        refuses: whether it is an error if the smallest chunk does not fit; else that is tried.
        error_of: returns the error for the smallest chunk.

    Raises:
        BudgetInfeasible: as `refuses` says.
    """
    least = min(least, wanted)
    plan = solve(StepProblem(Rows(wanted, least, peak_bytes), available_bytes, is_monotone=True))
    if plan is None and refuses:
        raise error_of(least)
    if plan is None:
        return least, tried_anyway(error_of(least))
    if plan.key == wanted:
        return wanted, f"{reason}, within the budget"
    return plan.key, f"largest {what} with which the step keeps within {readable_bytes(available_bytes)}"


def infeasible(terms: Mapping[str, int], budget_bytes: int | None, available_bytes: int) -> BudgetInfeasible:
    """The error for a peak of these terms, with the smallest budget that holds it."""
    budget = available_bytes if budget_bytes is None else budget_bytes
    largest = sorted(terms.items(), key=lambda term: -term[1])[:4]
    return BudgetInfeasible(budget, budget + sum(terms.values()) - available_bytes, largest)


def tried_anyway(error: BudgetInfeasible) -> str:
    """Why a plan has the smallest chunks although even these are predicted not to fit."""
    return (
        f"smallest chunk: the step is predicted to take {readable_bytes(error.minimum_bytes)} of the "
        f"{readable_bytes(error.budget_bytes)} that the device has for it"
    )


def knee_tokens(head: HeadBytes) -> int:
    """R without a budget."""
    return _KNEE_TOKENS.get(head.device_type, _KNEE_TOKENS["cuda"])


def plan_head(
    head: HeadBytes,
    num_tokens: int,
    *,
    tokens_per_chunk: int | None = None,
    budget_bytes: int | None = None,
    available_bytes: int | None = None,
    min_tokens: int = LEAST_TOKENS,
    peak_bytes: Callable[[int], int] | None = None,
    refuses: bool = True,
) -> HeadPlan:
    """The plan of a head in one step.

    Args:
        head: its byte terms.
        num_tokens: T of this step.
        tokens_per_chunk: fixed by the user, or None.
        budget_bytes: what the user asked for, for the message.
        available_bytes: what of it `peak_bytes` may use, or None without a limit.
        min_tokens: smallest chunk worth planning.
        peak_bytes: of the whole step with R tokens a chunk, increasing in R; by default of the op alone.
        refuses: whether what fits no chunk is an error; else the smallest is tried.

    Raises:
        BudgetInfeasible: not even `min_tokens` a chunk fit.
    """
    most = max(1, num_tokens)
    if tokens_per_chunk is not None:
        rows, reason = min(tokens_per_chunk, most), "tokens per chunk fixed by the config"
    else:
        rows, reason = min(knee_tokens(head), most), f"default on {head.device_type}"

    peak = peak_bytes or functools.partial(head.peak, num_tokens)

    def error_of(least: int) -> BudgetInfeasible:
        terms = {"working set of head": head.workspace(least)}
        terms["everything else alive"] = peak(least) - terms["working set of head"]
        return infeasible(terms, budget_bytes, available_bytes or 0)

    if available_bytes is not None:
        rows, reason = _within(available_bytes, rows, min_tokens, peak, reason, "chunk", refuses, error_of)
    return HeadPlan(rows, head.peak(num_tokens, rows), reason)
