"""Which expert functions are of a form that the GPU kernels know, and which only look like one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from memfine_fx.kernels.adapter_tables import AdapterForm
from memfine_fx.kernels.tables import KernelForm, Pointwise
from memfine_fx.records import ParamKind
from tests.helpers import HIDDEN, NUM_EXPERTS, WIDTH, compiled_expert_of

EXPERT: ParamKind = "expert"


def halves(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (rows @ gate_up.t()).chunk(2, dim=-1)
    return ((silu(gate) * up) @ down.t()) * weight.unsqueeze(1)


def halves_in_out(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (rows @ gate_up).split(WIDTH, dim=-1)
    return weight.unsqueeze(-1) * ((up * silu(gate)) @ down)


def apart(rows: Tensor, weight: Tensor, down: Tensor, up: Tensor, gate: Tensor) -> Tensor:
    return ((silu(rows @ gate.t()) * (rows @ up.t())) @ down.t()) * weight.unsqueeze(1)


def apart_in_out(rows: Tensor, weight: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return ((silu(rows @ gate) * (rows @ up)) @ down) * weight.unsqueeze(1)


FUSED, FUSED_IN_OUT = (2 * WIDTH, HIDDEN), (HIDDEN, 2 * WIDTH)
KNOWN = (
    (halves, [FUSED, (HIDDEN, WIDTH)], KernelForm("halves", (0, 1))),
    (halves_in_out, [FUSED_IN_OUT, (WIDTH, HIDDEN)], KernelForm("halves_in_out", (0, 1))),
    (apart, [(HIDDEN, WIDTH), (WIDTH, HIDDEN), (WIDTH, HIDDEN)], KernelForm("apart", (2, 1, 0))),
    (apart_in_out, [(HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)], KernelForm("apart_in_out", (0, 1, 2))),
)


def tables(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(NUM_EXPERTS, *shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("function", "shapes", "form"), KNOWN, ids=lambda value: getattr(value, "__name__", ""))
def test_swiglu_experts_are_known(
    function: Callable[..., Tensor], shapes: list[tuple[int, ...]], form: KernelForm, dtype: torch.dtype
) -> None:
    params = tables(shapes, dtype)
    assert compiled_expert_of(function, params, [EXPERT] * len(params)).kernel_form == form


def geglu(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    both = rows @ gate_up.t()
    return ((gelu(both[:, :WIDTH], approximate="tanh") * both[:, WIDTH:]) @ down.t()) * weight.unsqueeze(1)


def geglu_exact(rows: Tensor, weight: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (((rows @ up) * gelu(rows @ gate)) @ down) * weight.unsqueeze(1)


def gpt_oss(
    rows: Tensor, weight: Tensor, gate_up: Tensor, gate_up_bias: Tensor, down: Tensor, down_bias: Tensor
) -> Tensor:
    both = rows @ gate_up + gate_up_bias
    gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(min=-7.0, max=7.0)
    return (((up + 1) * (gate * torch.sigmoid(gate * 1.702))) @ down + down_bias) * weight.unsqueeze(1)


def relu_squared(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (torch.relu(rows @ up.t()).square() @ down.t()) * weight.unsqueeze(1)


def apart_with_biases(
    rows: Tensor, weight: Tensor, gate: Tensor, gate_bias: Tensor, up_bias: Tensor, up: Tensor, down: Tensor,
    down_bias: Tensor,
) -> Tensor:  # fmt: skip
    left, right = torch.addmm(gate_bias, rows, gate.t()), up_bias + rows @ up.t()
    return ((silu(left) * right) @ down.t() + down_bias) * weight.unsqueeze(1)


MORE = (
    (geglu, [FUSED, (HIDDEN, WIDTH)], KernelForm("halves", (0, 1), "geglu")),
    (geglu_exact, [(HIDDEN, WIDTH)] * 2 + [(WIDTH, HIDDEN)], KernelForm("apart_in_out", (0, 1, 2), "geglu_exact")),
    (
        gpt_oss,
        [FUSED_IN_OUT, (2 * WIDTH,), (WIDTH, HIDDEN), (HIDDEN,)],
        KernelForm("interleaved_in_out", (0, 2, 1, 3), "clamped", has_bias=True),
    ),
    (relu_squared, [(WIDTH, HIDDEN), (HIDDEN, WIDTH)], KernelForm("single", (0, 1), "relu2")),
    (
        apart_with_biases,
        [(WIDTH, HIDDEN), (WIDTH,), (WIDTH,), (WIDTH, HIDDEN), (HIDDEN, WIDTH), (HIDDEN,)],
        KernelForm("apart", (0, 3, 4, 1, 2, 5), has_bias=True),
    ),
)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("function", "shapes", "form"), MORE, ids=lambda value: getattr(value, "__name__", ""))
def test_other_activations_and_biases_are_known(
    function: Callable[..., Tensor], shapes: list[tuple[int, ...]], form: KernelForm, dtype: torch.dtype
) -> None:
    params = tables(shapes, dtype)
    assert compiled_expert_of(function, params, [EXPERT] * len(params)).kernel_form == form


def clamped_elsewhere(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    both = rows @ gate_up
    gate, up = both[:, ::2].clamp(max=5.0), both[:, 1::2].clamp(min=-7.0, max=7.0)
    return (((up + 1) * gate * torch.sigmoid(gate * 1.702)) @ down) * weight.unsqueeze(1)


def another_slope(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    both = rows @ gate_up
    gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(min=-7.0, max=7.0)
    return (((up + 1) * gate * torch.sigmoid(gate * 1.7)) @ down) * weight.unsqueeze(1)


def another_gate_in_the_sigmoid(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    both = rows @ gate_up
    gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(min=-7.0, max=7.0)
    return (((up + 1) * gate * torch.sigmoid(up * 1.702)) @ down) * weight.unsqueeze(1)


def relu_cubed(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return ((torch.relu(rows @ gate_up[:, :WIDTH]) ** 3) @ down) * weight.unsqueeze(1)


def half_of_the_columns(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return (torch.relu((rows @ gate_up)[:, :WIDTH]).square() @ down) * weight.unsqueeze(1)


def columns_swapped(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    both = rows @ gate_up
    return ((silu(both[:, 1::2]) * both[:, ::2]) @ down) * weight.unsqueeze(1)


def unlike_halves(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    both = rows @ gate_up
    return ((silu(both[:, 1 : WIDTH + 1]) * both[:, WIDTH:]) @ down) * weight.unsqueeze(1)


IN_OUT_OTHERS = (relu_cubed, half_of_the_columns, unlike_halves)
IN_OUT_WRITTEN = (clamped_elsewhere, another_slope, another_gate_in_the_sigmoid, columns_swapped)


@pytest.mark.parametrize("function", IN_OUT_WRITTEN, ids=lambda function: function.__name__)
def test_what_only_looks_like_another_activation_is_written(function: Callable[..., Tensor]) -> None:
    form = compiled_expert_of(function, tables([FUSED_IN_OUT, (WIDTH, HIDDEN)]), [EXPERT, EXPERT]).kernel_form
    assert form is not None and isinstance(form.activation, Pointwise)
    assert (form.layout, form.positions, form.has_up) == ("interleaved_in_out", (0, 1), True)


@pytest.mark.parametrize("function", IN_OUT_OTHERS, ids=lambda function: function.__name__)
def test_what_only_looks_like_another_activation_keeps_its_bodies(function: Callable[..., Tensor]) -> None:
    params = tables([FUSED_IN_OUT, (WIDTH, HIDDEN)])
    assert compiled_expert_of(function, params, [EXPERT, EXPERT]).kernel_form is None


def test_one_bias_of_two_keeps_its_bodies() -> None:
    def half_biased(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
        gate, up = (rows @ gate_up.t() + bias).chunk(2, dim=-1)
        return ((silu(gate) * up) @ down.t()) * weight.unsqueeze(1)

    params = tables([FUSED, (HIDDEN, WIDTH), (2 * WIDTH,)])
    assert compiled_expert_of(half_biased, params, [EXPERT] * 3).kernel_form is None


def test_experts_of_another_width_behind_keep_their_bodies() -> None:
    params = tables([FUSED, (HIDDEN + 2, WIDTH)])
    assert compiled_expert_of(halves, params, [EXPERT, EXPERT]).kernel_form is None


def test_experts_over_several_are_known_by_the_one() -> None:
    params = tables([FUSED, (HIDDEN, WIDTH)], torch.bfloat16)
    assert compiled_expert_of(halves, params, [EXPERT, EXPERT], takes_group=True).kernel_form == KernelForm(
        "halves", (0, 1)
    )


def test_experts_without_a_routing_weight_are_known() -> None:
    def unweighted(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (rows @ gate_up.t()).chunk(2, dim=-1)
        return (silu(gate) * up) @ down.t()

    params = tables([FUSED, (HIDDEN, WIDTH)])
    assert compiled_expert_of(unweighted, params, [EXPERT, EXPERT], has_weight=False).kernel_form == KernelForm(
        "halves", (0, 1)
    )


def relu(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (rows @ gate_up.t()).chunk(2, dim=-1)
    return ((torch.relu(gate) * up) @ down.t()) * weight.unsqueeze(1)


def up_before_gate(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    up, gate = (rows @ gate_up.t()).chunk(2, dim=-1)
    return ((silu(gate) * up) @ down.t()) * weight.unsqueeze(1)


def gate_twice(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, _ = (rows @ gate_up.t()).chunk(2, dim=-1)
    return ((silu(gate) * gate) @ down.t()) * weight.unsqueeze(1)


def weight_on_rows(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = ((rows * weight.unsqueeze(1)) @ gate_up.t()).chunk(2, dim=-1)
    return (silu(gate) * up) @ down.t()


def weight_squared(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return halves(rows, weight, gate_up, down) * weight.unsqueeze(1)


def scaled(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return 2 * halves(rows, weight, gate_up, down)


def scaled_rows(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return halves(rows * 2, weight, gate_up, down)


def mixed(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (rows @ gate_up.t()).chunk(2, dim=-1)
    return ((silu(gate) * up) @ down) * weight.unsqueeze(1)


def doubled_table(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return halves(rows, weight, gate_up * 2, down)


@pytest.mark.parametrize("function", (relu, up_before_gate), ids=lambda function: function.__name__)
def test_what_only_looks_like_it_is_written(function: Callable[..., Tensor]) -> None:
    form = compiled_expert_of(function, tables([FUSED, (HIDDEN, WIDTH)]), [EXPERT, EXPERT]).kernel_form
    assert form is not None and isinstance(form.activation, Pointwise)
    assert (form.layout, form.positions, form.has_up) == ("halves", (0, 1), True)


OTHERS = (gate_twice, weight_on_rows, weight_squared, scaled, scaled_rows, mixed, doubled_table)


@pytest.mark.parametrize("function", OTHERS, ids=lambda function: function.__name__)
def test_what_only_looks_like_it_keeps_its_bodies(function: Callable[..., Tensor]) -> None:
    params = tables([FUSED, (WIDTH, HIDDEN) if function is mixed else (HIDDEN, WIDTH)])
    assert compiled_expert_of(function, params, [EXPERT, EXPERT]).kernel_form is None


RANK = 1


def low_rank(rows: Tensor, first: Tensor, second: Tensor, *scales: float) -> Tensor:
    narrow = rows @ first.t()
    for scale in scales:
        narrow = narrow * scale
    return narrow @ second.t()


def adapted(rows: Tensor, weight: Tensor, a: Tensor, b: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (low_rank(rows, a, b, 0.5, 3) + rows @ gate_up.t()).chunk(2, dim=-1)
    return ((silu(gate) * up) @ down.t()) * weight.unsqueeze(1)


def adapted_down(rows: Tensor, gate_up: Tensor, down: Tensor, b: Tensor, a: Tensor) -> Tensor:
    gate, up = (rows @ gate_up).chunk(2, dim=-1)
    activated = silu(gate) * up
    return activated @ down + (activated @ a) @ b * 2.0


def adapted_gate(rows: Tensor, weight: Tensor, a: Tensor, b: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return ((silu(rows @ gate.t() + low_rank(rows, a, b)) * (rows @ up.t())) @ down.t()) * weight.unsqueeze(1)


def adapted_twice(rows: Tensor, weight: Tensor, a: Tensor, b: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (low_rank(rows, a, b) + rows @ gate_up.t() + low_rank(rows, a, b)).chunk(2, dim=-1)
    return ((silu(gate) * up) @ down.t()) * weight.unsqueeze(1)


def adapted_from_elsewhere(rows: Tensor, weight: Tensor, a: Tensor, b: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (low_rank(rows * 2, a, b) + rows @ gate_up.t()).chunk(2, dim=-1)
    return ((silu(gate) * up) @ down.t()) * weight.unsqueeze(1)


A, B = (RANK, HIDDEN), (2 * WIDTH, RANK)


def test_adapters_are_known() -> None:
    params = tables([A, B, FUSED, (HIDDEN, WIDTH)])
    form = KernelForm("halves", (2, 3, 0, 1), adapters=(AdapterForm(RANK, 1.5), None))
    assert compiled_expert_of(adapted, params, [EXPERT] * 4).kernel_form == form
    params = tables([FUSED_IN_OUT, (WIDTH, HIDDEN), (RANK, HIDDEN), (WIDTH, RANK)])
    turned = AdapterForm(RANK, 2.0, is_first_out_in=False, is_second_out_in=False)
    form = KernelForm("halves_in_out", (0, 1, 3, 2), adapters=(None, turned))
    assert compiled_expert_of(adapted_down, params, [EXPERT] * 4, has_weight=False).kernel_form == form


@pytest.mark.parametrize(
    ("function", "shapes"),
    (
        (adapted_gate, [A, (WIDTH, RANK), (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]),
        (adapted_twice, [A, B, FUSED, (HIDDEN, WIDTH)]),
        (adapted_from_elsewhere, [A, B, FUSED, (HIDDEN, WIDTH)]),
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_sums_with_low_rank_terms_keep_their_bodies(
    function: Callable[..., Tensor], shapes: list[tuple[int, ...]]
) -> None:
    params = tables(shapes)
    assert compiled_expert_of(function, params, [EXPERT] * len(params)).kernel_form is None


def test_lists_of_experts_are_known() -> None:
    params = tables([(HIDDEN, WIDTH), (WIDTH, HIDDEN), (WIDTH, HIDDEN)])
    matrices = [table[0] for table in params]
    form = KernelForm("apart", (2, 1, 0), is_list=True)
    assert compiled_expert_of(apart, matrices, ["each"] * 3).kernel_form == form
    assert compiled_expert_of(apart, [*matrices[:2], params[2]], ["each", "each", EXPERT]).kernel_form is None


def test_tables_that_all_experts_share_keep_their_bodies() -> None:
    gate_up, down = tables([FUSED, (HIDDEN, WIDTH)])
    assert compiled_expert_of(halves, [gate_up, down[0]], [EXPERT, "shared"]).kernel_form is None


def test_a_table_that_is_taken_twice_keeps_its_bodies() -> None:
    def tied(rows: Tensor, weight: Tensor, gate: Tensor, down: Tensor) -> Tensor:
        return ((silu(rows @ gate.t()) * (rows @ gate.t())) @ down.t()) * weight.unsqueeze(1)

    params = tables([(WIDTH, HIDDEN), (HIDDEN, WIDTH)])
    assert compiled_expert_of(tied, params, [EXPERT, EXPERT]).kernel_form is None
