"""Index arrays of one layer's routing, computed once in forward and saved for backward.

Routing is never redone: recomputing a top-k or a sort could round or tie differently and change shapes. What
is saved is one permutation and the ends of the experts' rows, 4 bytes a routed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch

from memfine_fx.errors import MemfineError
from memfine_fx.records import ParamKind
from memfine_fx.runtime.compiled_expert import CompiledExpert
from memfine_fx.runtime.schedule import Chunk

__all__ = ["Routed", "SliceCounter", "check_rows", "group_params", "sent", "sort_assignments"]

_MAX_ROWS = 2**31 - 1


def check_rows(num_rows: int) -> None:
    """Raise MemfineError where a layer has more routed rows than 32 bits count."""
    if num_rows > _MAX_ROWS:
        raise MemfineError(f"{num_rows} routed rows in one layer; at most {_MAX_ROWS} can be indexed")


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device, without waiting for what the device still has to do."""
    if device.type == "cuda":
        host = host.pin_memory()  # from other memory the driver may wait for the stream
    return host.to(device, non_blocking=True)


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
    check_rows(flat.numel())
    if flat.dtype not in (torch.int32, torch.int64):
        flat = flat.to(torch.int32)
    # Stable, so that an expert's rows stand in token order: slices of tokens are ranges of them then.
    sorted_ids, order = torch.sort(flat, stable=True)
    bounds = torch.arange(num_experts + 1, device=flat.device, dtype=sorted_ids.dtype)
    offsets = torch.searchsorted(sorted_ids, bounds)
    # The loop over chunks is Python and needs the counts: this is where the host waits for the routing, once a layer.
    return order.to(torch.int32), offsets.to("cpu", torch.int64)


class SliceCounter:
    """Counts the rows of token slices of any size, expert by expert, of one layer's routing.

    Args:
        order: [N] as from `sort_assignments`; rows of an expert are in token order.
        offsets: [E+1] on the host.
        top_k: K.
        num_tokens: T.
    """

    def __init__(self, order: torch.Tensor, offsets: torch.Tensor, top_k: int, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_experts = offsets.numel() - 1
        counts = offsets.diff()
        self.largest_expert = int(counts.max()) if self.num_experts else 0
        self._first = int(offsets[0])
        # expert * T + token of every row: rows stand by expert, and by token within one, so these keys only rise and a
        # slice's border in an expert's rows is found by bisection.
        experts = torch.arange(self.num_experts, device=order.device).mul_(num_tokens)
        keys = torch.repeat_interleave(experts, counts.to(order.device))
        keys.add_(torch.div(order[self._first : int(offsets[-1])], top_k, rounding_mode="floor"))
        self._keys = keys

    def bounds(self, tokens_per_slice: int) -> torch.Tensor:
        """Return where token slices begin inside each expert's rows.

        Args:
            tokens_per_slice: tokens in one slice.

        Returns:
            [S+1,E] int64 on the host; rows of expert e in slice s stand at bounds[s,e]:bounds[s+1,e].
        """
        num_slices = -(-self.num_tokens // tokens_per_slice)
        device = self._keys.device
        starts = torch.arange(num_slices + 1, device=device).mul_(tokens_per_slice).clamp_(max=self.num_tokens)
        wanted = torch.arange(self.num_experts, device=device) * self.num_tokens + starts.unsqueeze(1)
        return torch.searchsorted(self._keys, wanted).add_(self._first).to("cpu")


@dataclass(frozen=True)
class Routed:
    """One layer's inputs in one step.

    Args:
        hidden: [T,H].
        weight: [T,K] routing weight, or None.
        order: [N] int32, see `routing.sort_assignments`.
        offsets: [E+1] int64 on the host, or int32 on the device where the GPU kernels may run the layer; for experts on
            several ranks, what was gathered of all ranks' counts instead (see `parallel.RowExchange`).
        params: per parameter of the expert function its tensors: E of the "each" kind, else one.
        top_k: K.
    """

    hidden: torch.Tensor
    weight: torch.Tensor | None
    order: torch.Tensor
    offsets: torch.Tensor
    params: Sequence[Sequence[torch.Tensor]]
    top_k: int

    @property
    def num_tokens(self) -> int:
        return self.hidden.shape[0]

    def on_host(self) -> Routed:
        """With the offsets where a loop over chunks reads them; the host waits for those that are on a device."""
        return replace(self, offsets=self.offsets.to("cpu", torch.int64))

    @cached_property
    def flat_weight(self) -> torch.Tensor | None:
        """[N], by assignment."""
        return None if self.weight is None else self.weight.reshape(-1)

    def places(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """(assignment, token) of each row of a chunk, [R] int64."""
        assignments = self.order[chunk.start : chunk.stop].to(torch.int64)
        return assignments, torch.div(assignments, self.top_k, rounding_mode="floor")

    def arguments(
        self, compiled_expert: CompiledExpert, chunk: Chunk, assignments: torch.Tensor, tokens: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the arguments of a compiled function: rows, weight if any, the chunk's parameters, its groups if
        lifted.
        """
        arguments = [self.hidden.index_select(0, tokens)]
        if compiled_expert.has_weight:
            weight = self.flat_weight
            assert weight is not None
            arguments.append(weight.index_select(0, assignments))
        for tensors, kind in zip(self.params, compiled_expert.param_kinds, strict=True):
            if kind == "shared":
                arguments.append(tensors[0])
            elif kind == "each":
                arguments.append(tensors[chunk.first_expert])
            elif compiled_expert.takes_group:
                arguments.append(tensors[0][chunk.first_expert : chunk.last_expert + 1])
            else:
                arguments.append(tensors[0][chunk.first_expert])
        if compiled_expert.takes_group:
            arguments.extend(_group_arguments(chunk, self.hidden.device))
        return arguments


def _group_arguments(chunk: Chunk, device: torch.device) -> list[torch.Tensor]:
    """(group of each row [R] int64, group ends [G] int32) of a chunk."""
    ends = sent(torch.tensor(chunk.ends, dtype=torch.int32), device)
    rows = torch.arange(chunk.num_rows, device=device, dtype=torch.int32)
    return [torch.searchsorted(ends, rows, right=True), ends]


ItemT = TypeVar("ItemT")


def group_params(flat: Sequence[ItemT], kinds: Sequence[ParamKind], num_experts: int) -> list[tuple[ItemT, ...]]:
    """One group per parameter: E items for the "each" kind, one for the others.

    Args:
        flat: what belongs to the parameters (tensors, nodes, flags), in order.
        kinds: kind of each parameter.
        num_experts: E.
    """
    items = iter(flat)
    groups = [tuple(next(items) for _ in range(num_experts if kind == "each" else 1)) for kind in kinds]
    assert next(items, None) is None, "more items than parameters"
    return groups
