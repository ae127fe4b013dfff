"""Tables of experts that are computed from parameters: each expert's is made when it runs, or all of them are ahead.

Legend: T tokens, H hidden, E experts, K top-k, F expert width, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfine_fx
from memfine_fx.memory.machine import cpu_features
from memfine_fx.memory.measure import trace_memory
from memfine_fx.passes.lower import compiled_expert
from tests.integration.comparison import (
    BF16_FACTOR,
    assert_no_worse_than_eager,
    assert_same_step,
    optimized_copy,
    relative_error,
    run_step,
)

E, K, H, WIDTH, R, T = 16, 2, 48, 64, 2, 40
aten = torch.ops.aten
TABLE_BYTES = 4 * E * WIDTH * H

Delta = Callable[["Adapted"], Tensor]


class Adapted(nn.Module):
    """Routed rows by a table [E,F,H] that is computed from `base` [E,F,H], A and B, as `table_of` writes it."""

    def __init__(self, table_of: Callable[[Adapted], Tensor], *, is_frozen: bool = True) -> None:
        super().__init__()
        self.table_of = table_of
        self.gate = nn.Linear(H, E, bias=False)
        self.base = nn.Parameter(torch.randn(E, WIDTH, H) / 7, requires_grad=not is_frozen)
        self.down = nn.Parameter(torch.randn(E, H, WIDTH) / 8, requires_grad=not is_frozen)
        self.a, self.b = nn.Parameter(torch.randn(E * R, H) / 7), nn.Parameter(torch.randn(WIDTH, R * E))
        self.b_first = nn.Parameter(torch.randn(E, WIDTH, R))
        self.shared_a, self.shared_b = nn.Parameter(torch.randn(R, H) / 7), nn.Parameter(torch.randn(WIDTH, R))
        self.magnitude = nn.Parameter(torch.rand(E, WIDTH, 1) + 1)

    def forward(self, hidden: Tensor) -> Tensor:
        weight, index = self.gate(hidden).softmax(-1).topk(K)
        ids, rows = index.reshape(-1), hidden.repeat_interleave(K, dim=0)
        table = self.table_of(self)
        inner = torch.bmm(table[ids], rows.unsqueeze(-1))
        rows = torch.bmm(self.down[ids], F.silu(inner)).squeeze(-1) * weight.reshape(-1, 1)
        return rows.view(-1, K, H).sum(1)


def as_peft_writes_it(layer: Adapted) -> Tensor:
    a, b = layer.a.reshape(E, -1, H), layer.b.reshape(WIDTH, -1, E)
    return layer.base + torch.einsum("o r e, e r i -> e o i", b, a) * 0.5


def as_a_batched_product(layer: Adapted) -> Tensor:
    return layer.base + 2 * (layer.b_first @ layer.a.view(E, R, H))


def two_adapters(layer: Adapted) -> Tensor:
    return as_peft_writes_it(layer) + as_a_batched_product(layer) - layer.base


def shared_a(layer: Adapted) -> Tensor:
    return layer.base + torch.einsum("eor,ri->eoi", layer.b_first, layer.shared_a)


def shared_b(layer: Adapted) -> Tensor:
    return layer.base + torch.einsum("or,eri->eoi", layer.shared_b, layer.a.view(E, R, H))


def turned(layer: Adapted) -> Tensor:
    """Made as [E,H,F] and turned."""
    delta = torch.einsum("ero,eir->eoi", layer.a.view(E, R, H), layer.b_first).transpose(1, 2)
    return (layer.base.transpose(1, 2) + delta.transpose(1, 2)).transpose(1, 2)


def with_magnitude(layer: Adapted) -> Tensor:
    table = as_peft_writes_it(layer)
    return layer.magnitude * table / table.norm(dim=-1, keepdim=True)


def with_detached_norm(layer: Adapted) -> Tensor:
    table = as_peft_writes_it(layer)
    return layer.magnitude * table / table.norm(dim=-1, keepdim=True).detach()


def with_detached_delta(layer: Adapted) -> Tensor:
    """The norm of DoRA (arXiv 2402.09353) as PEFT computes it: nothing in it gets a gradient, all else does."""
    table = as_peft_writes_it(layer)
    norm = (layer.base + (table - layer.base).detach()).norm(dim=-1, keepdim=True).detach()
    return layer.magnitude / norm * table


LOCAL = [
    as_peft_writes_it, as_a_batched_product, two_adapters, shared_a, shared_b, turned, with_magnitude,
    with_detached_norm, with_detached_delta,
]  # fmt: skip


FEW = [as_peft_writes_it, shared_a, turned, with_detached_delta]


@pytest.mark.parametrize(("table_of", "is_frozen"), [*((one, True) for one in LOCAL), *((one, False) for one in FEW)])
def test_a_table_is_made_one_expert_at_a_time(table_of: Callable[[Adapted], Tensor], is_frozen: bool) -> None:
    layer = Adapted(table_of, is_frozen=is_frozen)
    hidden = torch.randn(T, H)
    optimized = optimized_copy(layer, rows_per_chunk=8)
    assert_same_step(optimized, layer, {"hidden": hidden})
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked" and not region.why_expanded
    if is_frozen:
        optimized(hidden).sum().backward()  # compiles for tokens without gradients
        trace = trace_memory(lambda: optimized(hidden).sum().backward(), torch.device("cpu"))
        assert not trace.has_allocation_of(TABLE_BYTES // 8)


class UnderAutocast(nn.Module):
    """As trainers with `bf16=True` run a model."""

    def __init__(self, layer: Adapted) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = self.layer(hidden)
            return out


@pytest.mark.parametrize("table_of", [*FEW, with_magnitude])
def test_a_table_is_made_one_expert_at_a_time_under_autocast(table_of: Callable[[Adapted], Tensor]) -> None:
    layer = UnderAutocast(Adapted(table_of))
    hidden = torch.randn(T, H)
    optimized = optimized_copy(layer, rows_per_chunk=8)
    truth = run_step(layer.layer, {"hidden": hidden})
    ours, theirs = (run_step(model, {"hidden": hidden}) for model in (optimized, layer))
    for name, expected in truth.tensors.items():
        key = name.replace("d ", "d layer.") if name.startswith("d ") and name != "d hidden" else name
        error, of_eager = (relative_error(step.tensors[key], expected) for step in (ours, theirs))
        assert error <= BF16_FACTOR * of_eager + 1e-5, name
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked" and not region.why_expanded
    optimized(hidden).sum().backward()  # compiles for tokens without gradients
    trace = trace_memory(lambda: optimized(hidden).sum().backward(), torch.device("cpu"))
    # In bf16 the table would be half of its bytes; kernels of AMX tiles take up to a quarter of that themselves.
    assert not trace.has_allocation_of(TABLE_BYTES // (2 if cpu_features().packs_bf16 else 8))


def mixed_over_experts(layer: Adapted) -> Tensor:
    return torch.einsum("de,eoi->doi", torch.eye(E) * 0.5 + 0.1, layer.base) + as_peft_writes_it(layer)


def with_data_of_a_norm(layer: Adapted) -> Tensor:
    """What `.data` gives cannot be told from what it was taken of."""
    table = as_peft_writes_it(layer)
    return layer.magnitude * table / table.norm(dim=-1, keepdim=True).data


class Regularized(Adapted):
    """What is added to the table is read by something else as well."""

    def forward(self, hidden: Tensor) -> Tensor:
        delta = as_peft_writes_it(self)
        self.table_of = lambda layer: delta
        return super().forward(hidden) + delta.pow(2).mean()


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda: Adapted(mixed_over_experts), "einsum de,eoi->doi"),
        (lambda: Adapted(with_data_of_a_norm), "stops gradients"),
        (lambda: Regularized(as_peft_writes_it), "also used outside the region"),
    ],
    ids=["mixed", "data", "read outside"],
)
def test_a_table_that_cannot_be_is_made_whole_and_the_report_says_why(layer: Callable[[], Adapted], why: str) -> None:
    model = layer()
    optimized = optimized_copy(model, rows_per_chunk=8)
    assert_same_step(optimized, model, {"hidden": torch.randn(T, H)})
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked"
    assert why in region.why_expanded and "computed whole" in str(region)


def in_fp32(layer: Adapted) -> Tensor:
    """Adapters in fp32 on a base in bf16, as PEFT keeps them."""
    a, b = layer.a.float().reshape(E, -1, H), layer.b.float().reshape(WIDTH, -1, E)
    return layer.base + (torch.einsum("o r e, e r i -> e o i", b, a) * 0.5).to(layer.base.dtype)


def test_bf16_is_no_further_from_fp32_than_the_sum_in_bf16() -> None:
    reference = Adapted(in_fp32)
    layer = Adapted(in_fp32)
    layer.load_state_dict(reference.state_dict())
    layer.to(torch.bfloat16)
    reference.load_state_dict(layer.state_dict())
    hidden = torch.randn(T, H).bfloat16()
    optimized = optimized_copy(layer, rows_per_chunk=8)
    assert_no_worse_than_eager(optimized, layer, reference, {"hidden": hidden})
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked" and not region.why_expanded


def test_a_low_rank_product_never_makes_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither forward nor backward has a matrix [F,H] beside the base: gradients of A and B come from r columns."""
    built: list[Any] = []
    init = compiled_expert.CompiledExpertFunction.__init__
    monkeypatch.setattr(compiled_expert, "_cache", {})
    monkeypatch.setattr(
        compiled_expert.CompiledExpertFunction,
        "__init__",
        lambda self, *args: (built.append(self), init(self, *args))[1],
    )
    optimized = optimized_copy(Adapted(as_peft_writes_it), rows_per_chunk=8)
    optimized(torch.randn(T, H)).sum().backward()
    (body,) = {id(one): one for one in built}.values()
    wanted = (True, True, *(param != 0 for param in range(len(body.param_kinds))))
    graphs = [body.forward().graph_module, body.backward(wanted).call.graph_module]
    made = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    whole = [node for node in made if tuple(getattr(node.meta.get("val"), "shape", ())) in ((WIDTH, H), (H, WIDTH))]
    assert {node.target for node in whole} <= {aten.t.default, aten.permute.default, aten.transpose.int}, whole
