"""Tiny MoE layers, captured graphs and hand-built expert functions for the unit tests.

Legend: T tokens, H hidden, E experts, K top-k, F expert width, N = T*K routed rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dataflow import Dataflow, node_value
from memfine_fx.passes.lower import region as lower
from memfine_fx.passes.lower.compiled_expert import CompiledExpertFunction, compiled_expert_for
from memfine_fx.passes.read.regions import read_regions
from memfine_fx.passes.tracing import TensorSpec
from memfine_fx.passes.verify.outline import outline
from memfine_fx.records import ExpertFunction, MoERegion, ParamKind, Refusal

HIDDEN = 8
WIDTH = 16
NUM_EXPERTS = 4

Activation = Callable[[Tensor], Tensor]


class TinyMoE(nn.Module):
    """Two projections per expert, top-k of a softmax router; tests override one step of it."""

    def __init__(self, activation: Activation = F.relu, *, top_k: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.activation = activation
        self.top_k = top_k
        self.gate = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False, dtype=dtype)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, WIDTH, dtype=dtype) / 3)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, HIDDEN, dtype=dtype) / 4)

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        weight, index = torch.softmax(self.gate(hidden), dim=-1).topk(self.top_k, dim=-1)
        return index, weight

    def experts(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, hidden: Tensor) -> Any:
        return self.experts(hidden, *self.route(hidden))


class GatheredMoE(TinyMoE):
    """Weights gathered per row, batched matmuls, rows in token order."""

    def rows(self, hidden: Tensor) -> Tensor:
        return hidden.repeat_interleave(self.top_k, dim=0)

    def experts(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        ids = index.reshape(-1)
        inner = self.activation(torch.bmm(self.rows(hidden).unsqueeze(1), self.up[ids]).squeeze(1))
        out = torch.bmm(inner.unsqueeze(1), self.down[ids]).squeeze(1)
        return (out * weight.reshape(-1, 1)).view(-1, self.top_k, HIDDEN).sum(dim=1)


class GroupedMoE(TinyMoE):
    """Rows sorted by expert, grouped matmuls; bfloat16 only, as torch demands of it under compile."""

    def __init__(self, activation: Activation = F.relu, *, top_k: int = 2) -> None:
        super().__init__(activation, top_k=top_k, dtype=torch.bfloat16)

    def offsets(self, ids: Tensor) -> Tensor:
        counts = torch.histc(ids.float(), bins=NUM_EXPERTS, min=0, max=NUM_EXPERTS - 1)
        return torch.cumsum(counts, dim=0, dtype=torch.int32)

    def experts(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        ids, order = index.reshape(-1).sort(stable=True)
        tokens = order // self.top_k
        offsets = self.offsets(ids)
        inner = self.activation(F.grouped_mm(hidden[tokens], self.up, offs=offsets))
        out = F.grouped_mm(inner, self.down, offs=offsets) * weight.reshape(-1)[order].unsqueeze(-1)
        return self.combine(hidden, tokens, out)

    def combine(self, hidden: Tensor, tokens: Tensor, out: Tensor) -> Tensor:
        return torch.zeros(hidden.shape[0], HIDDEN, dtype=hidden.dtype).index_add(0, tokens, out)


def capture(function: Callable[..., Any], *inputs: Tensor, dynamic: bool = True) -> fx.GraphModule:
    """The one torch-level graph that Dynamo captures of a call."""
    graphs: list[fx.GraphModule] = []

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(graph_module)
        return lambda *args: fx.Interpreter(graph_module).run(*args)

    torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    (graph_module,) = graphs
    return graph_module


def hidden_states(num_tokens: int = 13, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_tokens, HIDDEN, dtype=dtype)


def hidden_for(layer: TinyMoE, num_tokens: int = 13) -> Tensor:
    return hidden_states(num_tokens, layer.up.dtype)


def only_region(graph_module: fx.GraphModule) -> MoERegion:
    """The one region of a graph.

    Raises:
        CannotChunk: it is refused.
    """
    (found,) = read_regions(graph_module)
    if isinstance(found, Refusal):
        raise CannotChunk(found.reason, found.details, found.node)
    return found


def refusals_of(graph_module: fx.GraphModule) -> list[Refusal]:
    return [found for found in read_regions(graph_module) if isinstance(found, Refusal)]


def raised(layer: TinyMoE, *, num_tokens: int = 13, dynamic: bool = True) -> MoERegion:
    return only_region(capture(layer, hidden_for(layer, num_tokens), dynamic=dynamic))


def refusal_reason(layer: TinyMoE) -> str:
    """The reason why a layer's only region is refused; its graph must stay as it was."""
    graph_module = capture(layer, hidden_for(layer))
    before = graph_module.code, str(graph_module.graph)
    with pytest.raises(CannotChunk) as caught:
        only_region(graph_module)
    assert (graph_module.code, str(graph_module.graph)) == before
    return caught.value.details


def insert_identity(graph_module: fx.GraphModule, region: MoERegion, name: str) -> None:
    """Put the outlined region back in its own place, as a submodule: the control that must change nothing."""
    outlined, _ = outline(region.cut)
    exit_node = region.cut.exit
    graph_module.add_submodule(name, outlined)
    with graph_module.graph.inserting_before(exit_node):
        call = graph_module.graph.call_module(name, region.cut.inputs)
    call.meta["example_value"] = node_value(exit_node)
    lower._replace(Dataflow(graph_module.graph), region.cut, call)
    graph_module.graph.lint()
    graph_module.recompile()


def code_of(graph_module: fx.GraphModule) -> list[str]:
    """The statements of a graph's forward, without annotations and bookkeeping."""
    lines = [line.split(";")[0].strip() for line in graph_module.code.splitlines()]
    return [re.sub(r" : [\w.\[\], ]+(?= =)", "", line) for line in lines if line and not line.startswith("def ")]


def expert_function(function: Callable[..., Tensor], *, has_weight: bool, kinds: Sequence[ParamKind]) -> ExpertFunction:
    return ExpertFunction(fx.symbolic_trace(function), has_weight, tuple(kinds))


def specs_for(
    params: Sequence[Tensor],
    kinds: Sequence[ParamKind],
    *,
    has_weight: bool,
    hidden: int = HIDDEN,
    dtype: torch.dtype = torch.float32,
) -> tuple[TensorSpec, ...]:
    """Specs of an expert function's arguments, as the backend makes them."""
    cpu = torch.device("cpu")
    specs = [TensorSpec((hidden,), dtype, cpu, per_row=True)]
    if has_weight:
        specs.append(TensorSpec((), dtype, cpu, per_row=True))
    for param, kind in zip(params, kinds, strict=True):
        one = param[0] if kind == "expert" else param
        specs.append(TensorSpec(tuple(one.shape), one.dtype, cpu, stride=one.stride()))
    return tuple(specs)


def compiled_expert_of(
    function: Callable[..., Tensor],
    params: Sequence[Tensor],
    kinds: Sequence[ParamKind],
    *,
    has_weight: bool = True,
    folds_weight: bool = True,
    takes_group: bool = False,
    hidden: int = HIDDEN,
) -> CompiledExpertFunction:
    """Uncompiled bodies of a hand-written expert function on the given parameters."""
    return compiled_expert_for(
        expert_function(function, has_weight=has_weight, kinds=kinds),
        specs_for(params, kinds, has_weight=has_weight, hidden=hidden, dtype=params[0].dtype),
        folds_weight=folds_weight,
        takes_group=takes_group,
        inner="eager",
    )


def mlp(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One expert with its routing weight, as raising writes it."""
    return (torch.relu(rows @ up) @ down) * weight.unsqueeze(1)


def mlp_params(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [
        torch.randn(NUM_EXPERTS, HIDDEN, WIDTH).div(3).to(dtype),
        torch.randn(NUM_EXPERTS, WIDTH, HIDDEN).div(4).to(dtype),
    ]


def naive_combine(
    function: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor | None,
    index: Tensor,
    params: Sequence[Tensor],
    kinds: Sequence[ParamKind],
) -> Tensor:
    """[T,H]: assignment by assignment, in plain autograd; ids outside [0, E) are dropped."""
    num_experts = next(param.shape[0] for param, kind in zip(params, kinds, strict=True) if kind == "expert")
    out = [torch.zeros_like(token) for token in hidden]
    for token, choices in enumerate(index.tolist()):
        for choice, expert in enumerate(choices):
            if not 0 <= expert < num_experts:
                continue
            own = [param[expert] if kind == "expert" else param for param, kind in zip(params, kinds, strict=True)]
            lead = [hidden[token : token + 1]]
            if weight is not None:
                lead.append(weight[token, choice].reshape(1))
            out[token] = out[token] + function(*lead, *own)[0]
    return torch.stack(out) if out else hidden.new_zeros(0, hidden.shape[1]) + 0 * hidden.sum()


def largest_error(tensor: Tensor, reference: Tensor) -> float:
    """Largest absolute difference, relative to the reference's largest entry."""
    if not reference.numel():
        return 0.0
    tensor, reference = tensor.detach().double(), reference.detach().double()
    difference = (tensor - reference).abs().max()
    return float(difference / reference.abs().max().clamp_min(1e-6))
