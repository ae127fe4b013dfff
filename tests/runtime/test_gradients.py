"""Weight gradients: written once, accumulated exactly, zero where an expert saw no row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memfine_fx.runtime.gradients import ParamGradient
from tests.helpers import largest_error

LOW = [torch.bfloat16, torch.float16]
ALL = [torch.float32, *LOW]


def factors(num_rows: int = 5, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(4, num_rows).to(dtype), torch.randn(num_rows, 6).to(dtype)


def table(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((3, 4, 6), float("nan"), dtype=dtype)


@pytest.mark.parametrize("dtype", ALL)
def test_a_product_is_written_into_its_own_slice_and_the_rest_is_zero(dtype: torch.dtype) -> None:
    gradient = ParamGradient([table(dtype)], "expert", [True])
    left, right = factors(dtype=dtype)
    gradient.add_product(1, left, right, is_part=False)
    value = gradient.finish_all()[0]
    assert torch.equal(value[1], left @ right)
    assert not value[0].any() and not value[2].any()


@pytest.mark.parametrize("dtype", ALL)
def test_a_tensor_is_written_into_its_own_slice(dtype: torch.dtype) -> None:
    gradient = ParamGradient([table(dtype)], "expert", [True])
    own = torch.randn(4, 6).to(dtype)
    gradient.add_tensor(2, own, is_part=False)
    value = gradient.finish_all()[0]
    assert torch.equal(value[2], own)
    assert not value[:2].any()


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("is_part", [True, False])
def test_a_second_product_is_added_to_the_first(is_part: bool, dtype: torch.dtype) -> None:
    gradient = ParamGradient([table(dtype)], "expert", [True])
    pairs = [factors(dtype=dtype) for _ in range(3)]
    for left, right in pairs:
        gradient.add_product(0, left, right, is_part=is_part)
    expected = sum(left.double() @ right.double() for left, right in pairs)
    assert isinstance(expected, Tensor)
    assert largest_error(gradient.finish_all()[0][0], expected) < (1e-6 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("is_part", [True, False])
def test_a_second_tensor_is_added_to_the_first(is_part: bool, dtype: torch.dtype) -> None:
    gradient = ParamGradient([table(dtype)], "expert", [True])
    for _ in range(3):
        gradient.add_tensor(0, torch.full((4, 6), 0.5, dtype=dtype), is_part=is_part)
    assert torch.equal(gradient.finish_all()[0][0], torch.full((4, 6), 1.5, dtype=dtype))


@pytest.mark.parametrize("dtype", LOW)
def test_a_split_expert_in_low_precision_is_summed_in_fp32(dtype: torch.dtype) -> None:
    gradient = ParamGradient([table(dtype)], "expert", [True])
    pairs = [factors(dtype=dtype) for _ in range(64)]
    rounded = torch.zeros(4, 6, dtype=dtype)
    for left, right in pairs:
        gradient.add_product(0, left, right, is_part=True)
        rounded += left @ right
    exact = torch.cat([left for left, _ in pairs], 1).double() @ torch.cat([right for _, right in pairs]).double()
    assert largest_error(gradient.finish_all()[0][0], exact) < largest_error(rounded, exact) / 2


@pytest.mark.parametrize("dtype", LOW)
def test_a_finished_expert_holds_no_staging(dtype: torch.dtype) -> None:
    gradient = ParamGradient([table(dtype)], "expert", [True])
    left, right = factors(dtype=dtype)
    gradient.add_product(1, left, right, is_part=True)
    gradient.finish(1)
    assert torch.equal(gradient.finish_all()[0][1], left @ right)
    assert gradient._staging == {}


def test_whole_experts_are_set_as_a_range() -> None:
    gradient = ParamGradient([table()], "expert", [True])
    own = torch.randn(2, 4, 6)
    gradient.add_range(1, own)
    value = gradient.finish_all()[0]
    assert torch.equal(value[1:], own)
    assert not value[0].any()


@pytest.mark.parametrize("dtype", ALL)
def test_a_shared_parameter_sums_over_all_experts(dtype: torch.dtype) -> None:
    gradient = ParamGradient([torch.empty(4, 6, dtype=dtype)], "shared", [True])
    left, right = factors(dtype=dtype)
    gradient.add_product(0, left, right, is_part=False)
    gradient.finish(0)
    gradient.add_product(2, left, right, is_part=True)
    gradient.add_tensor(1, left @ right, is_part=False)
    gradient.finish(2)
    assert largest_error(gradient.finish_all()[0], 3 * (left @ right)) < (1e-6 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("kind", ["expert", "shared"])
def test_a_parameter_that_no_row_reached_has_a_zero_gradient(kind: str) -> None:
    assert not ParamGradient([table()], kind, [True]).finish_all()[0].any()  # type: ignore[arg-type]  # a literal


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("is_part", [True, False])
def test_the_gradient_has_the_layout_of_its_parameter(is_part: bool, dtype: torch.dtype) -> None:
    transposed = torch.empty(3, 6, 4, dtype=dtype).transpose(1, 2)
    gradient = ParamGradient([transposed], "expert", [True])
    left, right = factors(dtype=dtype)
    gradient.add_product(0, left, right, is_part=is_part)
    gradient.add_tensor(1, left @ right, is_part=is_part)
    value = gradient.finish_all()[0]
    assert value.stride() == transposed.stride()
    assert torch.equal(value[0], left @ right)
    assert torch.equal(value[1], left @ right)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("is_part", [True, False])
@pytest.mark.parametrize("by", ["product", "tensor", "range"])
def test_what_is_there_is_added_to_where_it_is(by: str, is_part: bool, dtype: torch.dtype) -> None:
    there = torch.randn(3, 4, 6).to(dtype)
    before = there.clone()
    gradient = ParamGradient([table(dtype)], "expert", [True], onto=[there])
    left, right = factors(dtype=dtype)
    if by == "product":
        gradient.add_product(1, left, right, is_part=is_part)
    elif by == "tensor":
        gradient.add_tensor(1, left @ right, is_part=is_part)
    else:
        gradient.add_range(1, (left @ right)[None])
    gradient.finish(1)
    (value,) = gradient.finish_all()
    assert value is there
    assert torch.equal(there[0], before[0]) and torch.equal(there[2], before[2])
    exact = before[1].double() + left.double() @ right.double()
    assert largest_error(there[1], exact) < (1e-6 if dtype is torch.float32 else 1e-2)


def test_experts_with_gradients_and_without_stand_beside_each_other() -> None:
    own, there = [torch.empty(4, 6) for _ in range(3)], torch.randn(4, 6)
    before = there.clone()
    gradient = ParamGradient(own, "each", [True, True, False], onto=[None, there, None])
    left, right = factors()
    for expert in range(3):
        gradient.add_product(expert, left, right, is_part=False)
    made, added = gradient.finish_all()
    assert torch.equal(made, left @ right) and added is there
    assert largest_error(there, (before + left @ right).double()) < 1e-6
