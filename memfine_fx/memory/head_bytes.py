"""Byte terms of a head's op (T tokens, R tokens a chunk, V entries of the vocabulary).

logits        R rows of V in the projection's dtype; their gradients take their place
block         a few rows of V in fp32, where logits are in low precision or capped: work on logits goes block by block,
              unless one kernel does it
product       copies of a part of the vocabulary, where a CPU multiplies low precision into fp32
rows          numbers per token

The gradients and logits that the op returns are in sight of the graph around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from memfine_fx.memory.sizes import larger, smaller

__all__ = ["BLOCK_BYTES", "HeadBytes", "HeadMemory", "product_rows", "rows_at_once"]

BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""fp32 logits that are worked on at once; on the CPU they stay in cache from one pass over them to the next."""
_PRODUCT_BYTES = 32 << 20
"""Of a part's copies, where gradients of low precision are added up in parts of the vocabulary."""
_BYTES_PER_TOKEN = 128
"""Maxima, sums, labels, masks."""


def rows_at_once(num_bytes: int, row_bytes: Any) -> Any:
    """Rows of `row_bytes` each in `num_bytes`, at least one."""
    return larger(1, num_bytes // larger(1, row_bytes))


def product_rows(rows: Any, hidden: int) -> Any:
    """Entries of the vocabulary in one part, for chunks of R tokens of width H in low precision."""
    return rows_at_once(_PRODUCT_BYTES, 4 * (rows + hidden))


@dataclass(frozen=True)
class HeadBytes:
    """The sizes of a head, and formulas for the bytes that its op allocates.

    Args:
        hidden, vocab: H, V.
        item_bytes: per element of hidden states, weight and logits.
        has_softcap: whether logits are capped.
        wanted: whether gradients of hidden, weight and bias are wanted.
        device_type: "cpu" or "cuda".
        saves_logits: whether the op returns the logits too.
        is_fused: whether one kernel makes losses and gradients of a chunk's logits.
    """

    hidden: int
    vocab: int
    item_bytes: int
    has_softcap: bool
    wanted: tuple[bool, bool, bool]
    device_type: str
    saves_logits: bool = False
    is_fused: bool = False

    @property
    def is_low_precision(self) -> bool:
        return self.item_bytes < 4

    def workspace(self, rows: Any) -> Any:
        """Bytes of a chunk of R tokens beyond arguments and results; R is a number or an expression."""
        block = BLOCK_BYTES.get(self.device_type, BLOCK_BYTES["cuda"])
        block_rows = smaller(rows, rows_at_once(block, 4 * self.vocab))
        num_blocks = 0 if self.is_fused else self.is_low_precision + self.has_softcap
        logits = rows * self.vocab * self.item_bytes
        product = self._product(rows) if self.is_low_precision else 0
        return logits + larger(num_blocks * block_rows * self.vocab * 4, product) + rows * _BYTES_PER_TOKEN

    def _product(self, rows: Any) -> Any:
        """Bytes of fp32 copies while a chunk's gradients are added, in low precision on a CPU."""
        wants_hidden, wants_weight, _ = map(int, self.wanted)  # sympy multiplies by no bool
        if self.device_type != "cpu" or not (wants_hidden or wants_weight):
            return 0
        part = smaller(self.vocab, product_rows(rows, self.hidden))
        return 4 * (rows * part + wants_hidden * part * self.hidden + wants_weight * rows * self.hidden)

    def peak(self, num_tokens: int, rows: int) -> int:
        """Bytes of the op alone, with R tokens a chunk."""
        return int(self.workspace(rows) + self.results(num_tokens))

    def results(self, num_tokens: Any) -> Any:
        """Bytes of the gradients, in fp32, and of the logits that the op returns."""
        hidden, weight, bias = map(int, self.wanted)
        logits = int(self.saves_logits) * num_tokens * self.vocab * self.item_bytes
        return logits + 4 * (hidden * num_tokens * self.hidden + weight * self.vocab * self.hidden + bias * self.vocab)


@dataclass(frozen=True)
class HeadMemory:
    """A head's byte terms, and T in the graph's symbols."""

    terms: HeadBytes
    num_tokens: sympy.Expr

    def workspace(self, rows: int) -> int:
        return int(self.terms.workspace(rows))
