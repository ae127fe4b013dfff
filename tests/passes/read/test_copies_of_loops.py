"""Rolling: which loops become one copy, and why others do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.read.marker import put_rows
from memfine_fx.records import MoERegion
from tests.helpers import HIDDEN, NUM_EXPERTS, WIDTH, capture, code_of, hidden_states, only_region

Body = Callable[["Loop", Tensor, Tensor, Tensor, int], Tensor]


class Loop(nn.Module):
    def __init__(self, body: Body, experts: range = range(NUM_EXPERTS)) -> None:
        super().__init__()
        self.body = body
        self.numbers = experts
        self.gate = nn.Linear(HIDDEN, NUM_EXPERTS)
        self.up = nn.ModuleList(nn.Linear(HIDDEN, WIDTH) for _ in range(NUM_EXPERTS))
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, HIDDEN))

    def forward(self, hidden: Tensor) -> Tensor:
        weight, index = self.gate(hidden).softmax(-1).topk(2)
        out = torch.zeros_like(hidden)
        for expert in self.numbers:
            out = self.add(out, hidden, index, weight, expert)
        return out

    def add(self, out: Tensor, hidden: Tensor, index: Tensor, weight: Tensor, expert: int) -> Tensor:
        token, choice = torch.where(index == expert)
        rows = self.body(self, hidden[token], weight[token, choice], token, expert)
        return out.index_add(0, token, rows)


def region_of(layer: Loop) -> MoERegion:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return only_region(capture(layer, hidden_states()))


def plain(layer: Loop, rows: Tensor, weight: Tensor, token: Tensor, expert: int) -> Tensor:
    return (F.relu(layer.up[expert](rows)) @ layer.down[expert]) * weight.unsqueeze(-1)


def test_one_copy_stands_for_all_and_its_parameters_for_each_expert() -> None:
    region = region_of(Loop(plain))
    assert region.family == "loops"
    assert sorted(region.expert_fn.param_kinds) == ["each", "each", "expert"]
    assert len(region.params) == 2 * NUM_EXPERTS + 1
    assert region.dims.num_experts == NUM_EXPERTS
    assert sum("mm.default(" in line for line in code_of(region.expert_fn.graph_module)) == 2


def test_a_parameter_that_every_copy_reads_is_shared() -> None:
    def body(layer: Loop, rows: Tensor, weight: Tensor, token: Tensor, expert: int) -> Tensor:
        return plain(layer, rows, weight, token, expert) @ layer.gate.weight.T @ layer.gate.weight

    assert set(region_of(Loop(body)).expert_fn.param_kinds) == {"each", "expert", "shared"}


def constant_differs(layer: Loop, rows: Tensor, weight: Tensor, token: Tensor, expert: int) -> Tensor:
    return plain(layer, rows, weight, token, expert) * (1.0 if expert else 2.0)


def neighbour(layer: Loop, rows: Tensor, weight: Tensor, token: Tensor, expert: int) -> Tensor:
    return (F.relu(layer.up[expert](rows)) @ layer.down[(expert + 1) % NUM_EXPERTS]) * weight.unsqueeze(-1)


def rows_meet(layer: Loop, rows: Tensor, weight: Tensor, token: Tensor, expert: int) -> Tensor:
    return plain(layer, rows - rows.mean(0, keepdim=True), weight, token, expert)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (constant_differs, "compute different things"),
        (neighbour, "another expert.s entry of a table"),
        (rows_meet, "routed dimension"),
    ],
)
def test_copies_that_differ_or_mix_rows_are_refused(body: Body, reason: str) -> None:
    with pytest.raises(CannotChunk, match=reason):
        region_of(Loop(body))


def test_a_table_may_hold_more_experts_than_run() -> None:
    assert region_of(Loop(plain, range(NUM_EXPERTS - 1))).dims.num_experts == NUM_EXPERTS - 1


def test_an_expert_that_never_runs_is_refused() -> None:
    with pytest.raises(CannotChunk, match=r"does not write its results back|of which"):
        region_of(Loop(plain, range(1, NUM_EXPERTS)))


def test_marked_code_has_the_gradients_of_the_code_it_stands_for() -> None:
    out, rows = torch.randn(6, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)

    def marked(out: Tensor, rows: Tensor) -> Tensor:
        return put_rows(out, rows, [2, 3, 1], 1).square()

    assert torch.autograd.gradcheck(marked, (out.requires_grad_(), rows.requires_grad_()))
