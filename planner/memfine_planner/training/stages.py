"""Which layers lie on which pipeline rank.

Layers are dealt to pp*vp consecutive chunks; rank r holds chunks r, r+pp, r+2pp, ... Evenly where they divide; with
embedding and head counted as one layer each where that divides (a common setting for 94 or 126 layers); else in
proportion to weight, the head counted as the layers it costs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from memfine_planner.costs.architectures import Architecture, LayerKind

__all__ = ["Stage", "stages"]


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank holds."""

    rank: int
    chunks: tuple[tuple[int, ...], ...]
    kinds: tuple[tuple[LayerKind, int], ...]
    has_embedding: bool
    has_head: bool

    @property
    def num_layers(self) -> int:
        return sum(len(chunk) for chunk in self.chunks)

    @property
    def num_moe(self) -> int:
        return sum(count for kind, count in self.kinds if kind.is_moe)


@lru_cache(maxsize=4096)
def stages(arch: Architecture, pp: int, vp: int) -> tuple[Stage, ...]:
    """The stages of a pipeline of `pp` ranks with `vp` chunks each."""
    bounds = _bounds(arch, pp * vp)
    found = []
    for rank in range(pp):
        chunks = tuple(tuple(range(bounds[rank + pp * i], bounds[rank + pp * i + 1])) for i in range(vp))
        kinds = Counter(arch.kinds[index] for chunk in chunks for index in chunk)
        found.append(Stage(rank, chunks, tuple(kinds.items()), rank == 0, rank == pp - 1))
    return tuple(found)


def _bounds(arch: Architecture, chunks: int) -> list[int]:
    layers = arch.layers
    if layers % chunks == 0:
        return [index * layers // chunks for index in range(chunks + 1)]
    if (layers + 2) % chunks == 0:
        each = (layers + 2) // chunks
        return [0, *(max(0, min(layers, index * each - 1)) for index in range(1, chunks)), layers]
    per_layer = arch.active_params - arch.embedding_params
    head = arch.embedding_params * layers / per_layer
    target = (layers + head) / chunks
    return [min(layers, round(index * target)) for index in range(chunks)] + [layers]
