"""The body of a range of experts equals one expert's body on each of them, in bf16 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.lower.compiled_function import num_compilations
from memfine_fx.passes.lower.lift import can_lift
from memfine_fx.records import ChunkPlan, ParamKind
from memfine_fx.runtime.loop import chunks_of, run_backward, run_forward
from memfine_fx.runtime.routing import Routed, sort_assignments
from tests.helpers import HIDDEN, NUM_EXPERTS, WIDTH, compiled_expert_of, expert_function, mlp, mlp_params, specs_for

BF16 = torch.bfloat16
EXPERT: ParamKind = "expert"


def with_biases(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    act = torch.relu(rows @ up + inner.unsqueeze(0))
    return (act @ down + outer.unsqueeze(0)) * weight.unsqueeze(1)


def linears(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (torch.relu(rows @ up.t()) @ down.t()) * weight.unsqueeze(1)


def halves(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, linear = (rows @ up).chunk(2, dim=-1)
    return (torch.cat([torch.relu(gate), linear], dim=-1) @ down) * weight.unsqueeze(1)


def joined_tables(rows: Tensor, weight: Tensor, left: Tensor, right: Tensor, down: Tensor) -> Tensor:
    return (torch.relu(rows @ torch.cat([left, right], dim=1)) @ down) * weight.unsqueeze(1)


def tables(function: Callable[..., Tensor]) -> list[Tensor]:
    params = mlp_params(BF16)
    if function is with_biases:
        params += [torch.randn(NUM_EXPERTS, WIDTH).to(BF16), torch.randn(NUM_EXPERTS, HIDDEN).to(BF16)]
    if function is linears:
        return [param.transpose(1, 2).contiguous() for param in params]
    return params


def step(
    function: Callable[..., Tensor],
    index: Tensor,
    params: Sequence[Tensor],
    *,
    takes_group: bool,
    rows: int,
    seed: int = 0,
) -> list[Tensor]:
    """Output and every gradient of one layer."""
    torch.manual_seed(0)
    hidden = torch.randn(index.shape[0], HIDDEN).to(BF16)
    weight, grad = torch.rand(index.shape).to(BF16), torch.randn_like(hidden)
    compiled_expert = compiled_expert_of(function, params, [EXPERT] * len(params), takes_group=takes_group)
    routed = Routed(
        hidden, weight, *sort_assignments(index, NUM_EXPERTS), [[param] for param in params], index.shape[1]
    )
    chunks = chunks_of(routed, compiled_expert, ChunkPlan("rows", rows, 0, 0, ""))
    with torch.no_grad():
        out = run_forward(routed, compiled_expert, chunks, BF16)
        return [out, *run_backward(grad, routed, compiled_expert, chunks, (True, True), [[True]] * len(params))]


ROUTINGS = {
    "balanced": torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0], [0, 2], [1, 3]]),
    "empty experts between": torch.tensor([[0, 3], [0, 3], [3, 0], [0, 3]]),
    "empty experts at the ends": torch.tensor([[1, 2], [2, 1], [1, 2]]),
    "one expert": torch.tensor([[2], [2], [2], [2], [2]]),
    "no rows": torch.empty(0, 2, dtype=torch.int64),
}


@pytest.mark.parametrize("rows", [3, 8, 1000])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("function", [mlp, with_biases, linears, halves])
def test_the_grouped_body_equals_the_per_expert_body(function: Callable[..., Tensor], routing: str, rows: int) -> None:
    params = tables(function)
    grouped = step(function, ROUTINGS[routing], params, takes_group=True, rows=rows)
    single = step(function, ROUTINGS[routing], params, takes_group=False, rows=rows)
    for got, expected in zip(grouped, single, strict=True):
        assert (got.shape, got.dtype, got.stride()) == (expected.shape, expected.dtype, expected.stride())
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_other_rows_and_groups_need_no_other_body() -> None:
    params = tables(mlp)
    step(mlp, ROUTINGS["balanced"], params, takes_group=True, rows=1000)
    before = num_compilations()
    for routing in ("empty experts between", "one expert"):
        for rows in (2, 5, 1000):
            step(mlp, ROUTINGS[routing], params, takes_group=True, rows=rows)
    assert num_compilations() == before


@pytest.mark.parametrize(
    ("dtype", "width", "kinds", "is_liftable"),
    [
        (BF16, WIDTH, (EXPERT, EXPERT), True),
        (torch.float32, WIDTH, (EXPERT, EXPERT), False),
        (BF16, WIDTH, (EXPERT, "shared"), False),
        (BF16, 12, (EXPERT, EXPERT), False),
    ],
    ids=["bf16", "fp32", "a shared parameter", "rows not aligned"],
)
def test_only_what_grouped_matmuls_take_is_lifted(
    dtype: torch.dtype, width: int, kinds: tuple[ParamKind, ...], is_liftable: bool
) -> None:
    params = [
        torch.zeros(NUM_EXPERTS, HIDDEN, width, dtype=dtype),
        torch.zeros(NUM_EXPERTS, width, HIDDEN, dtype=dtype),
    ]
    specs = specs_for(params, kinds, has_weight=True, dtype=dtype)
    assert can_lift(expert_function(mlp, has_weight=True, kinds=kinds), specs) is is_liftable


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda rows, weight, up, down: (rows @ up[:, :HIDDEN]) @ down[:HIDDEN], id="a slice of a table"),
        pytest.param(lambda rows, weight, up, down: rows @ up.cumsum(0) @ down, id="a running sum"),
    ],
)
def test_what_has_no_lifted_form_is_refused_by_name(function: Callable[..., Tensor]) -> None:
    with pytest.raises(CannotChunk, match=r"aten\.\w+\.\w+ of a parameter cannot be lifted over experts"):
        compiled_expert_of(function, mlp_params(BF16), [EXPERT, EXPERT], takes_group=True)


def test_tables_joined_inside_the_expert_are_lifted_or_refused() -> None:
    up, down = mlp_params(BF16)
    params = [*(half.contiguous() for half in up.chunk(2, dim=2)), down]
    try:
        grouped = step(joined_tables, ROUTINGS["balanced"], params, takes_group=True, rows=8)
    except CannotChunk:
        return
    single = step(joined_tables, ROUTINGS["balanced"], params, takes_group=False, rows=8)
    torch.testing.assert_close(grouped, single, rtol=2e-2, atol=2e-2)
