"""What an expert's forward may keep: which tensors, what that spares backward, and where there is nothing to keep."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memfine_fx.runtime.compiled_expert import CompiledBackward
from tests.helpers import HIDDEN, NUM_EXPERTS, WIDTH, compiled_expert_of, mlp, mlp_params

KINDS = ("expert", "expert")
ALL = (True, True, True, True)


def swiglu(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (rows @ gate_up).chunk(2, dim=-1)
    return ((F.silu(gate) * up) @ down) * weight.unsqueeze(1)


def swiglu_params() -> list[Tensor]:
    return [torch.randn(NUM_EXPERTS, HIDDEN, 2 * WIDTH) / 3, torch.randn(NUM_EXPERTS, WIDTH, HIDDEN) / 4]


def linear(rows: Tensor, weight: Tensor, up: Tensor) -> Tensor:
    return (rows @ up) * weight.unsqueeze(1)


def products(body: CompiledBackward) -> int:
    nodes = body.call.graph_module.graph.nodes  # type: ignore[attr-defined]  # uncompiled
    return sum(node.target is torch.ops.aten.mm.default for node in nodes)


def test_projections_are_the_matmuls_that_backward_runs_again() -> None:
    compiled_expert = compiled_expert_of(swiglu, swiglu_params(), KINDS)
    saving = compiled_expert.saving("projections", ALL)
    assert saving is not None
    assert [(one.shape, one.dtype) for one in saving.saved] == [((2 * WIDTH,), torch.float32)]
    assert saving.row_bytes == 2 * WIDTH * 4
    assert saving.flops_per_row == 2 * HIDDEN * 2 * WIDTH
    assert products(saving.backward) == products(compiled_expert.backward(ALL)) - 1


def test_a_product_and_its_low_rank_term_are_kept_as_their_sum() -> None:
    def adapted(rows: Tensor, weight: Tensor, up: Tensor, first: Tensor, second: Tensor, down: Tensor) -> Tensor:
        return (F.silu(rows @ (up + second @ first).t()) @ down) * weight.unsqueeze(1)

    wide = 4 * WIDTH
    sizes = [(wide, HIDDEN), (1, HIDDEN), (wide, 1), (wide, HIDDEN)]
    compiled_expert = compiled_expert_of(adapted, [torch.randn(NUM_EXPERTS, *size) for size in sizes], ("expert",) * 4)
    assert compiled_expert.num_factored == 1
    saving = compiled_expert.saving("projections", (True, True, False, True, True, False))
    assert saving is not None
    assert [one.shape for one in saving.saved] == [(1,), (wide,)]
    assert saving.flops_per_row == 2 * (HIDDEN * (wide + 1) + wide)


def test_operands_are_what_the_matmuls_of_backward_read() -> None:
    saving = compiled_expert_of(swiglu, swiglu_params(), KINDS).saving("operands", ALL)
    assert saving is not None
    assert sorted(one.shape for one in saving.saved) == [(WIDTH,), (2 * WIDTH,)]


def test_a_projection_that_cannot_be_folded_is_kept_too() -> None:
    saving = compiled_expert_of(mlp, mlp_params(), KINDS, folds_weight=False).saving("projections", ALL)
    assert saving is not None
    assert sorted(one.shape for one in saving.saved) == [(HIDDEN,), (WIDTH,)]


def test_products_of_arguments_are_made_where_they_stay() -> None:
    saving = compiled_expert_of(swiglu, swiglu_params(), KINDS).saving("projections", ALL)
    assert saving is not None
    assert [product is not None for product in saving.given] == [True]
    assert saving.copied_row_bytes == 0
    rows, gate_up = torch.randn(5, HIDDEN), torch.randn(HIDDEN, 2 * WIDTH)
    place = torch.full((5, 2 * WIDTH), float("nan"))
    (product,) = saving.given
    assert product is not None
    product.into(place, [rows, torch.rand(5), gate_up, torch.randn(WIDTH, HIDDEN)])
    assert torch.equal(place, rows @ gate_up)
    forward = saving.forward.graph_module.graph  # type: ignore[attr-defined]  # uncompiled
    (results,) = forward.find_nodes(op="output")[0].args
    assert len(results) == 1


def test_a_product_of_what_the_body_computes_is_returned_by_it() -> None:
    saving = compiled_expert_of(mlp, mlp_params(), KINDS, folds_weight=False).saving("projections", ALL)
    assert saving is not None
    assert [(one.shape, product is not None) for one, product in zip(saving.saved, saving.given, strict=True)] == [
        ((WIDTH,), True),
        ((HIDDEN,), False),
    ]
    assert saving.copied_row_bytes == 4 * HIDDEN


def biased(rows: Tensor, weight: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    return (F.gelu(torch.addmm(bias, rows, up)) @ down) * weight.unsqueeze(1)


def test_a_bias_is_added_where_the_product_stays() -> None:
    params = [
        torch.randn(NUM_EXPERTS, HIDDEN, WIDTH),
        torch.randn(NUM_EXPERTS, WIDTH),
        torch.randn(NUM_EXPERTS, WIDTH, HIDDEN),
    ]
    saving = compiled_expert_of(biased, params, ("expert",) * 3).saving("projections", (True,) * 5)
    assert saving is not None
    (product,) = saving.given
    assert product is not None
    rows, place = torch.randn(5, HIDDEN), torch.empty(5, WIDTH)
    product.into(place, [rows, torch.rand(5), *(param[0] for param in params)])
    assert torch.equal(place, torch.addmm(params[1][0], rows, params[0][0]))


def test_a_single_matmul_leaves_nothing_to_keep() -> None:
    compiled_expert = compiled_expert_of(linear, [torch.randn(NUM_EXPERTS, HIDDEN, WIDTH)], ("expert",))
    assert compiled_expert.saving("projections", (True, True, True)) is None
