"""Routings on numbers: which token chose which experts, in which order rows stand, and tensors to feed layers with.

An *assignment* is (token, choice); its expert is what the index says. Sizes differ from each other, so that no
dimension is taken for another by its size; in "square" there are as many tokens as experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["HIDDEN", "NUM_EXPERTS", "ROUTINGS", "WIDTH", "Assignment", "Routing", "inputs_of"]

HIDDEN, WIDTH, NUM_EXPERTS = 7, 6, 4
Assignment = tuple[int, int]


@dataclass(frozen=True)
class Routing:
    """What each token chose.

    Args:
        ids: experts of each token, [T][K].
        token_shape: [T] or [B,S].
        has_choices: whether the index has a dimension for choices (else K = 1).
        is_dynamic: whether the number of tokens is a symbol when a layer is read.
    """

    ids: tuple[tuple[int, ...], ...]
    token_shape: tuple[int, ...]
    has_choices: bool = True
    is_dynamic: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def top_k(self) -> int:
        return len(self.ids[0])

    @property
    def is_distinct(self) -> bool:
        return all(len(set(chosen)) == len(chosen) for chosen in self.ids)

    @property
    def index(self) -> Tensor:
        shape = (*self.token_shape, self.top_k) if self.has_choices else self.token_shape
        return torch.tensor(self.ids).reshape(shape)

    def expert_of(self, assignment: Assignment) -> int:
        token, choice = assignment
        return self.ids[token][choice]

    def all(self) -> list[Assignment]:
        """Every assignment, in token order."""
        return [(token, choice) for token in range(self.num_tokens) for choice in range(self.top_k)]

    def in_order(self, order: str) -> list[Assignment]:
        """Every assignment in expert order; an expert's own stand as `LoopIteration.order` says."""
        if order.endswith(" sort"):
            layout = self.all() if order == "t sort" else sorted(self.all(), key=lambda one: one[::-1])
            flat = torch.tensor([self.expert_of(one) for one in layout])
            return [layout[place] for place in flat.sort().indices.tolist()]
        keys = {"t": lambda one: one, "kt": lambda one: one[::-1]}
        return sorted(self.all(), key=lambda one: (self.expert_of(one), keys[order](one)))

    def counts(self) -> list[int]:
        return [sum(chosen.count(expert) for chosen in self.ids) for expert in range(NUM_EXPERTS)]


_PLAIN = ((2, 0), (1, 3), (0, 1), (2, 1), (3, 2))
_SQUARE = ((1, 3), (0, 2), (3, 1), (0, 3))
_SPARSE = ((3, 0), (3, 1), (1, 0), (0, 3), (1, 3))
_REPEATED = ((2, 2), (1, 3), (0, 1), (1, 1), (3, 0))
_SINGLE = ((2,), (0,), (2,), (1,), (3,))
_BATCHED = _PLAIN + _SPARSE + ((0, 3), (1, 2), (2, 3), (1, 0), (3, 1))

ROUTINGS = {
    "plain": Routing(_PLAIN, (5,)),
    "square": Routing(_SQUARE, (4,)),
    "sparse": Routing(_SPARSE, (5,)),
    "dynamic": Routing(_PLAIN, (5,), is_dynamic=True),
    "repeated": Routing(_REPEATED, (5,)),
    "single": Routing(_SINGLE, (5,)),
    "argmax": Routing(_SINGLE, (5,), has_choices=False),
    "batched": Routing(_BATCHED, (3, 5)),
}
"""By name: "sparse" has an expert without rows, in "repeated" tokens name an expert twice."""


def inputs_of(routing: Routing) -> dict[str, Any]:
    """Numbers by name; parameters are `nn.Parameter`s.

    index  [T,K]     hidden [T,H]      up [E,H,F]   bias [E,F]   gain [H]      ups   E times [H,F]
    weight [T,K]     gates  [T,E]      down [E,F,H]              square [H,H]  downs E times [F,H]
    """
    generator = torch.Generator().manual_seed(7)

    def number(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1

    def parameter(*shape: int) -> Tensor:
        return nn.Parameter(number(*shape) - 0.6)

    tokens = routing.token_shape
    return {
        "index": routing.index,
        "weight": number(*routing.index.shape),
        "gates": number(*tokens, NUM_EXPERTS),
        "hidden": number(*tokens, HIDDEN),
        "up": parameter(NUM_EXPERTS, HIDDEN, WIDTH),
        "down": parameter(NUM_EXPERTS, WIDTH, HIDDEN),
        "bias": parameter(NUM_EXPERTS, WIDTH),
        "gain": parameter(HIDDEN),
        "square": parameter(HIDDEN, HIDDEN),
        "ups": [parameter(HIDDEN, WIDTH) for _ in range(NUM_EXPERTS)],
        "downs": [parameter(WIDTH, HIDDEN) for _ in range(NUM_EXPERTS)],
    }
