"""The op pair as torch sees it: schemas, fakes, autograd, and the refusal of second derivatives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memfine_fx.errors import DoubleBackwardError
from memfine_fx.records import ChunkPlan
from memfine_fx.runtime import store
from memfine_fx.runtime.compiled_expert import CompiledExpert
from memfine_fx.runtime.op import experts, experts_backward, route
from memfine_fx.runtime.store import LiveRegion, lookup, register
from tests.helpers import HIDDEN, NUM_EXPERTS, compiled_expert_of, largest_error, mlp, mlp_params, naive_combine

SITE = "test_op/0"
TOP_K = 2
KINDS = ("expert", "expert")


def live_region(
    compiled_expert: CompiledExpert,
    choose: Callable[[int], ChunkPlan],
    dtype: torch.dtype = torch.float32,
    *,
    drops: bool = False,
) -> LiveRegion:
    return LiveRegion(
        region_id=SITE,
        compiled_expert=compiled_expert,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        out_dtype=dtype,
        out_of_range="dropped" if drops else "error",
        choose_plan=choose,
    )


def unweighted(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.relu(rows @ up) @ down


@pytest.fixture
def live() -> Iterator[Callable[..., LiveRegion]]:
    """Registers one region for the test, and holds it as a graph's record does."""
    held: list[LiveRegion] = []

    def make(
        dtype: torch.dtype = torch.float32, *, has_weight: bool = True, rows: int = 3, drops: bool = True
    ) -> LiveRegion:
        compiled_expert = compiled_expert_of(
            mlp if has_weight else unweighted, mlp_params(dtype), KINDS, has_weight=has_weight
        )
        plan = ChunkPlan("rows", rows, 0, 0, "")
        region = live_region(compiled_expert, lambda num_tokens: plan, dtype, drops=drops)
        register(region)
        held.append(region)
        return region

    yield make
    with contextlib.suppress(KeyError):
        store.unregister(SITE)


def expert_index(num_tokens: int = 7) -> Tensor:
    return torch.rand(num_tokens, NUM_EXPERTS).topk(TOP_K, dim=-1).indices


def arguments(dtype: torch.dtype = torch.float32, *, num_tokens: int = 7, has_weight: bool = True) -> list[object]:
    """hidden, weight, order, offsets, params, region id."""
    order, offsets = route(expert_index(num_tokens), NUM_EXPERTS)
    weight = torch.rand(num_tokens, TOP_K).to(dtype) if has_weight else None
    return [torch.randn(num_tokens, HIDDEN).to(dtype), weight, order, offsets, mlp_params(dtype), SITE]


def with_gradients(args: list[object]) -> list[object]:
    hidden, weight, order, offsets, params, region_id = args
    for tensor in (hidden, weight, *params):  # type: ignore[misc]  # a list of tensors
        if tensor is not None:
            tensor.requires_grad_()
    return [hidden, weight, order, offsets, params, region_id]


def described(tensors: object) -> list[tuple[object, ...]]:
    leaves = torch.utils._pytree.tree_leaves(tensors)
    return [(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device.type) for leaf in leaves]


def fake_result(op: Callable[..., object], *args: object) -> object:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        faked = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, args)
        return op(*faked)


def test_route_passes_the_checks_of_torch() -> None:
    torch.library.opcheck(torch.ops.memfine.route.default, (expert_index(), NUM_EXPERTS))


@pytest.mark.parametrize("has_weight", [True, False])
def test_experts_passes_the_checks_of_torch(live: Callable[..., LiveRegion], has_weight: bool) -> None:
    live(has_weight=has_weight)
    args = with_gradients(arguments(has_weight=has_weight))
    torch.library.opcheck(torch.ops.memfine.experts.default, tuple(args))


@pytest.mark.parametrize("has_weight", [True, False])
def test_the_backward_passes_the_checks_of_torch(live: Callable[..., LiveRegion], has_weight: bool) -> None:
    live(has_weight=has_weight)
    args = (torch.randn(7, HIDDEN), *arguments(has_weight=has_weight), [True, has_weight, True, True])
    torch.library.opcheck(
        torch.ops.memfine.experts_backward.default, args, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_the_fake_route_has_the_real_layout(num_tokens: int) -> None:
    index = expert_index(num_tokens)
    assert described(fake_result(route, index, NUM_EXPERTS)) == described(route(index, NUM_EXPERTS))


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_strided", [False, True])
def test_the_fake_experts_and_backward_have_the_real_layouts(
    live: Callable[..., LiveRegion], dtype: torch.dtype, num_tokens: int, is_strided: bool
) -> None:
    live(dtype)
    hidden, weight, order, offsets, params, region_id = arguments(dtype, num_tokens=num_tokens)
    if is_strided:
        hidden, weight = (tensor.t().contiguous().t() for tensor in (hidden, weight))  # type: ignore[attr-defined]
        params = [param.transpose(1, 2).contiguous().transpose(1, 2) for param in params]  # type: ignore[attr-defined]
    args = (hidden, weight, order, offsets, params, region_id)
    out = experts(*args)
    assert described(fake_result(experts, *args)) == described(out)
    backward = (torch.randn_like(out), *args, [True] * 4)
    assert described(fake_result(experts_backward, *backward)) == described(experts_backward(*backward))


def test_only_wanted_gradients_are_faked(live: Callable[..., LiveRegion]) -> None:
    live()
    args = (torch.randn(7, HIDDEN), *arguments(), [False, True, False, True])
    assert described(fake_result(experts_backward, *args)) == described(experts_backward(*args))


def test_autograd_through_the_op_is_that_of_plain_torch(live: Callable[..., LiveRegion]) -> None:
    live()
    index = expert_index()
    hidden, weight, _, _, params, region_id = with_gradients(arguments())
    leaves = [hidden, weight, *params]  # type: ignore[misc]  # a list of tensors
    out = experts(hidden, weight, *route(index, NUM_EXPERTS), params, region_id)
    expected = naive_combine(mlp, hidden, weight, index, params, KINDS)  # type: ignore[arg-type]  # tensors
    probe = torch.randn_like(out)
    assert largest_error(out, expected) < 1e-5
    for got, truth in zip(
        torch.autograd.grad(out, leaves, probe), torch.autograd.grad(expected, leaves, probe), strict=True
    ):
        assert largest_error(got, truth) < 1e-5


def test_frozen_parameters_get_no_gradient(live: Callable[..., LiveRegion]) -> None:
    live()
    args = with_gradients(arguments())
    up, down = args[4]  # type: ignore[misc]  # a list of tensors
    up.requires_grad_(False)
    experts(*args).sum().backward()
    assert up.grad is None
    assert down.grad is not None and bool(down.grad.any())


def test_a_second_derivative_is_refused_by_name(live: Callable[..., LiveRegion]) -> None:
    live()
    args = with_gradients(arguments())
    (gradient,) = torch.autograd.grad(experts(*args).pow(2).sum(), args[0], create_graph=True)
    with pytest.raises(DoubleBackwardError, match="double backward through a chunked MoE region is not supported"):
        gradient.sum().backward()


def test_the_region_remembers_its_last_step(live: Callable[..., LiveRegion]) -> None:
    region = live(rows=1000)
    for num_tokens in (7, 4):
        experts(*arguments(num_tokens=num_tokens))
    assert (region.num_tokens, region.num_steps) == (4, 2)
    assert 1 <= region.num_chunks <= NUM_EXPERTS


def test_a_plan_is_chosen_once_for_each_number_of_tokens() -> None:
    asked: list[int] = []

    def choose(num_tokens: int) -> ChunkPlan:
        asked.append(num_tokens)
        return ChunkPlan("rows", 5, 0, 0, "")

    compiled_expert = compiled_expert_of(mlp, mlp_params(), KINDS)
    region = live_region(compiled_expert, choose)
    assert region.plan_for(3) is region.plan_for(3)
    region.plan_for(4)
    assert asked == [3, 4]


@pytest.mark.parametrize("outside", [-1, NUM_EXPERTS])
def test_ids_outside_the_experts_are_an_error_where_the_model_would_raise_one(
    live: Callable[..., LiveRegion], outside: int
) -> None:
    live(drops=False)
    index = expert_index()
    index[3, 1] = outside
    hidden, weight, _, _, params, region_id = arguments()
    with pytest.raises(IndexError, match=r"expert ids outside \[0, 4\) reach a table of 4 experts"):
        experts(hidden, weight, *route(index, NUM_EXPERTS), params, region_id)


def test_ids_outside_the_experts_are_dropped_where_the_model_drops_them(live: Callable[..., LiveRegion]) -> None:
    live(drops=True)
    index = expert_index()
    index[3] = NUM_EXPERTS
    hidden, weight, _, _, params, region_id = arguments()
    out = experts(hidden, weight, *route(index, NUM_EXPERTS), params, region_id)
    assert [bool(row.any()) for row in out] == [token != 3 for token in range(7)]


def test_an_unknown_region_id_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="nowhere/0"):
        lookup("nowhere/0")
