"""Logits that a compiled graph returned without a gradient, and the autograd node that gives them one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memfine_fx.compat.autograd import without_autocast
from memfine_fx.records.heads import ReturnedLogits

__all__ = ["attaching"]


def attaching(run: Callable[..., Any], returned: Sequence[ReturnedLogits]) -> Callable[..., Any]:
    """A graph as it was before `lower.head.take_apart` rewrote it.

    Args:
        run: the rewritten graph.
        returned: what was rewritten; without anything `run` is what is returned.
    """
    if not returned:
        return run

    def attached(*inputs: Any) -> tuple[Any, ...]:
        return _attached(run(*inputs), inputs, returned)

    return attached


def _attached(results: Sequence[Any], inputs: Sequence[Any], returned: Sequence[ReturnedLogits]) -> tuple[Any, ...]:
    outputs = list(results)
    for logits in returned:
        bias = None if logits.bias is None else inputs[logits.bias]
        operands = results[logits.hidden], inputs[logits.weight], bias
        outputs[logits.result] = _Projection.apply(results[logits.result], logits, *operands)  # type: ignore[no-untyped-call]
    return tuple(outputs[: min(logits.hidden for logits in returned)])


class _Projection(torch.autograd.Function):
    """logits [...,V] = hidden [...,H] @ weight.T + bias, whose value is there already."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        returned: ReturnedLogits,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.returned, ctx.bias_dtype = returned, None if bias is None else bias.dtype
        ctx.save_for_backward(hidden, weight)
        return logits.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        returned: ReturnedLogits = ctx.returned
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[2:]
        grads: list[torch.Tensor | None] = [None, None, None]
        with without_autocast():  # operands are cast as autocast cast them in forward
            grad = grad.to(returned.dtype)
            rows = grad.reshape(-1, grad.shape[-1])
            if of_hidden:
                matrix = weight.to(returned.dtype)
                product = rows @ (matrix.t() if returned.is_transposed else matrix)
                grads[0] = product.to(hidden.dtype).view(hidden.shape)
            if of_weight:
                tokens = hidden.to(returned.dtype).reshape(-1, hidden.shape[-1])
                left, right = (tokens, rows) if returned.is_transposed else (rows, tokens)
                grads[1] = (left.t() @ right).to(weight.dtype)
            if of_bias:
                grads[2] = rows.sum(0).to(ctx.bias_dtype)
        return None, None, *grads
