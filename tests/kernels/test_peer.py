"""The benchmark's peer that runs these kernels computes the block that it replaces."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.peers import find_peer
from benchmarks.records import Sizes as BlockSizes
from tests.kernels.cases import Sizes, eager_layer, expert_index, in_kernels, parameters, relative_error

pytestmark = in_kernels


@pytest.mark.parametrize("name", ("memfine-kernels", "memfine-kernels-w8"))
def test_peer_replaces_the_experts_of_a_block(name: str) -> None:
    sizes = Sizes(tokens=9, hidden=16, width=16)
    gate_up, down = parameters("halves", sizes)
    block = SimpleNamespace(experts=SimpleNamespace(gate_up_proj=gate_up, down_proj=down))
    find_peer("layer", name).wrap(
        block, BlockSizes(batch=1, sequence=9, hidden=16, width=16, experts=sizes.experts, top_k=sizes.top_k)
    )
    hidden, index = torch.randn(9, 16, device=gate_up.device), expert_index("random", sizes)
    weight = torch.rand(9, sizes.top_k, device=gate_up.device)
    found = block.experts.forward(hidden, index, weight)
    assert relative_error(found, eager_layer(hidden, index, weight, [gate_up, down], "halves", "swiglu")) < 1e-5
