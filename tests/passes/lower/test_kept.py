"""What an expert's forward may keep: which tensors, what that spares backward, and where there is nothing to keep."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memfine_fx.runtime.bodies import BackwardBody
from tests.helpers import HIDDEN, NUM_EXPERTS, WIDTH, bodies_of, mlp, mlp_params

KINDS = ("expert", "expert")
ALL = (True, True, True, True)


def swiglu(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (rows @ gate_up).chunk(2, dim=-1)
    return ((F.silu(gate) * up) @ down) * weight.unsqueeze(1)


def swiglu_params() -> list[Tensor]:
    return [torch.randn(NUM_EXPERTS, HIDDEN, 2 * WIDTH) / 3, torch.randn(NUM_EXPERTS, WIDTH, HIDDEN) / 4]


def linear(rows: Tensor, weight: Tensor, up: Tensor) -> Tensor:
    return (rows @ up) * weight.unsqueeze(1)


def products(body: BackwardBody) -> int:
    nodes = body.call.graph_module.graph.nodes  # type: ignore[attr-defined]  # uncompiled
    return sum(node.target is torch.ops.aten.mm.default for node in nodes)


def test_projections_are_the_matmuls_that_backward_runs_again() -> None:
    bodies = bodies_of(swiglu, swiglu_params(), KINDS)
    keeping = bodies.keeping("projections", ALL)
    assert keeping is not None
    assert [(one.shape, one.dtype) for one in keeping.kept] == [((2 * WIDTH,), torch.float32)]
    assert keeping.row_bytes == 2 * WIDTH * 4
    assert keeping.flops_per_row == 2 * HIDDEN * 2 * WIDTH
    assert products(keeping.backward) == products(bodies.backward(ALL)) - 1


def test_operands_are_what_the_matmuls_of_backward_read() -> None:
    keeping = bodies_of(swiglu, swiglu_params(), KINDS).keeping("operands", ALL)
    assert keeping is not None
    assert sorted(one.shape for one in keeping.kept) == [(WIDTH,), (2 * WIDTH,)]


def test_a_projection_that_cannot_be_folded_is_kept_too() -> None:
    keeping = bodies_of(mlp, mlp_params(), KINDS, folds_weight=False).keeping("projections", ALL)
    assert keeping is not None
    assert sorted(one.shape for one in keeping.kept) == [(HIDDEN,), (WIDTH,)]


def test_a_single_matmul_leaves_nothing_to_keep() -> None:
    bodies = bodies_of(linear, [torch.randn(NUM_EXPERTS, HIDDEN, WIDTH)], ("expert",))
    assert bodies.keeping("projections", (True, True, True)) is None
