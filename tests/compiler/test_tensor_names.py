"""Reports name tensors by module and operator, never by what a graph or Inductor's code calls them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import fx

import memfine_fx
from memfine_fx.compiler.tensor_names import with_labels
from memfine_fx.memory.wrapper_code import read_wrapper
from memfine_fx.models import MixtralConfig, MixtralMoE

WRAPPER = """
class Runner:
    def call(self, args):
        primals_1, primals_2 = args
        buf0 = empty_strided_cpu((2, 8), (8, 1), torch.float32)
        cpp_fused_add_log_softmax_mul_0(primals_1, buf0)
        buf1 = empty_strided_cpu((2, 8), (8, 1), torch.float32)
        # Topologically Sorted Source Nodes: [hidden, linear_1], Original ATen: [aten.t, aten.mm]
        extern_kernels.mm(buf0, primals_2, out=buf1)
        del buf0
        buf2 = empty_strided_cpu((2, 8), (8, 1), torch.float32)
        unknown(buf2)
        return (buf1, buf2)
"""
BUFFER = re.compile(r"\b(buf\d+|arg\d+_1|getitem|mm_\d+|primals_\d+|tangents_\d+)\b")


def graph() -> fx.Graph:
    made = fx.Graph()
    left, right = made.placeholder("primals_1"), made.placeholder("primals_2")
    product = made.call_function(torch.ops.aten.mm.default, (left, right))
    loss = made.call_function(torch.ops.aten.log_softmax.int, (product, -1))
    made.output((product, loss))
    product.meta["nn_module_stack"] = {"proj": ("L['self'].layers.3.self_attn.q_proj", torch.nn.Linear)}
    product.meta["source_fn_stack"] = [("linear_1", torch.nn.Linear)]
    for node in made.nodes:
        if node.op != "output":
            node.meta["val"] = torch.empty(2, 8)
    return made


def test_buffers_are_named_by_the_last_node_of_their_kernel() -> None:
    memory = read_wrapper(WRAPPER, graph())
    assert memory is not None
    assert [allocation.label for allocation in with_labels(memory, graph()).allocations] == [
        "before layers.3.self_attn.q_proj: add, log_softmax, mul",
        "layers.3.self_attn.q_proj: linear",
        "a tensor of the compiled code",
    ]


def test_labels_are_no_part_of_what_two_layers_have_in_common() -> None:
    memory = read_wrapper(WRAPPER, graph())
    assert memory is not None and with_labels(memory, graph()) == memory


@pytest.mark.parametrize("budget", [None, "64MiB"])
def test_a_report_names_modules(budget: str | None) -> None:
    layers = [MixtralMoE(MixtralConfig(16, 24, 4, 2, spelling="gathered")) for _ in range(2)]
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), *layers)
    optimized = memfine_fx.optimize(model, inner_backend="aot_eager", memory_budget=budget)
    optimized(torch.randn(40, 16)).square().sum().backward()
    report = memfine_fx.report(optimized)
    assert report.step is not None
    names = [name for name, _ in report.step.peak.terms]
    assert any(name.startswith("1") or "layers" in name for name in names), names
    for text in (str(report), report.to_json(), report._repr_html_()):
        assert BUFFER.search(text) is None, BUFFER.search(text)


def test_a_budget_that_cannot_be_met_names_modules() -> None:
    model = torch.nn.Sequential(MixtralMoE(MixtralConfig(16, 24, 4, 2, spelling="gathered")))
    optimized = memfine_fx.optimize(model, inner_backend="aot_eager", memory_budget=1000)
    with pytest.raises(memfine_fx.BudgetInfeasible) as refused:
        optimized(torch.randn(40, 16)).square().sum().backward()
    assert BUFFER.search(str(refused.value)) is None
