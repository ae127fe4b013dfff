"""Operations that mark what an expert loop assumes, so that reading it can check the assumption.

They stand in for a model's own code while a loop is captured (see `memfine_fx.capture.source`): `rows_of` marks a mask
or its places whose emptiness skipped an expert, `count_rows` counts rows per expert with a result of known size,
`put_rows` writes one expert's rows at their places in expert order. They are differentiable, because a region is
compared with them before it is lowered.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "COUNT_ROWS",
    "LOOP_MARKERS",
    "PUT_ROWS",
    "ROWS_OF",
    "count_rows",
    "put_rows",
    "rows_of",
]


@torch.library.custom_op("memfine::rows_of", mutates_args=())
def rows_of(places: torch.Tensor) -> torch.Tensor:
    """The same tensor; says that a loop body was skipped where it selects nothing."""
    return places.clone()


@rows_of.register_fake
def _(places: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(places)


rows_of.register_autograd(lambda ctx, grad: grad)


@torch.library.custom_op("memfine::count_rows", mutates_args=())
def count_rows(expert_index: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[E]: how often each expert is named.

    Args:
        expert_index: [N] ints in [0, E).
        num_experts: E.
    """
    return torch.bincount(expert_index, minlength=num_experts)[:num_experts].clone()


@count_rows.register_fake
def _(expert_index: torch.Tensor, num_experts: int) -> torch.Tensor:
    return expert_index.new_empty((num_experts,), dtype=torch.int64)


@torch.library.custom_op("memfine::put_rows", mutates_args=())
def put_rows(out: torch.Tensor, rows: torch.Tensor, counts: list[int], expert: int) -> torch.Tensor:
    """A copy of `out` in which one expert's rows are overwritten.

    Args:
        out: [N,...] in expert order.
        rows: [counts[expert],...].
        counts: rows of each expert.
        expert: whose rows these are.
    """
    result = out.clone()
    torch.split(result, counts)[expert].copy_(rows)
    return result


@put_rows.register_fake
def _(out: torch.Tensor, rows: torch.Tensor, counts: list[int], expert: int) -> torch.Tensor:
    return torch.empty_like(out)


def _note_rows(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, _, ctx.counts, ctx.expert = inputs


def _split_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    of_out = grad.clone()
    torch.split(of_out, ctx.counts)[ctx.expert].zero_()
    return of_out, torch.split(grad, ctx.counts)[ctx.expert].clone(), None, None


put_rows.register_autograd(_split_gradient, setup_context=_note_rows)

ROWS_OF = torch.ops.memfine.rows_of.default
COUNT_ROWS = torch.ops.memfine.count_rows.default
PUT_ROWS = torch.ops.memfine.put_rows.default
LOOP_MARKERS = frozenset({ROWS_OF, COUNT_ROWS, PUT_ROWS, rows_of, count_rows, put_rows})
