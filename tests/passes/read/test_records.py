"""From a graph to the record of its experts, or a refusal that names why; the graph stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfine_fx
from memfine_fx import Config
from memfine_fx.errors import CannotChunk
from memfine_fx.models import DeepseekConfig, DeepseekMoE
from memfine_fx.passes.ops import target_name
from memfine_fx.records import RegionDims, Where
from tests.helpers import (
    HIDDEN,
    NUM_EXPERTS,
    WIDTH,
    GatheredMoE,
    GroupedMoE,
    TinyMoE,
    capture,
    code_of,
    hidden_states,
    only_region,
    raised,
    refusal_reason,
)
from tests.integration.comparison import assert_same_step


@pytest.mark.parametrize(("make", "family"), [(GatheredMoE, "gathered"), (GroupedMoE, "grouped")])
def test_both_spellings_raise_to_the_same_expert_function(make: Callable[[], TinyMoE], family: str) -> None:
    region = raised(make())
    assert region.family == family
    assert region.expert_fn.has_weight
    assert region.expert_fn.param_kinds == ("expert", "expert")
    calls = [line.split("(")[0].split(" = ")[-1] for line in code_of(region.expert_fn.graph_module)]
    assert [call for call in calls if "mm" in call and "return" not in call] == ["torch.ops.aten.mm.default"] * 2


def test_the_expert_function_of_the_grouped_spelling() -> None:
    assert code_of(raised(GroupedMoE()).expert_fn.graph_module) == [
        "mm_default = torch.ops.aten.mm.default(rows, param_0)",
        "relu_default = torch.ops.aten.relu.default(mm_default)",
        "mm_default_1 = torch.ops.aten.mm.default(relu_default, param_1)",
        "unsqueeze_default_2 = torch.ops.aten.unsqueeze.default(weight, 1)",
        "mul_tensor = torch.ops.aten.mul.Tensor(mm_default_1, unsqueeze_default_2)",
        "return mul_tensor",
    ]


@pytest.mark.parametrize("make", [GatheredMoE, GroupedMoE])
@pytest.mark.parametrize("top_k", [2, 3])
def test_the_record_names_its_tensors_and_sizes(make: Callable[..., TinyMoE], top_k: int) -> None:
    region = raised(make(top_k=top_k), num_tokens=13, dynamic=False)
    assert region.dims == RegionDims("13", HIDDEN, NUM_EXPERTS, top_k, WIDTH)
    assert region.hidden.op == "placeholder"
    assert target_name(region.expert_index) == "getitem"
    assert region.routing_weight is not None and target_name(region.routing_weight) == "getitem"
    assert [tuple(node.meta["example_value"].shape) for node in region.params] == [
        (NUM_EXPERTS, HIDDEN, WIDTH),
        (NUM_EXPERTS, WIDTH, HIDDEN),
    ]


@pytest.mark.parametrize("make", [GatheredMoE, GroupedMoE])
@pytest.mark.parametrize("dynamic", [True, False])
def test_one_choice_is_raised(make: Callable[..., TinyMoE], dynamic: bool) -> None:
    region = raised(make(top_k=1), dynamic=dynamic)
    assert region.dims.top_k == 1
    assert region.hidden.op == "placeholder"


@pytest.mark.parametrize("make", [GatheredMoE, GroupedMoE])
def test_the_expert_width_is_the_inner_one(make: Callable[[], TinyMoE]) -> None:
    assert raised(make()).dims.expert_width == WIDTH


@pytest.mark.parametrize("make", [GatheredMoE, GroupedMoE])
@pytest.mark.parametrize("top_k", [1, 2])
def test_one_static_token_is_raised(make: Callable[..., TinyMoE], top_k: int) -> None:
    region = raised(make(top_k=top_k), num_tokens=1, dynamic=False)
    assert (region.dims.tokens, region.dims.top_k) == ("1", top_k)


@pytest.mark.parametrize("num_tokens", [HIDDEN, NUM_EXPERTS, 2, WIDTH])
def test_static_token_counts_that_equal_other_sizes_are_raised(num_tokens: int) -> None:
    region = raised(GatheredMoE(), num_tokens=num_tokens, dynamic=False)
    assert region.hidden.op == "placeholder"
    assert region.expert_fn.param_kinds == ("expert", "expert")


def test_a_group_limited_router_is_raised() -> None:
    layer = DeepseekMoE(DeepseekConfig(hidden=16, expert_width=24, spelling="gathered"))
    region = only_region(capture(layer, torch.randn(13, 16)))
    assert (region.dims.num_experts, region.dims.top_k) == (16, 4)


class Unweighted(GatheredMoE):
    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        index = self.gate(hidden).topk(self.top_k, dim=-1).indices
        return index, index

    def experts(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        ids = index.reshape(-1)
        inner = torch.bmm(self.rows(hidden).unsqueeze(1), self.up[ids]).relu()
        return torch.bmm(inner, self.down[ids]).view(-1, self.top_k, HIDDEN).sum(dim=1)


def test_outputs_may_be_summed_unweighted() -> None:
    region = raised(Unweighted())
    assert region.routing_weight is None
    assert not region.expert_fn.has_weight


class WeightOnInput(GroupedMoE):
    def experts(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        ids, order = index.reshape(-1).sort(stable=True)
        tokens, offsets = order // self.top_k, self.offsets(ids)
        rows = hidden[tokens] * weight.reshape(-1)[order].unsqueeze(-1)
        out = F.grouped_mm(F.grouped_mm(rows, self.up, offs=offsets).relu(), self.down, offs=offsets)
        return self.combine(hidden, tokens, out)


def test_the_weight_may_be_applied_to_the_input() -> None:
    assert code_of(raised(WeightOnInput()).expert_fn.graph_module)[:2] == [
        "unsqueeze_default = torch.ops.aten.unsqueeze.default(weight, 1)",
        "mul_tensor = torch.ops.aten.mul.Tensor(rows, unsqueeze_default)",
    ]


class WithBiases(GatheredMoE):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH))
        self.scale = nn.Parameter(torch.rand(HIDDEN))

    def experts(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        ids = index.reshape(-1)
        inner = (torch.bmm(self.rows(hidden).unsqueeze(1), self.up[ids]).squeeze(1) + self.bias[ids]).relu()
        out = torch.bmm(inner.unsqueeze(1), self.down[ids]).squeeze(1) * self.scale
        return (out * weight.reshape(-1, 1)).view(-1, self.top_k, HIDDEN).sum(dim=1)


def test_biases_belong_to_an_expert_and_other_parameters_to_all() -> None:
    region = raised(WithBiases())
    assert region.expert_fn.param_kinds == ("expert", "expert", "expert", "shared")


class CountsLoads(GroupedMoE):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        index, weight = self.route(hidden)
        ids, order = index.reshape(-1).sort(stable=True)
        counts = torch.histc(ids.float(), bins=NUM_EXPERTS, min=0, max=NUM_EXPERTS - 1)
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        tokens = order // self.top_k
        inner = F.grouped_mm(hidden[tokens], self.up, offs=offsets).relu()
        out = F.grouped_mm(inner, self.down, offs=offsets) * weight.reshape(-1)[order].unsqueeze(-1)
        return self.combine(hidden, tokens, out), counts / counts.sum()


def test_load_counts_that_are_used_outside_do_not_hinder() -> None:
    assert raised(CountsLoads()).family == "grouped"


class LeaksRows(GroupedMoE):
    def experts(self, hidden: Tensor, index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ids, order = index.reshape(-1).sort(stable=True)
        tokens, offsets = order // self.top_k, self.offsets(ids)
        rows = hidden[tokens]
        out = F.grouped_mm(F.grouped_mm(rows, self.up, offs=offsets).relu(), self.down, offs=offsets)
        return self.combine(hidden, tokens, out), rows.abs().mean()


class LeaksInnerRows(GatheredMoE):
    def experts(self, hidden: Tensor, index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ids = index.reshape(-1)
        inner = torch.bmm(self.rows(hidden).unsqueeze(1), self.up[ids]).relu()
        out = torch.bmm(inner, self.down[ids]).squeeze(1) * weight.reshape(-1, 1)
        return out.view(-1, self.top_k, HIDDEN).sum(dim=1), inner.abs().mean()


class WritesItsInput(GatheredMoE):
    def experts(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        ids = index.reshape(-1)
        tokens = hidden * 1
        inner = torch.bmm(self.rows(tokens).unsqueeze(1), self.up[ids]).relu()
        tokens.mul_(2)
        inner = inner + torch.bmm(self.rows(tokens).unsqueeze(1), self.up[ids])
        out = torch.bmm(inner, self.down[ids]).squeeze(1) * weight.reshape(-1, 1)
        return out.view(-1, self.top_k, HIDDEN).sum(dim=1)


class TwoTokenInputs(GroupedMoE):
    def second(self, hidden: Tensor) -> Tensor:
        return hidden.flip(0)

    def experts(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        ids, order = index.reshape(-1).sort(stable=True)
        tokens, offsets = order // self.top_k, self.offsets(ids)
        scale = self.second(hidden)[tokens].sum(-1, keepdim=True)
        inner = F.grouped_mm(hidden[tokens], self.up, offs=offsets) * scale
        return self.combine(hidden, tokens, F.grouped_mm(inner, self.down, offs=offsets))


class TokensInTwoWays(TwoTokenInputs):
    def second(self, hidden: Tensor) -> Tensor:
        return hidden.sigmoid()


def test_what_is_computed_of_tokens_one_by_one_is_no_second_input() -> None:
    region = raised(TokensInTwoWays())
    assert region.hidden.op == "placeholder"
    assert any("sigmoid" in line for line in code_of(region.expert_fn.graph_module))


class WeightTwice(GatheredMoE):
    def experts(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        ids = index.reshape(-1)
        inner = torch.bmm(self.rows(hidden).unsqueeze(1), self.up[ids]) * weight.sigmoid().reshape(-1, 1, 1)
        out = torch.bmm(inner, self.down[ids]).squeeze(1) * weight.reshape(-1, 1)
        return out.view(-1, self.top_k, HIDDEN).sum(dim=1)


class ChoiceMajor(GatheredMoE):
    """Rows of all first choices, then of all second ones."""

    def scales(self, weight: Tensor) -> Tensor:
        return weight.t().reshape(-1, 1)

    def experts(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        ids = index.t().reshape(-1)
        inner = torch.bmm(hidden.repeat(self.top_k, 1).unsqueeze(1), self.up[ids]).relu()
        out = torch.bmm(inner, self.down[ids]).squeeze(1) * self.scales(weight)
        return out.view(self.top_k, -1, HIDDEN).sum(dim=0)


class ForeignWeights(ChoiceMajor):
    """Weights of rows in token order for rows that stand choice by choice."""

    def scales(self, weight: Tensor) -> Tensor:
        return weight.reshape(-1, 1)


class TwoTables(GatheredMoE):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS + 1, WIDTH, HIDDEN))


class CountsAsOffsets(GroupedMoE):
    def offsets(self, ids: Tensor) -> Tensor:
        return torch.histc(ids.float(), bins=NUM_EXPERTS, min=0, max=NUM_EXPERTS - 1).to(torch.int32)


class ShiftedOffsets(GroupedMoE):
    def offsets(self, ids: Tensor) -> Tensor:
        return super().offsets(ids) + 1


class NarrowHistogram(GroupedMoE):
    def offsets(self, ids: Tensor) -> Tensor:
        counts = torch.histc(ids.float(), bins=NUM_EXPERTS, min=0, max=NUM_EXPERTS + 1)
        return torch.cumsum(counts, dim=0, dtype=torch.int32)


class UnsortedRows(GroupedMoE):
    def experts(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        offsets = self.offsets(index.reshape(-1).sort()[0])
        out = F.grouped_mm(hidden.repeat_interleave(self.top_k, dim=0), self.up, offs=offsets).relu()
        out = F.grouped_mm(out, self.down, offs=offsets) * weight.reshape(-1, 1)
        return out.view(-1, self.top_k, HIDDEN).sum(dim=1)


REFUSED: dict[str, tuple[Callable[[], TinyMoE], str]] = {
    "routed rows used outside": (LeaksRows, "routed rows are also used outside the region, by "),
    "inner rows used outside": (LeaksInnerRows, "routed rows are also used outside the region, by "),
    "an input written between": (WritesItsInput, "is changed in place between dispatch and combine"),
    "two token inputs": (TwoTokenInputs, "experts take their rows from different tensors"),
    "two weights": (WeightTwice, "two routing weights, "),
    "weights of other rows": (ForeignWeights, "rows in different orders meet: [K*T] and [N] in token order"),
    "tables of different length": (TwoTables, "tables of 4 and of 5 experts in one region"),
    "counts as offsets": (CountsAsOffsets, "grouped matmul whose offsets are not the ends of the experts' rows"),
    "shifted offsets": (ShiftedOffsets, "used as row data"),
    "a histogram that is no count": (
        NarrowHistogram,
        "grouped matmul whose offsets are not the ends of the experts' rows",
    ),
    "rows not sorted": (UnsortedRows, "grouped matmul of rows that are [N] in token order, not sorted by expert"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_proved_is_refused_with_its_reason(name: str) -> None:
    make, reason = REFUSED[name]
    assert reason in refusal_reason(make())


def test_a_refusal_names_the_node_where_the_proof_stopped() -> None:
    graph_module = capture(GatheredMoE(lambda rows: rows.softmax(dim=0)), hidden_states())
    with pytest.raises(CannotChunk) as caught:
        only_region(graph_module)
    assert caught.value.node == "inner"


def test_experts_whose_results_never_meet_are_refused() -> None:
    class NeverMeets(GatheredMoE):
        def experts(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
            ids = index.reshape(-1)
            return torch.bmm(self.rows(hidden).unsqueeze(1), self.up[ids]).relu().sum()

    assert "no row-wise rule for aten.sum.default" in refusal_reason(NeverMeets())


def test_raising_leaves_the_graph_as_it_was() -> None:
    graph_module = capture(GatheredMoE(), hidden_states())
    before = graph_module.code, str(graph_module.graph)
    only_region(graph_module)
    assert (graph_module.code, str(graph_module.graph)) == before


class TopOneWithoutDivision(GroupedMoE):
    """With one choice a permutation of assignments is one of tokens; models with K = 1 index by it directly."""

    def __init__(self) -> None:
        super().__init__(top_k=1)

    def experts(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        ids, order = index.reshape(-1).sort(stable=True)
        offsets = self.offsets(ids)
        out = F.grouped_mm(F.grouped_mm(hidden[order], self.up, offs=offsets).relu(), self.down, offs=offsets)
        return self.combine(hidden, order, out * weight.reshape(-1)[order].unsqueeze(-1))


@pytest.mark.parametrize("num_tokens", [13, 2])
def test_choices_before_tokens_are_chunked_exactly(num_tokens: int) -> None:
    layer = ChoiceMajor()
    optimized = memfine_fx.optimize(copy.deepcopy(layer), config=Config(inner_backend="eager", rows_per_chunk=5))
    assert_same_step(optimized, layer, {"hidden": hidden_states(num_tokens)})
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked"


def test_one_choice_indexed_by_the_permutation_itself_is_raised() -> None:
    assert raised(TopOneWithoutDivision()).dims.top_k == 1


class TopOneLoop(TinyMoE):
    """With one choice nothing is summed: each expert's results are put at its tokens, and the model ends there."""

    def experts(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(NUM_EXPERTS):
            tokens = torch.where(index[:, 0] == expert)[0]
            rows = self.activation(hidden[tokens] @ self.up[expert]) @ self.down[expert]
            out[tokens] = rows * weight[tokens]
        return out


def test_results_put_at_the_tokens_of_one_choice_are_the_end_of_a_region() -> None:
    layer = TopOneLoop(top_k=1)
    optimized = memfine_fx.optimize(copy.deepcopy(layer), config=Config(inner_backend="eager", rows_per_chunk=5))
    assert_same_step(optimized, layer, {"hidden": hidden_states()})
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked"


@pytest.mark.parametrize(
    "make_zeros",
    [
        torch.zeros_like,
        lambda hidden: hidden.new_zeros(hidden.shape),
        lambda hidden: torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device),
        lambda hidden: torch.zeros(hidden.size(0), HIDDEN, dtype=hidden.dtype),
    ],
    ids=["zeros_like", "new_zeros", "zeros of a shape", "zeros of sizes"],
)
@pytest.mark.parametrize("is_in_place", [True, False])
def test_rows_are_added_to_zeros_of_any_spelling(make_zeros: Callable[[Tensor], Tensor], is_in_place: bool) -> None:
    class Combines(GroupedMoE):
        def combine(self, hidden: Tensor, tokens: Tensor, out: Tensor) -> Tensor:
            zeros = make_zeros(hidden)
            return zeros.index_add_(0, tokens, out) if is_in_place else zeros.index_add(0, tokens, out)

    assert raised(Combines()).family == "grouped"


def test_places_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    assert str(Where("layers.0", f"{tmp_path}/train.py:3")) == "layers.0 (train.py:3)"
    assert str(Where("", f"{tmp_path}/lib/transformers/moe.py:3")) == "(transformers/moe.py:3)"
    assert str(Where("", "/elsewhere/moe.py:3")) == "(/elsewhere/moe.py:3)"
