"""Byte terms of one region's working set in a step (T tokens, R rows a chunk, N = T*K).

output        the combined [T,H_out], and its fp32 accumulator where the model is in low precision
hidden grad   the same for the gradient of the tokens, in backward
weight grads  the gradients of the expert parameters, allocated by the region's backward
index         order (4 N) and offsets, saved from forward to backward; the sort's own arrays in forward
chunk         R rows: gathered rows and gradients, the function's peak, or its results with what is made of them, casts
              and products of weights' gradients; of the GPU kernels, their windows
round         where experts live on several ranks: the rows that came, their results and what is staged to be sent; it
              is counted as part of the chunk, whose working set is alive beside it
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import sympy

from memfine_fx.config import Axis
from memfine_fx.memory.sizes import GROUPS, ROWS, larger

__all__ = [
    "ALL_TO_ALLS_IN_FLIGHT",
    "AllToAllSizes",
    "ChunkSize",
    "RegionBytes",
    "WindowBytes",
    "added_bytes",
    "padded_bytes",
    "region_peak",
    "region_workspace",
    "rows_of_even_round",
    "workspace_expression",
]


ALL_TO_ALLS_IN_FLIGHT = 2
"""All-to-alls of a round that are staged or on their way at once: one is filled while another travels."""
_LEAST_STAGED_ROWS = 64
_LEAST_MESSAGE_ROWS = 16
"""To each rank where routing is even: a row of 14 KB takes 0.3 us at 50 GB/s, and a message has 3 us beside it."""
_ROW_ALIGNMENT = 16


@dataclass(frozen=True)
class AllToAllSizes:
    """How rows of a region reach experts on other ranks.

    Args:
        num_ranks: that share the experts.
        num_received: rounds whose rows are alive at once.
        chunk_rows: the most rows of a chunk of a round; None: a round is one chunk.
        round_rows: of a round, where the user fixed them.
    """

    num_ranks: int
    num_received: int
    chunk_rows: int | None = None
    round_rows: int | None = None

    def staged_rows(self, rows: int) -> int:
        """Rows that a rank stages for one all-to-all of a round of `rows`.

        Even routing sends as many rows as a round brings, in four all-to-alls or, with its noise, five. An all-to-all
        takes at least a row to each rank, and so many that its bytes are worth an exchange, and its messages their
        latency.
        """
        message_rows = min(rows, _LEAST_MESSAGE_ROWS * self.num_ranks)
        return max(self.num_ranks, _LEAST_STAGED_ROWS, message_rows, -(-rows // 4))

    def replicated_rows(self, rows: int) -> int:
        """Rows of a round in a step with clones, which stand where half of the rows would.

        Rows are even then, so that two rounds bring what one does where routing is even. All-to-alls are as large as
        without.
        """
        return -(-rows // 2)


@dataclass(frozen=True)
class WindowBytes:
    """The bytes that the GPU kernels allocate for a layer in windows of R rows, beyond arguments, results and sums over
    choices.

    Args:
        forward_row, backward_row: bytes of each row of a window.
        assignment: of each routed row of the layer in backward: parts of the routing weight's gradient.
        token: of each token in backward: the gradient of the output, where it is cast.
        stages: gradients of experts that a window cuts, in fp32.
    """

    forward_row: int
    backward_row: int
    assignment: int
    token: int
    stages: int


@dataclass(frozen=True)
class RegionBytes:
    """The sizes of a region and the byte terms of its functions, from which its working set follows.

    Args:
        top_k, num_experts, hidden, out_width: K, E, H, H_out.
        item_bytes, out_item_bytes, contribution_item_bytes, accumulator_item_bytes: bytes per element of the
            tokens, the region's output, a row's contribution and the sums over choices.
        weight_item_bytes: bytes per element of the routing weight, 0 without one.
        param_bytes: bytes of all expert parameters whose gradient is wanted.
        staging_bytes: fp32 gradients of one expert, where a split expert needs them.
        added_bytes: what is added to these, at most; see `added_bytes`.
        forward_peak, backward_peak: of one function call, in R (and G).
        takes_group: whether a chunk may hold several experts.
        device_type: "cpu" or "cuda".
        flops_per_row: of the expert function's matmuls on one row.
        forward_results, backward_results: bytes that one call returns, in R (and G): what is alive while they are
            cast and added. Without them the function's peak is taken.
        product_scratch: bytes that a kernel takes for one product of a weight's gradient, in R; see `kernel_scratch`.
        all_to_all: where experts live on several ranks; then rows of all ranks may come, and N is no bound on R.
        window: of the GPU kernels, where they run in the place of compiled functions, whose terms then do not matter.
        knee_rows: R at which products of its widths are as fast as they get on this machine, None where that was not
            measured.
        clones_forward, clones_backward: of other ranks' experts in the slots of this one, and of their gradients.
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
    added_bytes: int = 0
    flops_per_row: int = 0
    forward_results: sympy.Expr | None = None
    backward_results: sympy.Expr | None = None
    product_scratch: sympy.Expr = sympy.S.Zero
    all_to_all: AllToAllSizes | None = None
    clones_forward: int = 0
    clones_backward: int = 0
    window: WindowBytes | None = None
    knee_rows: int | None = None

    def chunk_rows(self, rows: int) -> int:
        """Rows of a chunk where `rows` come at once."""
        most = None if self.all_to_all is None else self.all_to_all.chunk_rows
        return rows if most is None else min(rows, most)

    def at_most(self, rows: int, num_tokens: int) -> int:
        """R as far as it matters: no more rows than can come."""
        return max(1, rows if self.all_to_all is not None else min(rows, num_tokens * self.top_k))


@dataclass(frozen=True)
class ChunkSize:
    """Rows of a step's largest chunk, or round where rows come from other ranks, and whether gradients are added to
    more than once (an expert is split).
    """

    rows: int
    stages: bool = True

    def at_most(self, rows: int | None) -> ChunkSize:
        """With no more than so many rows; None: as it is."""
        return self if rows is None or rows >= self.rows else ChunkSize(rows, self.stages)


def added_bytes(num_elements: int, item_bytes: int, device_type: str) -> int:
    """Return the bytes of a low-precision product while it is added to fp32 sums: a CPU cannot add the two and copies
    it to fp32 first.
    """
    return num_elements * (item_bytes + (4 if device_type == "cpu" else 0))


def rows_of_even_round(own_rows: int) -> int:
    """Rows that even routing brings to a rank with so many routed rows of its own, and an eighth for its noise."""
    return own_rows + own_rows // 8


def padded_bytes(row_bytes: int) -> int:
    """Bytes of a row in a buffer with others beside it: rows begin at multiples of 16 bytes, as wide loads want."""
    return -(-row_bytes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def region_peak(region: RegionBytes, num_tokens: int, rows: int, axis: Axis = "rows") -> dict[str, int]:
    """Bytes of each term at the peak, with R = `rows`; the larger of forward and backward.

    Args:
        region: its byte terms.
        num_tokens: T.
        rows: R, at most N rows matter; rows of a round, where rows come from other ranks.
        axis: token slices come back to every expert, so they stage all experts' gradients.
    """
    rows = region.at_most(rows, num_tokens)
    forward = _forward_terms(region, num_tokens, rows)
    backward = _backward_terms(region, num_tokens, rows, stages=bool(region.staging_bytes or region.window))
    if region.staging_bytes:
        backward["gradient staging"] = _staging_bytes(region, axis)
    return max(forward, backward, key=lambda terms: sum(terms.values()))


@functools.lru_cache(maxsize=4096)
def region_workspace(
    region: RegionBytes, num_tokens: int, size: ChunkSize, axis: Axis, phase: Literal["forward", "backward"]
) -> int:
    """Bytes that one call of a region's op needs beyond its arguments and results, which the graph around shows.

    Equal layers have equal terms, and plans of a step ask for the same sizes: each is computed once.

    Args:
        region: its byte terms.
        num_tokens: T.
        size: of chunks; at most N rows matter.
        axis: as in `region_peak`.
        phase: which op.
    """
    rows = region.at_most(size.rows, num_tokens)
    return int(workspace_expression(region, num_tokens, ChunkSize(rows, size.stages), axis, phase))


def workspace_expression(
    region: RegionBytes,
    num_tokens: sympy.Expr | int,
    size: ChunkSize,
    axis: Axis,
    phase: Literal["forward", "backward"],
    rows: sympy.Expr | None = None,
) -> sympy.Expr | int:
    """As `region_workspace`, for T as an expression and R no more than N.

    R is an expression too where `rows` is one, which only a region on one rank allows.
    """
    chunk: Any = size.rows if rows is None else rows
    if phase == "forward":
        working = _forward_terms(region, num_tokens, chunk)["chunk"]
        width, item_bytes = region.out_width, region.out_item_bytes
    else:
        stages = size.stages or axis == "tokens"
        working = _backward_terms(region, num_tokens, chunk, stages=stages)["chunk"]
        working += _staging_bytes(region, axis) if stages else 0
        width, item_bytes = region.hidden, region.item_bytes
    if item_bytes == region.accumulator_item_bytes:
        return working
    sums, results = num_tokens * width * region.accumulator_item_bytes, num_tokens * width * item_bytes
    return sums - results + sympy.Max(working, results)  # the cast follows the last chunk


def _product_bytes(region: RegionBytes) -> int:
    """Return the bytes, 2 for each element, of the product whose addition to fp32 sums `added_bytes` counts."""
    return region.added_bytes * 2 // added_bytes(1, 2, region.device_type)


def _staging_bytes(region: RegionBytes, axis: Axis) -> int:
    return region.staging_bytes * (region.num_experts if axis == "tokens" else 1)


def _forward_terms(region: RegionBytes, num_tokens: Any, rows: Any) -> dict[str, Any]:
    if region.window is not None:
        return _forward_terms_around(region, num_tokens, rows * region.window.forward_row)
    at_once, rows = rows, region.chunk_rows(rows)
    chunk = rows * (region.hidden * region.item_bytes + region.weight_item_bytes)
    cast = 0
    if region.contribution_item_bytes != region.accumulator_item_bytes and region.all_to_all is None:
        cast = rows * region.out_width * region.accumulator_item_bytes
    chunk += _called(region.forward_peak, region.forward_results, cast, region, rows) + _index_chunk(rows)
    if region.all_to_all is not None:
        chunk = _around(region, region.all_to_all, at_once, chunk, "forward")
    return _forward_terms_around(region, num_tokens, chunk)


def _forward_terms_around(region: RegionBytes, num_tokens: Any, chunk: Any) -> dict[str, Any]:
    return {
        "output": num_tokens * region.out_width * _sum_bytes(region.out_item_bytes, region.accumulator_item_bytes),
        "index": _index_bytes(region, num_tokens),
        "chunk": chunk,
    }


def _backward_terms(region: RegionBytes, num_tokens: Any, rows: Any, *, stages: bool) -> dict[str, Any]:
    if region.window is not None:
        of_layer = num_tokens * (region.top_k * region.window.assignment + region.window.token)
        of_layer += region.window.stages if stages else 0  # a layer of one window cuts no expert
        return _backward_terms_around(region, num_tokens, rows * region.window.backward_row + of_layer)
    at_once, rows = rows, region.chunk_rows(rows)
    rows_grad = rows * region.out_width * (region.out_item_bytes + region.contribution_item_bytes)
    if region.out_item_bytes == region.contribution_item_bytes:
        rows_grad //= 2
    chunk = rows * (region.hidden * region.item_bytes + region.weight_item_bytes) + rows_grad
    cast = 0
    if region.accumulator_item_bytes != region.item_bytes and region.all_to_all is None:
        cast = rows * region.hidden * region.accumulator_item_bytes
    scratch = _body(region.product_scratch, region, rows)
    after = larger(cast, scratch)
    if stages:  # a product is made beside its sums, then added to them
        after = larger(after, larger(_product_bytes(region) + scratch, region.added_bytes))
    chunk += _called(region.backward_peak, region.backward_results, after, region, rows) + _index_chunk(rows)
    if region.all_to_all is not None:
        chunk = _around(region, region.all_to_all, at_once, chunk, "backward")
    return _backward_terms_around(region, num_tokens, chunk)


def _backward_terms_around(region: RegionBytes, num_tokens: Any, chunk: Any) -> dict[str, Any]:
    return {
        "output grad": num_tokens * region.out_width * region.out_item_bytes,
        "hidden grad": num_tokens * region.hidden * _sum_bytes(region.item_bytes, region.accumulator_item_bytes),
        "routing weight grad": num_tokens * region.top_k * region.weight_item_bytes,
        "expert weight grads": region.param_bytes,
        "index": _index_bytes(region, num_tokens),
        "chunk": chunk,
    }


def _around(
    region: RegionBytes, all_to_all: AllToAllSizes, rows: int, chunk: int, phase: Literal["forward", "backward"]
) -> int:
    """Return the chunk's bytes with what a round of so many rows holds around it: the most of sending, computing and
    returning, in a step without clones or in one with them, where there may be some.
    """
    row = _beside_weight(region, region.hidden * region.item_bytes)  # as it arrives, and its gradient as it returns
    if phase == "forward":
        arrived, returned, shared = row, region.out_width * region.contribution_item_bytes, 0
        clones, width = region.clones_forward, region.out_width
    else:  # gradients of the rows are written where those of their results came, if these are alike
        is_alike = (region.out_width, region.out_item_bytes) == (region.hidden, region.item_bytes)
        arrived = row + (row if is_alike else region.out_width * region.out_item_bytes)
        returned, shared = row, row if is_alike else 0
        clones, width = region.clones_backward, region.hidden
    staged_rows = all_to_all.staged_rows(rows)
    staged, index = ALL_TO_ALLS_IN_FLIGHT * staged_rows, 4
    places = 3 * 8  # of the rows of one all-to-all or round, while they are made
    added = width * (region.accumulator_item_bytes + 4)  # in the accumulator's precision, rows beside each other

    def round_bytes(rows: int) -> int:
        sending = rows * arrived + staged * (arrived + places)
        ahead = (all_to_all.num_received - 1) * sending
        computing = rows * (arrived + returned - shared) + max(rows * (index + places), rows * index + chunk)
        returning = rows * returned + staged * (returned + places) + staged_rows * added
        return max(sending, ahead + computing, ahead + returning)

    alone = round_bytes(rows)
    return max(alone, round_bytes(all_to_all.replicated_rows(rows)) + clones) if clones else alone


def _beside_weight(region: RegionBytes, row_bytes: int) -> int:
    """Bytes of a row with its routing weight, in one buffer where they share a dtype."""
    weight = region.weight_item_bytes
    return padded_bytes(row_bytes + weight) if weight == region.item_bytes else row_bytes + weight


def _sum_bytes(item_bytes: int, accumulator_bytes: int) -> int:
    """Return the bytes per element while a sum and its cast are both alive."""
    return accumulator_bytes if item_bytes == accumulator_bytes else item_bytes + accumulator_bytes


def _called(peak: sympy.Expr, results: sympy.Expr | None, after: Any, region: RegionBytes, rows: Any) -> Any:
    """Return the larger of a compiled function call and what is computed of its results, when the call's own tensors
    are gone.
    """
    called = _body(peak, region, rows)
    return called + after if results is None else larger(called, _body(results, region, rows) + after)


def _body(peak: sympy.Expr, region: RegionBytes, rows: Any) -> Any:
    if isinstance(rows, sympy.Expr):
        return peak.subs({ROWS: rows, GROUPS: region.num_experts})
    return int(_function_of(peak)(rows, region.num_experts))


@functools.lru_cache(maxsize=1024)
def _function_of(peak: sympy.Expr) -> Callable[[int, int], float]:
    """The expression in (R, G) as a function: plans are solved while a step waits."""
    function: Callable[[int, int], float] = sympy.lambdify((ROWS, GROUPS), peak, modules="math")
    return function


def _index_chunk(rows: Any) -> Any:
    return 3 * 8 * rows


def _index_bytes(region: RegionBytes, num_tokens: Any) -> Any:
    """Order and offsets, with the sort's values and places, which die with the dispatch."""
    return num_tokens * region.top_k * (4 + 8 + 8) + 3 * 8 * (region.num_experts + 1)
