"""What is copied of a graph from Dynamo, and what Inductor lacks on a machine without a C++ compiler."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx
from torch._inductor import config, sizevars
from torch._inductor.codegen import cpp
from torch._inductor.cpp_builder import cpp_compiler_search
from torch._inductor.utils import fresh_cache

import memfine_fx
from memfine_fx.compat import inductor
from memfine_fx.compat.functorch import compile_on_aot_autograd, min_cut_partition
from memfine_fx.compat.inductor import _remembering_indices, captured_copy, compile_on_inductor
from memfine_fx.errors import MissingCompiler
from memfine_fx.models.mixtral import MixtralConfig, MixtralMoE


def known_parameters(copied: Callable[[fx.GraphModule], fx.GraphModule]) -> int:
    """Inputs that the partitioner takes for parameters, of a copy in the place of the graph that Dynamo gave."""
    counts: list[int] = []

    def partition(gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        counts.append(len(options["static_lifetime_input_indices"]))
        return min_cut_partition(gm, joint_inputs, **options)

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        return compile_on_aot_autograd(copied(graph_module), list(inputs), partition, lambda backward: backward)

    torch._dynamo.reset()
    model = torch.nn.Linear(8, 8)
    torch.compile(model, backend=backend)(torch.randn(4, 8)).sum().backward()
    return counts[0]


def test_a_copy_knows_which_inputs_are_parameters() -> None:
    """Else the partitioner saves their transposed views, which are then counted as results."""
    assert known_parameters(captured_copy) == 2
    assert known_parameters(copy.deepcopy) == 0, "a plain copy would do"


def test_as_many_index_expressions_as_a_deep_model_has_are_worked_out_once() -> None:
    variable = sympy.Symbol("d0", integer=True)
    before = sizevars.stride_at_vec_range
    with _remembering_indices():
        assert cpp.stride_at_vec_range is sizevars.stride_at_vec_range is not before
        for _ in range(2):
            strides = [sizevars.stride_at_vec_range(number * variable, variable, 16) for number in range(2000, 2300)]
        cached: Any = sizevars.stride_at_vec_range
        assert strides == list(range(2000, 2300)) and cached.cache_info().hits >= 300
    assert cpp.stride_at_vec_range is sizevars.stride_at_vec_range is before
    with _remembering_indices():
        assert sizevars.stride_at_vec_range is cached, "answers outlive one compilation"


@torch.library.custom_op("memfine_tests::plus_sum", mutates_args=())
def _plus_sum(x: Tensor, y: Tensor) -> Tensor:
    """An operator that Inductor fuses with nothing."""
    return x + y.sum()


@_plus_sum.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


def _scattered_gradient(tangents: Tensor, scores: Tensor, share: Tensor, x: Tensor) -> Tensor:
    """A router's weight gradient [3,H] from its scores [T,3]: that of top-k, plus that of a balancing loss."""
    weights, ids = scores.topk(3)
    d_weights = _plus_sum(weights, tangents)
    zeros = torch.zeros_like(scores)
    centered = scores - scores.amax(-1, True)
    d_scores = torch.select_scatter(zeros, share.expand(len(scores)), 1, 0)
    for place, d_share in ((1, share), (2, tangents.sum())):
        d_softmax = torch.select_scatter(zeros, d_share.expand(len(scores)), 1, place) * centered
        d_scores = torch.addcmul(d_softmax, centered, d_softmax.sum(-1, True)) + d_scores
    return (d_scores + torch.scatter(zeros, -1, ids, d_weights)).t() @ x


@pytest.mark.slow
@pytest.mark.skipif(
    torch.__version__ >= "2.14", reason="torch without https://github.com/pytorch/pytorch/issues/185509"
)
def test_a_kernel_that_reads_a_scatter_runs_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [torch.randn(shape, dtype=torch.float64) for shape in ((6, 8), (6, 3), (), (6, 8))]
    expected = _scattered_gradient(*arguments)

    def computed() -> Tensor:
        torch._dynamo.reset()
        with fresh_cache(), torch.no_grad():
            return torch.compile(_scattered_gradient, backend=compile_on_inductor, dynamic=False)(*arguments)

    torch.testing.assert_close(computed(), expected)
    monkeypatch.setattr(inductor, "_renaming_mutations", contextlib.nullcontext)
    assert not torch.allclose(computed(), expected), "torch alone would do"


@pytest.fixture
def _no_compiler() -> Iterator[None]:
    """A machine on which Inductor finds no C++ compiler, and nothing that was compiled before."""
    cpp_compiler_search.cache_clear()
    with fresh_cache(), config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        yield
    cpp_compiler_search.cache_clear()


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("kind", ["with regions", "without regions", "by torch.compile"])
@pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")
def test_without_a_compiler_one_error_says_what_to_install(kind: str) -> None:
    layer: torch.nn.Module = MixtralMoE(
        MixtralConfig(hidden=32, expert_width=24, num_experts=4, top_k=2, spelling="gathered")
    )
    if kind == "without regions":
        layer = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU())
    model: Any = torch.compile(layer, backend="memfine") if kind == "by torch.compile" else memfine_fx.optimize(layer)
    for _ in range(2):
        with pytest.raises(MissingCompiler) as caught:
            model(torch.randn(11, 32))
    said = str(caught.value)
    assert "no-such-compiler" in said and "Install g++" in said and 'inner_backend="aot_eager"' in said
    cause = caught.value.__cause__
    assert type(cause).__name__ == "InvalidCxxCompiler"
    assert cause.__traceback__ is None, "the user would see torch's own frames first"


@pytest.mark.usefixtures("_no_compiler")
def test_aot_eager_needs_no_compiler() -> None:
    model = MixtralMoE(MixtralConfig(hidden=32, expert_width=24, num_experts=4, top_k=2, spelling="gathered"))
    hidden = torch.randn(11, 32)
    chunked = memfine_fx.optimize(copy.deepcopy(model), inner_backend="aot_eager")
    torch.testing.assert_close(chunked(hidden), model(hidden))
    assert memfine_fx.report(chunked).num_chunked == 1
