"""Tables of packed numbers that code makes whole: 4 bits with a codebook, blocks with scales, bytes with a scale a row.

Legend: T tokens, H hidden, E experts, K top-k, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import memfine_fx
from memfine_fx.memory.measure import trace_memory
from memfine_fx.passes.read.regions import read_regions
from memfine_fx.passes.read.rules import blocks
from memfine_fx.records import MoERegion
from tests.helpers import capture
from tests.integration.comparison import assert_same_step, optimized_copy

E, K, H, WIDTH, T, BLOCK = 32, 2, 64, 48, 24, 16
TABLE_BYTES = 4 * E * WIDTH * H
CODES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


class Packed(nn.Module):
    """Routed rows by a table [E,F,H] that `table_of` makes of packed numbers; an adapter is added if asked."""

    def __init__(self, table_of: Callable[[Packed], Tensor], *, rank: int = 0) -> None:
        super().__init__()
        self.table_of = table_of
        self.gate = nn.Linear(H, E, bias=False)
        self.nibbles = _kept(torch.randint(0, 256, (E, WIDTH, H // BLOCK, BLOCK // 2), dtype=torch.uint8))
        self.bytes = _kept(torch.randint(-127, 128, (E, WIDTH, H), dtype=torch.int8))
        self.floats = _kept((torch.randn(E, WIDTH, H) / 4).to(torch.float8_e4m3fn))
        self.exponents = _kept(torch.randint(122, 126, (E, WIDTH, H // BLOCK), dtype=torch.uint8))
        self.scales = _kept(torch.rand(E, WIDTH, 1) / 300)
        self.of_experts = _kept(torch.rand(E) / 200)
        self.register_buffer("of_blocks", torch.rand(E, WIDTH // BLOCK, H // BLOCK) / 2)
        self.register_buffer("codebook", torch.tensor(CODES) / 8)
        self.down = nn.Parameter(torch.randn(E, H, WIDTH) / 8, requires_grad=False)
        self.a = nn.Parameter(torch.randn(E, rank, H) / 6) if rank else None
        self.b = nn.Parameter(torch.randn(E, WIDTH, rank)) if rank else None

    def forward(self, hidden: Tensor) -> Tensor:
        weight, index = self.gate(hidden).softmax(-1).topk(K)
        ids, rows = index.reshape(-1), hidden.repeat_interleave(K, dim=0)
        table = self.table_of(self)
        table = table if self.a is None or self.b is None else table + self.b @ self.a
        inner = torch.bmm(table[ids], rows.unsqueeze(-1)).relu()
        rows = torch.bmm(self.down[ids], inner).squeeze(-1) * weight.reshape(-1, 1)
        return rows.view(-1, K, H).sum(1)


def _kept(numbers: Tensor) -> nn.Parameter:
    return nn.Parameter(numbers, requires_grad=False)


def as_gpt_oss_writes_it(layer: Packed) -> Tensor:
    """All experts' blocks below each other, halves of bytes written into every second column."""
    codes = torch.tensor(CODES)
    blocks, exponents = layer.nibbles.reshape(-1, BLOCK // 2), layer.exponents.int().reshape(-1, 1) - 127
    out = torch.empty(len(blocks), BLOCK)
    out[:, 0::2] = codes[(blocks & 0x0F).int()]
    out[:, 1::2] = codes[(blocks >> 4).int()]
    torch.ldexp(out, exponents, out=out)
    return out.reshape(E, WIDTH, H // BLOCK, BLOCK).view(E, WIDTH, H)


def stacked_nibbles(layer: Packed) -> Tensor:
    low, high = layer.nibbles & 15, layer.nibbles.bitwise_right_shift(4)
    numbers = layer.codebook[torch.stack((low, high), dim=-1).long()].flatten(-2)
    return (numbers * (layer.exponents.float() - 127).exp2().unsqueeze(-1)).reshape(E, WIDTH, H)


def looked_up_side_by_side(layer: Packed) -> Tensor:
    halves = torch.cat(((layer.nibbles & 15).int(), torch.div(layer.nibbles, 16, rounding_mode="floor").int()), dim=3)
    numbers = layer.codebook[halves].unsqueeze(3).squeeze(3)
    return numbers.view(E, WIDTH, H)


def picked_from_a_codebook(layer: Packed) -> Tensor:
    places = (layer.nibbles & 15).int().reshape(-1)
    numbers = layer.codebook.index_select(0, places).view(E, WIDTH, H // 2)
    return numbers.repeat(1, 1, 2)


def blocks_of_float8(layer: Packed) -> Tensor:
    wide = layer.floats.float().reshape(E, WIDTH // BLOCK, BLOCK, H // BLOCK, BLOCK)
    return (wide * layer.of_blocks[:, :, None, :, None]).reshape(E, WIDTH, H)


def blocks_of_float8_in_place(layer: Packed) -> Tensor:
    wide = layer.floats.to(torch.float32)
    scales = layer.of_blocks.repeat_interleave(BLOCK, dim=-2)
    wide[..., :H].unflatten(-1, (H // BLOCK, BLOCK)).mul_(scales.unsqueeze(-1))
    return wide


def expanded_scales(layer: Packed) -> Tensor:
    scales = layer.of_blocks[:, :, None, :, None].expand(-1, -1, BLOCK, -1, BLOCK)
    return layer.floats.float() * scales.reshape(E, WIDTH, H)


def a_scale_for_each_row(layer: Packed) -> Tensor:
    return layer.bytes.float() * layer.scales


def a_scale_for_each_expert(layer: Packed) -> Tensor:
    return layer.bytes.float() * layer.of_experts.view(E, 1, 1) + 0.01


def a_scale_from_its_own_numbers(layer: Packed) -> Tensor:
    wide = layer.bytes.float()
    spread = wide.abs().amax(dim=2, keepdim=True) + wide.mean(-1, keepdim=True) + wide.sum(-1, keepdim=True).abs() + 1
    return wide.permute(0, 2, 1).transpose(2, 1).contiguous() / (4 * spread)


def seen_as_bytes(layer: Packed) -> Tensor:
    signs = layer.bytes.view(torch.uint8) >> 7
    return layer.bytes.float().abs() * (1.0 - 2.0 * signs.float()) / 500


def written_into_parts(layer: Packed) -> Tensor:
    table = torch.zeros(E, 2, WIDTH, H)
    table[:, 0] = layer.bytes.float()
    table[:, 1] = layer.floats.float()
    return table[:, 0] * 0.002 + table.select(1, 1).detach()


LOCAL = [
    as_gpt_oss_writes_it,
    stacked_nibbles,
    looked_up_side_by_side,
    picked_from_a_codebook,
    blocks_of_float8,
    blocks_of_float8_in_place,
    expanded_scales,
    a_scale_for_each_row,
    a_scale_for_each_expert,
    a_scale_from_its_own_numbers,
    seen_as_bytes,
    written_into_parts,
]


WITH_ADAPTERS = (as_gpt_oss_writes_it, blocks_of_float8, a_scale_from_its_own_numbers)


@pytest.mark.parametrize(("table_of", "rank"), [*((one, 0) for one in LOCAL), *((one, 2) for one in WITH_ADAPTERS)])
def test_packed_numbers_are_made_weights_one_expert_at_a_time(table_of: Callable[[Packed], Tensor], rank: int) -> None:
    layer, hidden = Packed(table_of, rank=rank), torch.randn(T, H)
    optimized = optimized_copy(layer, rows_per_chunk=8)
    assert_same_step(optimized, layer, {"hidden": hidden})
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked" and region.makes_tables, str(region)
    assert not region.why_expanded and not region.uncompared, str(region)
    optimized(hidden).sum().backward()  # compiles for tokens without gradients
    trace = trace_memory(lambda: optimized(hidden).sum().backward(), torch.device("cpu"))
    assert not trace.has_allocation_of(TABLE_BYTES // 8)


def test_every_rule_has_a_table_that_needs_it() -> None:
    seen = set()
    rule_of = blocks.block_rule

    def noted(target: object) -> object:
        seen.add(target)
        return rule_of(target)

    with mock.patch.object(blocks, "block_rule", noted):
        for table_of in LOCAL:
            torch._dynamo.reset()  # else the limit of captures of one forward is reached
            (region,) = read_regions(capture(Packed(table_of), torch.randn(T, H)))
            assert isinstance(region, MoERegion)
    assert sorted(map(str, set(blocks.BLOCK_RULES) - seen)) == []


def of_the_neighbour(layer: Packed) -> Tensor:
    """Each expert with the next one's scale."""
    return (layer.bytes.float() * layer.scales).roll(1, 0)


def sorted_over_experts(layer: Packed) -> Tensor:
    return (layer.bytes.float() * layer.scales).sort(0).values


def rows_of_all_experts(layer: Packed) -> Tensor:
    return layer.bytes.float().transpose(0, 1).reshape(E, WIDTH, H) * layer.scales


@pytest.mark.parametrize("table_of", [of_the_neighbour, sorted_over_experts, rows_of_all_experts])
def test_numbers_of_several_experts_make_the_table_whole(table_of: Callable[[Packed], Tensor]) -> None:
    layer = Packed(table_of)
    optimized = optimized_copy(layer, rows_per_chunk=8)
    assert_same_step(optimized, layer, {"hidden": torch.randn(T, H)})
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked", str(region)
    assert region.why_expanded or not region.makes_tables, str(region)
