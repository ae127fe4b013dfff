"""Other ways to run the same experts' weights: transformers' implementations, and ScatterMoE's kernels.

MegaBlocks keeps its expert weights transposed and concatenated in modules of its own, so the unmodified
block cannot be handed to it; it is reported, not measured.
"""

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


def _no_adapter(module: Any, sizes: Sizes) -> Forward:
    raise AssertionError("reported as unavailable before it is wrapped")


LAYER = (
    Peer("batched_mm", _implementation("batched_mm")),
    Peer("batched_mm+compile", compiled(_implementation("batched_mm")), is_compiled=True),
    Peer("sonicmoe", _implementation("sonicmoe"), missing=needs("kernels", "cutlass", cuda=True)),
    Peer("scattermoe", _scattermoe, missing=needs("scattermoe", "triton", cuda=True)),
    Peer("megablocks", _no_adapter, missing=lambda device: "its layer cannot take this block's weights; no adapter"),
)
