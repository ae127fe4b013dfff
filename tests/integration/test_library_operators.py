"""Operators that libraries register for a sum of rows, written here by name and arguments where they are not installed.

The layers as their packages ship them are swept by `make coverage-packages`.
"""

from __future__ import annotations

import contextlib
import importlib

import pytest
import torch
from torch import Tensor, nn

import memfine_fx
from tests.integration.comparison import optimized_copy

E, H, WIDTH = 8, 16, 24

with contextlib.suppress(ImportError):
    importlib.import_module("torchtitan.ops.scatter_add")

if not hasattr(torch.ops.torchtitan, "deterministic_scatter_add"):

    @torch.library.custom_op("torchtitan::deterministic_scatter_add", mutates_args=())
    def scatter_add(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
        return out.scatter_add(0, index, src)

    @scatter_add.register_fake
    def _(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
        return torch.empty_like(out)

    scatter_add.register_autograd(
        lambda ctx, gradient: (gradient, None, gradient.gather(0, ctx.saved_tensors[0])),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    )


class Layer(nn.Module):
    """Routing of [B,S,H], whose weights are flattened to [T,K] before experts are known; torchtitan 0.3's way."""

    def __init__(self, top_k: int, *, columns: int = H) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.up = nn.Parameter(torch.randn(E, WIDTH, H) / 4)
        self.down = nn.Parameter(torch.randn(E, H, WIDTH) / 5)
        self.top_k, self.columns = top_k, columns

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.gate(hidden).sigmoid()
        index = scores.topk(self.top_k, dim=-1, sorted=False).indices
        weight = scores.gather(-1, index)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        counts = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, index, True).sum((0, 1))
        tokens, weight = hidden.view(-1, H), weight.view(-1, self.top_k)
        order = index.view(-1, self.top_k).view(-1).argsort(stable=True)
        row_weight, places = weight.view(-1)[order], order // self.top_k
        ends = counts.cumsum(0, dtype=torch.int32)
        inner = nn.functional.silu(grouped(tokens[places], self.up.transpose(-2, -1), ends))
        rows = grouped(inner, self.down.transpose(-2, -1), ends)
        rows = (rows.float() * row_weight.reshape(-1, 1)).to(rows.dtype)
        where = places.reshape(-1, 1).expand(-1, self.columns)
        out = torch.ops.torchtitan.deterministic_scatter_add(torch.zeros_like(tokens), where, rows)
        return out.view(hidden.shape)


def grouped(rows: Tensor, table: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(rows.bfloat16(), table.bfloat16(), offs=ends).float()


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_rows_are_added_by_a_library_s_operator(top_k: int) -> None:
    layer = Layer(top_k)
    optimized = optimized_copy(layer, rows_per_chunk=8)
    with torch.no_grad():
        expected = layer(hidden := torch.randn(2, 20, H))
        torch.testing.assert_close(optimized(hidden), expected, rtol=2e-2, atol=2e-2)  # products in bf16
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked" and not region.uncompared, str(region)


@torch.no_grad()
def test_rows_added_to_other_columns_are_left_as_they_are() -> None:
    layer, hidden = Layer(2, columns=H - 1), torch.randn(2, 20, H)
    optimized = optimized_copy(layer, rows_per_chunk=8)
    with pytest.warns(UserWarning, match="scatter_add other than of rows to tokens"):
        torch.testing.assert_close(optimized(hidden), layer(hidden))
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "refused"
