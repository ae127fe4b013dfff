"""Tables in 4 bits (`tests.quantized`), made one expert at a time.

What the library itself makes of real layers is in tests/trainers/test_quantized.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memfine_fx
from memfine_fx.compat.bitsandbytes import linear_4bit
from memfine_fx.memory.measure import trace_memory
from memfine_fx.models.loops import LoopConfig, LoopMoE
from tests.integration.comparison import assert_same_step, optimized_copy
from tests.quantized import dequantized

E, K, H, WIDTH, T = 16, 2, 64, 64, 24


class QuantizedExpert(nn.Module):
    """An expert of a list, whose matrix is in 4 bits, all rows one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randint(0, 256, (WIDTH * H // 2, 1), dtype=torch.uint8), requires_grad=False)
        self.register_buffer("absmax", torch.rand(WIDTH * H // 128) / 5)
        self.down = nn.Linear(WIDTH, H, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        up = linear_4bit(rows, self.packed, [self.absmax], 128, "nf4", WIDTH)
        return self.down(up.relu())  # type: ignore[no-any-return]  # of a module


class Quantized(nn.Module):
    """Experts whose first table is in 4 bits, with an adapter on it if asked."""

    def __init__(self, *, rank: int = 0, block_size: int = 64) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.block_size = block_size
        num = E * WIDTH * H
        self.up = nn.Parameter(torch.randint(0, 256, (num // 2, 1), dtype=torch.uint8), requires_grad=False)
        self.register_buffer("absmax", torch.rand(num // block_size) / 5)
        self.down = nn.Parameter(torch.randn(E, H, WIDTH) / 8, requires_grad=False)
        self.a = nn.Parameter(torch.randn(E, rank, H) / 6) if rank else None
        self.b = nn.Parameter(torch.randn(E, WIDTH, rank)) if rank else None

    def table(self) -> Tensor:
        with torch.no_grad():
            table = dequantized(self.up, self.absmax, self.block_size, [E, WIDTH, H])
        return table if self.a is None or self.b is None else table + self.b @ self.a

    def forward(self, hidden: Tensor) -> Tensor:
        weight, index = self.gate(hidden).softmax(-1).topk(K)
        ids, rows = index.reshape(-1), hidden.repeat_interleave(K, dim=0)
        inner = torch.bmm(self.table()[ids], rows.unsqueeze(-1)).relu()
        rows = torch.bmm(self.down[ids], inner).squeeze(-1) * weight.reshape(-1, 1)
        return rows.view(-1, K, H).sum(1)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_table_in_4_bits_is_made_one_expert_at_a_time(rank: int) -> None:
    layer, hidden = Quantized(rank=rank), torch.randn(T, H)
    optimized = optimized_copy(layer, rows_per_chunk=8)
    assert_same_step(optimized, layer, {"hidden": hidden})
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked" and not region.why_expanded and not region.uncompared, str(region)
    optimized(hidden).sum().backward()  # compiles for tokens without gradients
    trace = trace_memory(lambda: optimized(hidden).sum().backward(), torch.device("cpu"))
    assert not trace.has_allocation_of(4 * E * WIDTH * H // 8)


def test_blocks_across_rows_make_the_table_whole() -> None:
    layer = Quantized(block_size=128)
    optimized = optimized_copy(layer, rows_per_chunk=8)
    assert_same_step(optimized, layer, {"hidden": torch.randn(T, H)})
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked"
    assert "blocks of 128 numbers lie across the borders of rows of 64" in region.why_expanded


def test_experts_of_a_list_in_4_bits_are_made_one_at_a_time() -> None:
    """Blocks may lie across rows: what is packed alone is not split."""
    layer, hidden = LoopMoE(LoopConfig(hidden=H, expert_width=WIDTH, num_experts=E, top_k=K)), torch.randn(T, H)
    layer.experts = nn.ModuleList(QuantizedExpert() for _ in range(E))
    optimized = optimized_copy(layer, rows_per_chunk=8)
    assert_same_step(optimized, layer, {"hidden": hidden})
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked" and region.makes_tables and not region.why_expanded, str(region)


def test_rows_by_a_matrix_in_4_bits_keep_the_packed_matrix_alone() -> None:
    expert, rows = QuantizedExpert(), torch.randn(T, H, requires_grad=True)
    weight = dequantized(expert.packed, expert.absmax, 128, [WIDTH, H])
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one), one)[1], lambda one: one):
        out = linear_4bit(rows, expert.packed, [expert.absmax], 128, "nf4", WIDTH)
    assert sum(one.nbytes for one in kept) == expert.packed.nbytes + expert.absmax.nbytes  # type: ignore[operator]
    (grad,) = torch.autograd.grad(out.square().sum(), rows)
    reference = rows @ weight.t()
    (expected,) = torch.autograd.grad(reference.square().sum(), rows)
    torch.testing.assert_close(out, reference)
    torch.testing.assert_close(grad, expected)
