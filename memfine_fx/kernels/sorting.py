"""Counting sort of assignments by expert: offsets, the rows' assignments, and the inverse map; nothing is compared.

Assignments are taken in blocks of 128.
    count    each block's rows per expert, [E,blocks]
    scan     for each expert, the rows in the blocks before; and its rows in all
    offsets  where each expert's rows begin
    place    offsets[e] + rows of e in earlier blocks + rows of e earlier in this block
The last is a sum over a 128x128 mask, so that the order is stable. Ids outside [0, E) get no row.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from memfine_fx.kernels.launches import Launch, Tiles, launch
from memfine_fx.kernels.traffic import Access, Load
from memfine_fx.kernels.windows import Window, ceil_div

__all__ = ["Routing", "reference_sort", "sort_accesses", "sort_assignments"]

_BLOCK = 128
_TILES = Tiles(_BLOCK, 1, 1, num_warps=4, num_stages=1)


@dataclass(frozen=True)
class Routing:
    """Index arrays of one layer's routing, all on the device.

    Args:
        order: [N] int32, row -> assignment t*K+k; undefined from offsets[E] on.
        inverse: [N] int32, assignment -> row, or -1 where it is dropped.
        offsets: [E+1] int32; rows of expert e stand at offsets[e]:offsets[e+1].
        top_k: K.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    offsets: torch.Tensor
    top_k: int

    @property
    def num_experts(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def num_rows(self) -> int:
        return self.order.shape[0]

    def ranges(self, window: Window) -> list[tuple[int, int]]:
        """Return each expert's rows inside a window, for references: it reads the offsets on the host."""
        bounds = [min(max(offset, window.first), window.last) for offset in self.offsets.tolist()]
        return list(itertools.pairwise(bounds))


@triton.jit
def _experts_of(ids, assignments, num_ids, NUM_EXPERTS: tl.constexpr):
    """Return the expert of each assignment, -1 where it has none."""
    own = tl.load(ids + assignments, mask=assignments < num_ids, other=0).to(tl.int64)
    is_expert = (assignments < num_ids) & (own >= 0) & (own < NUM_EXPERTS)
    return tl.where(is_expert, own, -1).to(tl.int32)


@triton.jit
def _count_kernel(ids, counts, num_ids, num_blocks, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    own = _experts_of(ids, block * BLOCK + places, num_ids, NUM_EXPERTS)
    is_same = own[:, None] == own[None, :]
    is_last = tl.sum((is_same & (places[None, :] > places[:, None])).to(tl.int32), 1) == 0
    total = tl.sum(is_same.to(tl.int32), 1)
    tl.store(counts + own.to(tl.int64) * num_blocks + block, total, mask=is_last & (own >= 0))


@triton.jit
def _scan_kernel(counts, totals, num_blocks, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    total = tl.zeros([], tl.int32)
    for start in range(0, num_blocks, BLOCK):
        blocks = start + tl.arange(0, BLOCK)
        place = counts + expert.to(tl.int64) * num_blocks + blocks
        count = tl.load(place, mask=blocks < num_blocks, other=0)
        tl.store(place, total + tl.cumsum(count, 0) - count, mask=blocks < num_blocks)
        total += tl.sum(count, 0)
    tl.store(totals + expert, total)


@triton.jit
def _offsets_kernel(totals, offsets, NUM_EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr):
    experts = tl.arange(0, EXPERTS_BLOCK)
    is_expert = experts < NUM_EXPERTS
    ends = tl.cumsum(tl.load(totals + experts, mask=is_expert, other=0), 0)
    tl.store(offsets + experts + 1, ends, mask=is_expert)
    tl.store(offsets + experts, tl.zeros_like(experts), mask=experts == 0)


@triton.jit
def _place_kernel(
    ids, counts, offsets, order, inverse, num_ids, num_blocks, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    assignments = block * BLOCK + places
    own = _experts_of(ids, assignments, num_ids, NUM_EXPERTS)
    is_earlier = (own[:, None] == own[None, :]) & (places[None, :] < places[:, None])
    is_routed = own >= 0
    before = tl.load(counts + own.to(tl.int64) * num_blocks + block, mask=is_routed, other=0)
    row = tl.load(offsets + own, mask=is_routed, other=0) + before + tl.sum(is_earlier.to(tl.int32), 1)
    tl.store(order + row, assignments, mask=is_routed)
    tl.store(inverse + assignments, tl.where(is_routed, row, -1), mask=assignments < num_ids)


def sort_assignments(expert_index: torch.Tensor, num_experts: int) -> Routing:
    """Sort routed rows by expert, stable within an expert.

    Args:
        expert_index: [T,K] ints; an id outside [0, E) gets no row.
        num_experts: E.
    """
    ids = expert_index.reshape(-1).contiguous()  # of one column a reshape is a view with that column's stride
    num_ids, device = ids.shape[0], ids.device
    num_blocks = ceil_div(num_ids, _BLOCK)
    counts = torch.zeros((num_experts, num_blocks), dtype=torch.int32, device=device)
    totals = torch.empty((num_experts,), dtype=torch.int32, device=device)
    offsets = torch.empty((num_experts + 1,), dtype=torch.int32, device=device)
    order = torch.empty((num_ids,), dtype=torch.int32, device=device)
    inverse = torch.empty_like(order)
    sizes = {"num_ids": num_ids, "num_blocks": num_blocks}
    constants = {"NUM_EXPERTS": num_experts, "BLOCK": _BLOCK}
    launch(_count_kernel, (num_blocks,), {"ids": ids, "counts": counts, **sizes}, constants, _TILES)
    scanned = {"counts": counts, "totals": totals, "num_blocks": num_blocks}
    launch(_scan_kernel, (num_experts,), scanned, {"BLOCK": 1024}, _TILES)
    experts = {"NUM_EXPERTS": num_experts, "EXPERTS_BLOCK": triton.next_power_of_2(num_experts)}
    launch(_offsets_kernel, (1,), {"totals": totals, "offsets": offsets}, experts, _TILES)
    placed = {"ids": ids, "counts": counts, "offsets": offsets, "order": order, "inverse": inverse, **sizes}
    launch(_place_kernel, (num_blocks,), placed, constants, _TILES)
    return Routing(order, inverse, offsets, expert_index.shape[1])


def reference_sort(expert_index: torch.Tensor, num_experts: int) -> Routing:
    """Compute `sort_assignments` in plain torch."""
    ids = expert_index.reshape(-1).to(torch.int64)
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    order = torch.sort(ids, stable=True).indices
    counts = torch.bincount(ids, minlength=num_experts + 1)[:num_experts]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    rows = torch.arange(ids.shape[0], device=ids.device)
    inverse = torch.empty_like(order)
    inverse[order] = torch.where(rows < offsets[-1], rows, -1)
    order, inverse, offsets = (indices.to(torch.int32) for indices in (order, inverse, offsets))
    return Routing(order, inverse, offsets, expert_index.shape[1])


def sort_accesses(launch: Launch, load: Load) -> list[Access]:
    """Return the most that a launch of one of the four sort kernels loads and stores: experts may share blocks or not.

    Args:
        load: of the whole layer.
    """
    experts, rows = len(load.counts), load.num_rows
    ids = launch.arguments["ids"].shape[0] if "ids" in launch.arguments else 0
    pairs = min(rows, experts * ceil_div(ids, _BLOCK))  # of an expert and a block
    if launch.name == "count_kernel":
        return [Access("ids", ids, ids), Access("counts", pairs, pairs, "store")]
    if launch.name == "scan_kernel":
        size = experts * launch.arguments["num_blocks"]
        counts = [Access("counts", size, size), Access("counts", size, size, "store")]
        return [*counts, Access("totals", experts, experts, "store")]
    if launch.name == "offsets_kernel":
        return [Access("totals", experts, experts), Access("offsets", experts + 1, experts + 1, "store")]
    accesses = [Access("ids", ids, ids), Access("counts", rows, pairs), Access("offsets", rows, experts)]
    return [*accesses, Access("order", rows, rows, "store"), Access("inverse", ids, ids, "store")]
