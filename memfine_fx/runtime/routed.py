"""One layer's inputs in one step, as the op pair hands them to whoever computes the layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch

from memfine_fx.records import ParamKind
from memfine_fx.runtime.compiled_expert import CompiledExpert
from memfine_fx.runtime.routing import sent
from memfine_fx.runtime.schedule import Chunk

__all__ = ["Routed", "group_params"]


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
