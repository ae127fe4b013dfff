"""Index arrays of one layer's routing, made once in forward and kept for backward.

Routing is never redone: recomputing a top-k or a sort could round or tie differently and change shapes. What
is kept is one permutation and the ends of the experts' rows, 4 bytes a routed row.
"""

from __future__ import annotations

import torch

from memfine_fx.errors import MemfineError

__all__ = ["sort_assignments", "token_slice_bounds"]

_MAX_ROWS = 2**31 - 1


def sort_assignments(expert_index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Routed rows in expert order.

    Args:
        expert_index: [T,K] ints in [0, E); entries outside (dropped assignments) get no row.
        num_experts: E.

    Returns:
        order: [N] int32 on the same device; place -> flat assignment t*K+k, stable within an expert.
        offsets: [E+1] int64 on the host; rows of expert e stand at offsets[e]:offsets[e+1].
    """
    flat = expert_index.reshape(-1)
    if flat.numel() > _MAX_ROWS:
        raise MemfineError(f"{flat.numel()} routed rows in one layer; at most {_MAX_ROWS} can be indexed")
    if flat.dtype not in (torch.int32, torch.int64):
        flat = flat.to(torch.int32)
    sorted_ids, order = torch.sort(flat, stable=True)
    bounds = torch.arange(num_experts + 1, device=flat.device, dtype=sorted_ids.dtype)
    offsets = torch.searchsorted(sorted_ids, bounds)
    return order.to(torch.int32), offsets.to("cpu", torch.int64)


def token_slice_bounds(
    order: torch.Tensor, offsets: torch.Tensor, top_k: int, num_tokens: int, tokens_per_slice: int
) -> torch.Tensor:
    """Where token slices begin inside each expert's rows (rows of an expert are in token order).

    Args:
        order: [N] as from `sort_assignments`.
        offsets: [E+1] on the host.
        top_k: K.
        num_tokens: T.
        tokens_per_slice: tokens in one slice.

    Returns:
        [S+1,E] int64 on the host; rows of expert e in slice s stand at bounds[s,e]:bounds[s+1,e].
    """
    num_experts = offsets.numel() - 1
    tokens = torch.div(order, top_k, rounding_mode="floor").to(torch.int64)
    counts = offsets.diff().to(order.device)
    kept = tokens[int(offsets[0]) : int(offsets[-1])]
    expert_of_row = torch.repeat_interleave(torch.arange(num_experts, device=order.device), counts)
    keys = expert_of_row * num_tokens + kept
    num_slices = -(-num_tokens // tokens_per_slice)
    starts = torch.arange(num_slices + 1, device=order.device).mul_(tokens_per_slice).clamp_(max=num_tokens)
    wanted = torch.arange(num_experts, device=order.device) * num_tokens + starts.unsqueeze(1)
    return (torch.searchsorted(keys, wanted) + offsets[0].to(order.device)).to("cpu")
