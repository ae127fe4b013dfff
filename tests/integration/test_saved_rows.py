"""Under a budget between two plans, regions keep as many rows as there is room for: never more, and gradients exact."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfine_fx
from memfine_fx.demo.training import ModelSizes, build_causal_lm
from memfine_fx.memory.measure import trace_memory
from memfine_fx.plan import budget
from memfine_fx.plan.cost import DeviceRates
from tests.integration.comparison import relative_error

CPU = torch.device("cpu")
SIZES = ModelSizes(
    layers=1, hidden=32, width=128, experts=4, top_k=2, heads=2, kv_heads=2, head_dim=16, vocab=64, positions=512
)
NUM_ROWS = 2 * 2 * 128
"""N: K rows of each token of a batch."""
KEPT_BYTES = NUM_ROWS * 2 * SIZES.width * 4
"""Of the results of the first projection, of all rows."""


@pytest.fixture(autouse=True)
def _slow_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeping pays."""
    slow = DeviceRates(((32, 1e9), (2048, 1e9)), copy_bytes=1e10, launch_seconds=1e-6)
    monkeypatch.setattr(budget, "device_rates", lambda device_type, dtype: slow)


def model_of() -> nn.Module:
    return build_causal_lm(SIZES, seed=0, dtype=torch.float32, device=CPU)


def batch(sequence: int = 128) -> torch.Tensor:
    return torch.randint(SIZES.vocab, (2, sequence), generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, tokens: torch.Tensor) -> None:
    model(input_ids=tokens, labels=tokens).loss.backward()


def param_bytes(model: nn.Module) -> int:
    return sum(one.nbytes for one in model.parameters())


def trained(limit: int | None, **options: object) -> tuple[nn.Module, memfine_fx.Report, int]:
    """(model after a step, report, measured bytes of a step with the parameters')."""
    torch.compiler.reset()
    model = model_of()
    memfine_fx.optimize(model, dynamic=True, memory_budget=limit, **options)  # type: ignore[arg-type]
    step(model, batch())
    model.zero_grad(set_to_none=True)
    measured = trace_memory(lambda: step(model, batch()), CPU).peak_bytes
    return model, memfine_fx.report(model), measured + param_bytes(model)


def rows_saved(report: memfine_fx.Report) -> list[int]:
    return [region.plan.num_saved_rows for region in report.regions if region.plan is not None]


@pytest.mark.slow
def test_what_is_left_of_a_budget_is_spent_on_rows() -> None:
    _, most, with_all = trained(2**40, inner_backend="aot_eager")
    assert rows_saved(most) == [NUM_ROWS]
    limit = with_all - KEPT_BYTES * 9 // 10  # smaller chunks, and other things recomputed, make room for most of it
    model, report, measured = trained(limit, inner_backend="aot_eager")
    (rows,) = rows_saved(report)
    assert NUM_ROWS // 4 <= rows < NUM_ROWS
    assert f"projections of {rows} rows saved" in str(report)
    assert measured <= limit
    expected = model_of()
    step(expected, batch())
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert relative_error(one.grad, other.grad) <= 1e-5, name
