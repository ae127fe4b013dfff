"""Lists of experts: tables of which each expert's matrix is a tensor of its own, and so is its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.cases import (
    DEVICE,
    FORMS,
    PATTERNS,
    Sizes,
    eager_layer,
    expert_index,
    in_kernels,
    parameters,
    relative_error,
    small_tiles,
)

pytestmark = in_kernels


def check(
    pattern: str, rows: int, layout: Any = "apart", activation: Any = "swiglu", *, adds: bool = False, **options: bool
) -> None:
    """Output and gradients against the layer whose tables hold the lists."""
    from memfine_fx.kernels.layer import LayerOptions, run_backward, run_forward
    from memfine_fx.kernels.sorting import reference_sort
    from memfine_fx.kernels.tables import ListTable

    sizes = Sizes(tokens=7)
    params = parameters(layout, sizes)
    lists = [[matrix.detach().clone() for matrix in param] for param in params]
    tables = [ListTable.of(one) for one in lists]
    hidden = torch.randn(sizes.tokens, sizes.hidden, device=DEVICE, requires_grad=True)
    index = expert_index(pattern, sizes)
    weight = torch.rand(sizes.tokens, sizes.top_k, device=DEVICE, requires_grad=True)
    chosen = LayerOptions(rows, layout=layout, activation=activation, tiles=small_tiles(), **options)
    routing, flat = reference_sort(index, sizes.experts), weight.detach().reshape(-1)
    onto: Any = [[torch.ones_like(matrix) for matrix in one] for one in lists] if adds else []
    with torch.no_grad():
        out, saved = run_forward(hidden, flat, routing, tables, chosen)
        grad, wanted = torch.randn_like(out), [True] * (2 + len(tables))
        found = run_backward(grad, hidden, flat, routing, tables, saved, chosen, wanted, onto)
    expected = eager_layer(hidden, index, weight, params, layout, activation)
    leaves = [hidden, weight, *params]
    of_hidden, of_weight, *of_params = torch.autograd.grad(
        expected, leaves, grad.double(), materialize_grads=True, allow_unused=True
    )
    assert found.hidden is not None and found.weight is not None
    pairs = [(out, expected), (found.hidden, of_hidden), (found.weight.view_as(of_weight), of_weight)]
    for gradient, reference, there in zip(found.params, of_params, onto or [None] * len(lists), strict=True):
        assert isinstance(gradient, list)
        assert there is None or all(one is before for one, before in zip(gradient, there, strict=True))
        pairs.append((torch.stack(gradient), reference + adds))
    assert all(relative_error(one, other) < 1e-5 for one, other in pairs)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_layer_of_lists_is_the_layer(pattern: str) -> None:
    check(pattern, 5)


@pytest.mark.parametrize(
    ("activation", "layout"), [form for form in FORMS if form[0] in ("swiglu", "clamped", "relu2")]
)
def test_layouts(activation: str, layout: str) -> None:
    """Gate and up in one matrix of an expert stand so many entries behind its address."""
    check("random", 9, layout, activation)


@pytest.mark.parametrize("saves_products", (False, True))
def test_gradients_that_are_there_are_added_to(saves_products: bool) -> None:
    check("dropped", 5, adds=True, saves_products=saves_products, is_deterministic=True)


def test_lists_of_unlike_matrices_are_refused() -> None:
    from memfine_fx.kernels.tables import ListTable

    for other in (torch.zeros(3, 4), torch.zeros(4, 3, dtype=torch.float64), torch.zeros(3, 4).t(), torch.zeros(4)):
        with pytest.raises(ValueError, match="matrices of one shape, dtype and strides"):
            ListTable.of([torch.zeros(4, 3), other])


def test_what_is_read_of_lists_is_not_counted() -> None:
    from memfine_fx.kernels.counting import accesses_of
    from memfine_fx.kernels.launches import recording
    from memfine_fx.kernels.traffic import Load

    with recording() as launches:
        a_step()
    gate_up = next(one for one in launches if one.name == "gate_up_kernel")
    with pytest.raises(ValueError, match="reads of a list of experts is not counted"):
        accesses_of(gate_up, Load((1,), 1))


def a_step() -> None:
    from memfine_fx.kernels.layer import LayerOptions, run_forward
    from memfine_fx.kernels.sorting import reference_sort
    from memfine_fx.kernels.tables import ListTable

    sizes = Sizes()
    tables = [ListTable.of(list(param.detach())) for param in parameters("apart", sizes)]
    routing = reference_sort(expert_index("random", sizes), sizes.experts)
    hidden = torch.randn(sizes.tokens, sizes.hidden, device=DEVICE)
    run_forward(hidden, None, routing, tables, LayerOptions(8, layout="apart", tiles=small_tiles()))
