"""What a report says of code that never reaches a graph: where Dynamo breaks it, and why."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

import memfine_fx

H, E = 8, 4


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E)
        self.experts = nn.ModuleList(nn.Linear(H, H) for _ in range(E))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight, index = self.gate(x).softmax(-1).topk(1, dim=-1)
        return weight, index


class OtherBranch(Routed):
    """Two rows and more are treated otherwise than one: no graph holds both."""

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token = torch.where(index == e)[0]
            if token.shape[0] > 1:
                out[token] = expert(x[token]) * weight[token]
            else:
                out[token] = 2 * expert(x[token])
        return out


class Dispatcher:
    """Rows in expert order, as places where gates are not zero give them; experts' results are put back by it."""

    def __init__(self, gates: Tensor) -> None:
        places, order = torch.nonzero(gates).sort(0)
        self.expert = places[:, 1:]
        self.token = torch.nonzero(gates)[order[:, 1], 0]
        self.sizes = (gates > 0).sum(0).tolist()
        self.gates = gates

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(x[self.token], self.sizes)

    def combine(self, parts: list[Tensor]) -> Tensor:
        rows = torch.cat(parts) * self.gates[self.token].gather(1, self.expert)
        return torch.zeros(self.gates.shape[0], H).index_add(0, self.token, rows)


class SparselyGated(Routed):
    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.route(x)
        zeros = torch.zeros(x.shape[0], E, requires_grad=True)
        dispatcher = Dispatcher(zeros.scatter(1, index, weight))
        parts = zip(self.experts, dispatcher.split(x), strict=True)
        return dispatcher.combine([expert(part) for expert, part in parts])


def line_of(code: object, text: str) -> str:
    lines, start = inspect.getsourcelines(code)  # type: ignore[arg-type]  # a function
    return f"{inspect.getsourcefile(Routed)}:{start + next(n for n, line in enumerate(lines) if text in line)}"


@pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")
@pytest.mark.parametrize(
    ("layer_class", "reason", "text"),
    [
        (OtherBranch, "Data-dependent branching", "if token.shape[0] > 1"),
        (SparselyGated, "tensor creation function", "zeros ="),
    ],
)
def test_a_report_names_the_break_that_keeps_experts_out_of_the_graphs(
    layer_class: type[nn.Module], reason: str, text: str
) -> None:
    layer, x = layer_class(), torch.randn(9, H)
    expected = layer(x)
    memfine_fx.optimize(layer, inner_backend="eager")
    assert torch.equal(layer(x), expected)
    (note,) = [note for note in memfine_fx.report(layer).notes if note.startswith("Dynamo leaves code out")]
    assert reason in note and line_of(layer_class.forward, text) in note, note


def test_a_break_is_not_named_where_experts_are_chunked() -> None:
    class Printing(Routed):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            weight, index = self.route(x)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                token = torch.where(index == e)[0]
                out[token] = expert(x[token]) * weight[token]
            return out

    layer = Printing()
    memfine_fx.optimize(layer, inner_backend="eager")
    layer(torch.randn(9, H))
    report = memfine_fx.report(layer)
    assert report.num_chunked == 1 and not [note for note in report.notes if "Dynamo leaves" in note]
