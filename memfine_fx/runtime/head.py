"""The op that a chunked head becomes: `memfine::head_loss`.

It returns the loss and, made in the same pass, its gradients; backward multiplies them by the loss's own gradient in
ordinary operations, which the compiler fuses and does in place. The plan is read at run time.
"""

from __future__ import annotations

from typing import Any

import torch

from memfine_fx.compat.autograd import without_autocast
from memfine_fx.errors import DoubleBackwardError
from memfine_fx.memory.measure import span
from memfine_fx.runtime.head_loop import HeadInputs, HeadResults, chunk_bounds, run_head
from memfine_fx.runtime.live import lookup_head
from memfine_fx.runtime.ranges import range_of

__all__ = ["head_loss"]

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op(
    "memfine::head_loss",
    mutates_args=(),
    schema=(
        "(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? divisor, bool[] wanted, "
        "bool saves_logits, str region_id) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    tags=(torch.Tag.cudagraph_unsafe,),
)
def head_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    divisor: torch.Tensor | None,
    wanted: list[bool],
    saves_logits: bool,
    region_id: str,
) -> Results:
    """Cross-entropy of a projection, chunk by chunk.

    Args:
        hidden: [T,H].
        weight: [V,H] of the same dtype.
        bias: [V] of the same dtype, or None.
        labels: [T] int64.
        divisor: one number by which a sum is divided, or None.
        wanted: whether gradients of hidden, weight and bias are wanted.
        saves_logits: whether the logits are wanted, as numbers without a gradient.
        region_id: key of the live head.

    Returns:
        The loss, the fields of `HeadResults` after it, and the logits [T,V] as the projection makes them; empty where
        they are not wanted.
    """
    head = lookup_head(region_id)
    num_tokens = hidden.shape[0]
    plan = head.plan_for(num_tokens)
    bounds = chunk_bounds(num_tokens, plan.tokens_per_chunk)
    head.plan, head.num_tokens, head.num_chunks = plan, num_tokens, len(bounds)
    head.num_steps += 1
    inputs = HeadInputs(hidden, weight, bias, labels, divisor)
    flags = (wanted[0], wanted[1], wanted[2])
    logits = _logits_of(hidden, weight, saves_logits)
    with span(f"forward {region_id}"), range_of(f"{head.name or region_id} forward"), without_autocast():
        returned = logits if saves_logits else None
        results = run_head(inputs, head.loss, bounds, flags, returned, kernel=head.kernel)
    return results.loss.to(head.out_dtype), results.power, results.hidden, results.weight, results.bias, logits


def _logits_of(hidden: torch.Tensor, weight: torch.Tensor, saves_logits: bool) -> torch.Tensor:
    return hidden.new_empty((hidden.shape[0], weight.shape[0]) if saves_logits else (0,))


@head_loss.register_fake
def _(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    divisor: torch.Tensor | None,
    wanted: list[bool],
    saves_logits: bool,
    region_id: str,
) -> Results:
    empty = HeadResults.empty(hidden, weight, (wanted[0], wanted[1], wanted[2]))
    loss = hidden.new_empty((), dtype=lookup_head(region_id).out_dtype)
    logits = _logits_of(hidden, weight, saves_logits)
    return loss, empty.power, empty.hidden, empty.weight, empty.bias, logits


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    hidden, weight, bias, _, _, wanted, *_ = inputs
    ctx.wanted = tuple(wanted)
    ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:5])


def _differentiate(ctx: Any, grad: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise DoubleBackwardError(
            "double backward (create_graph=True) through a chunked head is not supported: its gradients are made in "
            "forward. Compute second derivatives on the model without memfine_fx, or with Config(chunks_head=False)."
        )
    power, *gradients = ctx.saved_tensors
    if grad is None:
        return (None,) * 8
    scale = grad.to(torch.float32) * power
    scaled = [
        (gradient.to(torch.float32) * scale).to(dtype) if is_wanted else None
        for gradient, dtype, is_wanted in zip(gradients, ctx.dtypes, ctx.wanted, strict=True)
    ]
    return *scaled, None, None, None, None, None


head_loss.register_autograd(_differentiate, setup_context=_save)
