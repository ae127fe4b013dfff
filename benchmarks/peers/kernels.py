"""Other ways to run the same expert weights: transformers' implementations, and the kernels of other projects.

Each replaces the block's experts by functions of its own on the block's parameters; the router stays.
"""

import math
from typing import Any

import torch

from benchmarks.peers.base import Forward, Peer, Wrap, compiled, needs
from benchmarks.records import Sizes


def _implementation(name: str) -> Wrap:
    """transformers' own switch between implementations of the experts."""

    def wrap(module: Any, sizes: Sizes) -> Forward:
        module.experts.config._experts_implementation = name
        forward: Forward = module
        return forward

    return wrap


def _scattermoe(module: Any, sizes: Sizes) -> Forward:
    """Both projections as scattered grouped products on the block's own parameters."""
    from scattermoe.parallel_experts import flatten_sort_count, parallel_linear

    experts = module.experts

    def forward_experts(hidden: torch.Tensor, expert_index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        by_expert, order, offsets = flatten_sort_count(expert_index, num_experts=sizes.experts)
        routing = (by_expert, order, offsets)
        gate_up = experts.gate_up_proj.permute(0, 2, 1)
        gate, up = parallel_linear(hidden, gate_up, sizes.top_k, *routing, grouped_out=True).chunk(2, dim=-1)
        down = experts.down_proj.permute(0, 2, 1)
        active = torch.nn.functional.silu(gate) * up
        out: torch.Tensor = parallel_linear(active, down, 1, *routing, grouped_in=True, gates=weight)
        return out

    experts.forward = forward_experts
    forward: Forward = module
    return forward


def _megablocks(module: Any, sizes: Sizes) -> Forward:
    """Its dropless layer's grouped form: sort, gather, two grouped products, scatter."""
    from megablocks import grouped_gemm_util, ops

    experts = module.experts
    sort_end_bit = max(math.ceil(math.log2(sizes.experts)), 1)

    def forward_experts(hidden: torch.Tensor, expert_index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            flat = expert_index.flatten().int()
            by_expert, order = ops.sort(flat, sort_end_bit)
            counts = ops.histogram(flat, sizes.experts)
            ends = ops.inclusive_cumsum(counts, 0)
        rows = ops.gather(hidden, order, by_expert, ends, sizes.top_k)
        host_counts = counts.cpu().long()
        gate_up = grouped_gemm_util.ops.gmm(rows, experts.gate_up_proj, host_counts, trans_b=True)
        gate, up = gate_up.chunk(2, dim=-1)
        active = torch.nn.functional.silu(gate) * up
        out = grouped_gemm_util.ops.gmm(active, experts.down_proj, host_counts, trans_b=True)
        combined: torch.Tensor = ops.scatter(out, order, by_expert, weight.flatten(), ends, sizes.top_k)
        return combined

    experts.forward = forward_experts
    forward: Forward = module
    return forward


def _memfine_kernels(num_windows: int) -> Wrap:
    """This project's kernels over windows of rows, on the block's own parameters, in tiles that were timed."""

    def wrap(module: Any, sizes: Sizes) -> Forward:
        from memfine_fx.kernels.layer import LayerOptions
        from memfine_fx.kernels.swiglu import swiglu_experts
        from memfine_fx.kernels.tuning import kind_of, tune

        experts = module.experts

        def forward_experts(hidden: torch.Tensor, expert_index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            rows = -(-expert_index.numel() // num_windows)
            tables, tiles = [experts.gate_up_proj, experts.down_proj], None
            if hidden.device.type == "cuda":  # in the first call, which is not measured
                kind = kind_of("halves", "swiglu", False, "ieee", hidden, tables, expert_index.shape[1])
                tiles = tune(kind, hidden.device)
            return swiglu_experts(hidden, expert_index, weight, tables, LayerOptions(max(1, rows), tiles=tiles))

        experts.forward = forward_experts
        forward: Forward = module
        return forward

    return wrap


LAYER = (
    Peer("batched_mm", _implementation("batched_mm")),
    Peer("memfine-function", _implementation("memfine"), "first projection"),
    Peer("batched_mm+compile", compiled(_implementation("batched_mm")), is_compiled=True),
    Peer("sonicmoe", _implementation("sonicmoe"), missing=needs("kernels", "cutlass", cuda=True)),
    Peer("scattermoe", _scattermoe, missing=needs("scattermoe", "triton", cuda=True)),
    Peer("megablocks", _megablocks, missing=needs("megablocks", "grouped_gemm", cuda=True)),
    *(
        Peer(
            name, _memfine_kernels(num_windows), "first projection", is_memfine=True, missing=needs("triton", cuda=True)
        )
        for name, num_windows in (("memfine-kernels", 1), ("memfine-kernels-w8", 8))
    ),
)
