"""Attention with narrow values: as a CUDA device holds it, without the scores of all pairs of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfine_fx.fitting.recording import attention_of

TOKENS, WIDTH, NARROW = 96, 48, 32


class Shapes(TorchDispatchMode):
    """Collects the shapes of all that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        many = results if isinstance(results, (tuple, list)) else [results]
        self.seen += [tuple(one.shape) for one in many if isinstance(one, torch.Tensor)]
        return results


@pytest.mark.parametrize(("device", "holds_scores"), [("cpu", True), ("cuda", False)])
def test_scores_of_all_pairs_are_held_where_no_kernel_is_fused(device: str, holds_scores: bool) -> None:
    query, key = (torch.randn(1, 2, TOKENS, WIDTH) for _ in range(2))
    value = torch.randn(1, 2, TOKENS, NARROW)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    with attention_of(device), Shapes() as shapes:
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(found, expected)
    assert any(shape[-2:] == (TOKENS, TOKENS) for shape in shapes.seen) == holds_scores
