"""The chunk loop: gather rows, run the expert's body, add into the tokens; backward recomputes chunk by chunk.

No [N,H] or [N,F] tensor is ever made: a chunk's rows are gathered when its turn comes, and everything made
for a chunk is freed before the next. In low precision the sums over a token's choices run in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfine_fx.records import ChunkPlan
from memfine_fx.runtime.bodies import BackwardBody, Bodies, PlainGrad, ProductGrad
from memfine_fx.runtime.gradients import ParamGradient
from memfine_fx.runtime.routing import token_slice_bounds
from memfine_fx.runtime.schedule import Chunk, rows_schedule, tokens_schedule

__all__ = ["Routed", "accumulator_dtype", "chunks_of", "run_backward", "run_forward"]


class Routed:
    """One layer's inputs in one step.

    Args:
        hidden: [T,H].
        weight: [T,K] routing weight, or None.
        order: [N] int32, see `routing.sort_assignments`.
        offsets: [E+1] int64 on the host.
        params: one tensor per parameter of the expert function.
        top_k: K.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        order: torch.Tensor,
        offsets: torch.Tensor,
        params: Sequence[torch.Tensor],
        top_k: int,
    ) -> None:
        self.hidden = hidden
        self.weight = None if weight is None else weight.reshape(-1)
        self.order = order
        self.offsets = offsets
        self.params = params
        self.top_k = top_k

    @property
    def num_tokens(self) -> int:
        return self.hidden.shape[0]

    def places(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """(assignment, token) of each row of a chunk, [R] int64."""
        assignments = self.order[chunk.start : chunk.stop].to(torch.int64)
        return assignments, torch.div(assignments, self.top_k, rounding_mode="floor")

    def arguments(
        self, bodies: Bodies, chunk: Chunk, assignments: torch.Tensor, tokens: torch.Tensor
    ) -> list[torch.Tensor]:
        """What the body takes: rows, weight if any, the chunk's parameters, its groups if lifted."""
        arguments = [self.hidden.index_select(0, tokens)]
        if bodies.has_weight:
            assert self.weight is not None
            arguments.append(self.weight.index_select(0, assignments))
        for param, kind in zip(self.params, bodies.param_kinds, strict=True):
            if kind == "shared":
                arguments.append(param)
            elif bodies.takes_group:
                arguments.append(param[chunk.first_expert : chunk.last_expert + 1])
            else:
                arguments.append(param[chunk.first_expert])
        if bodies.takes_group:
            arguments.extend(_group_arguments(chunk, self.hidden.device))
        return arguments


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which contributions of `dtype` are summed per token."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def chunks_of(routed: Routed, bodies: Bodies, plan: ChunkPlan) -> list[Chunk]:
    """The layer's chunks under a plan."""
    if plan.axis == "rows":
        return rows_schedule(routed.offsets.tolist(), plan.rows_per_chunk, groups=bodies.takes_group)
    bounds = token_slice_bounds(routed.order, routed.offsets, routed.top_k, routed.num_tokens, plan.tokens_per_chunk)
    return tokens_schedule(bounds.tolist())


def run_forward(routed: Routed, bodies: Bodies, chunks: Sequence[Chunk], out_dtype: torch.dtype) -> torch.Tensor:
    """Combined outputs, [T,H_out] of `out_dtype`."""
    call = bodies.forward().call
    hidden = routed.hidden
    out = hidden.new_zeros((hidden.shape[0], bodies.out_width), dtype=accumulator_dtype(out_dtype))
    with torch._C._DisableAutocast():
        for chunk in chunks:
            assignments, tokens = routed.places(chunk)
            (contribution,) = call(*routed.arguments(bodies, chunk, assignments, tokens))
            out.index_add_(0, tokens, contribution.to(out.dtype))
            del contribution
    return out.to(out_dtype)


def run_backward(
    grad: torch.Tensor, routed: Routed, bodies: Bodies, chunks: Sequence[Chunk], wanted: tuple[bool, ...]
) -> list[torch.Tensor]:
    """Gradients of what is wanted, in the order hidden, weight, parameters.

    Args:
        grad: [T,H_out] gradient of the output; may be expanded.
        wanted: hidden, weight, then each parameter.
    """
    body = bodies.backward(wanted)
    hidden, weight = routed.hidden, routed.weight
    grad_hidden = grad_weight = None
    if body.rows_grad is not None:
        grad_hidden = torch.zeros(hidden.shape, dtype=accumulator_dtype(hidden.dtype), device=hidden.device)
    if body.weight_grad is not None:
        assert weight is not None
        grad_weight = torch.zeros_like(weight)
    params = [
        None if how is None else ParamGradient(param, kind)
        for how, param, kind in zip(body.param_grads, routed.params, bodies.param_kinds, strict=True)
    ]
    with torch._C._DisableAutocast():
        for chunk in chunks:
            assignments, tokens = routed.places(chunk)
            rows_grad = grad.index_select(0, tokens).to(bodies.contribution_dtype)
            arguments = [rows_grad, *routed.arguments(bodies, chunk, assignments, tokens)]
            results = body.call(*arguments)
            if grad_hidden is not None and body.rows_grad is not None:
                grad_hidden.index_add_(0, tokens, results[body.rows_grad].to(grad_hidden.dtype))
            if grad_weight is not None and body.weight_grad is not None:
                grad_weight.index_copy_(0, assignments, results[body.weight_grad])
            _add_param_gradients(params, body, chunk, arguments, results, groups=bodies.takes_group)
            del rows_grad, arguments, results
    grads: list[torch.Tensor] = []
    if grad_hidden is not None:
        grads.append(grad_hidden.to(hidden.dtype))
    if grad_weight is not None:
        grads.append(grad_weight.view(-1, routed.top_k))
    return [*grads, *(param.finish_all() for param in params if param is not None)]


def _add_param_gradients(
    params: Sequence[ParamGradient | None],
    body: BackwardBody,
    chunk: Chunk,
    arguments: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    *,
    groups: bool,
) -> None:
    expert = chunk.first_expert
    for param, how in zip(params, body.param_grads, strict=True):
        if param is None:
            continue
        if isinstance(how, ProductGrad):
            left, right = how.left.value(arguments, results), how.right.value(arguments, results)
            param.add_product(expert, left, right, is_part=chunk.is_part)
        elif isinstance(how, PlainGrad):
            gradient = results[how.index]
            if groups:
                _add_group(param, chunk, gradient)
            else:
                param.add_tensor(expert, gradient, is_part=chunk.is_part)
        if chunk.completes:
            param.finish(expert)


def _add_group(param: ParamGradient, chunk: Chunk, gradient: torch.Tensor) -> None:
    if chunk.is_part:
        param.add_tensor(chunk.first_expert, gradient[0], is_part=True)
    else:
        param.set_range(chunk.first_expert, gradient)


def _group_arguments(chunk: Chunk, device: torch.device) -> list[torch.Tensor]:
    """(group of each row [R] int64, group ends [G] int32) of a chunk."""
    ends = torch.tensor(chunk.ends, dtype=torch.int32, device=device)
    rows = torch.arange(chunk.num_rows, device=device, dtype=torch.int32)
    return [torch.searchsorted(ends, rows, right=True), ends]
