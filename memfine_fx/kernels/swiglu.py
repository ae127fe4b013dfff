"""A whole layer of experts as one differentiable function of kernels over windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memfine_fx.kernels.layer import LayerOptions, run_backward, run_forward
from memfine_fx.kernels.sorting import Routing, sort_assignments
from memfine_fx.kernels.tables import (
    Param,
    Tables,
)

__all__ = ["swiglu_experts"]


class _SwigluExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        routing: Routing,
        options: LayerOptions,
        *params: torch.Tensor,
    ) -> torch.Tensor:
        hidden = hidden.contiguous()
        flat = None if weight is None else weight.reshape(-1).contiguous()
        out, saved_products = run_forward(hidden, flat, routing, params, options)
        ctx.routing, ctx.options, ctx.shape = routing, options, None if weight is None else weight.shape
        ctx.num_params = len(params)
        ctx.save_for_backward(hidden, *params, *([] if flat is None else [flat]), *(saved_products or ()))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        hidden, *rest = ctx.saved_tensors
        params, rest = rest[: ctx.num_params], rest[ctx.num_params :]
        flat = None if ctx.shape is None else rest.pop(0)
        needed = ctx.needs_input_grad
        wanted = [needed[0], needed[1], *needed[4:]]
        saved_products = (rest[0], rest[1]) if rest else None
        gradients = run_backward(grad, hidden, flat, ctx.routing, params, saved_products, ctx.options, wanted)
        weight = None if gradients.weight is None else gradients.weight.view(ctx.shape)
        return gradients.hidden, weight, None, None, *gradients.params


_MOST_ENTRIES = 2**31 - 1


def _check_window(rows: int, tables: Tables) -> None:
    """Check that a window's entries can be counted in 32 bits, which spares the kernels registers."""
    widest = max(tables.hidden, *(table.shape[1] for table in tables.projections))
    if rows * widest > _MOST_ENTRIES:
        raise ValueError(f"windows of {rows} rows of {widest} entries; at most {_MOST_ENTRIES // widest} rows fit")


def swiglu_experts(
    hidden: torch.Tensor,
    expert_index: torch.Tensor | Routing,
    weight: torch.Tensor | None,
    params: Sequence[Param],
    options: LayerOptions,
) -> torch.Tensor:
    """Run every token through the experts chosen for it, and return them combined: [T,H] in hidden's dtype.

    Args:
        hidden: [T,H].
        expert_index: [T,K]; an id outside [0, E) is dropped. Or the routing that `sort_assignments` returned for it.
        weight: [T,K] routing weights, or None for ones.
        params: the tables in the layout that `options` names.

    Raises:
        ValueError: the parameters do not have this layout, or do not fit hidden's width; a window is too large.
    """
    tables = options.tables_of(params)
    _check_window(options.rows_per_window, tables)
    if hidden.ndim != 2 or hidden.shape[1] != tables.hidden:
        raise ValueError(f"tokens {list(hidden.shape)} do not meet experts of [{tables.width}, {tables.hidden}]")
    routing = expert_index
    if isinstance(routing, torch.Tensor):
        routing = sort_assignments(routing, tables.num_experts)
    return _SwigluExperts.apply(hidden, weight, routing, options, *params)  # type: ignore[no-any-return,no-untyped-call]
