"""Experts as transformers 5.6 to 5.18 sort their rows, with marks for ranks that hold a part of the experts; and
its padding masks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memfine_fx
from memfine_fx.demo.tiny import tiny_causal_lm
from tests.integration.comparison import FP32_TOLERANCE, relative_error

moe = pytest.importorskip("transformers.integrations.moe")
log = logging.getLogger("transformers.utils.import_utils")


def ends_of(ids: Tensor, num_experts: int) -> Tensor:
    return torch.histc(ids.float(), num_experts, 0, num_experts - 1).cumsum(0, dtype=torch.int32)


def expert_rows(experts: nn.Module, rows: Tensor, ends: Tensor) -> Tensor:
    rows = experts._apply_gate(moe._grouped_linear(rows, experts.gate_up_proj, ends))
    return moe._grouped_linear(rows, experts.down_proj, ends)


def back_in_place(rows: Tensor, order: Tensor, index: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return rows[inverse].view(*index.shape, -1).sum(1)


def clamped(self: nn.Module, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """5.6 and 5.7: ids are clamped, and results of those beyond the last expert are zeroed. In bf16 on a CPU the
    version of torch is looked up, which is logged."""
    log.debug(f"Detected torch version: {torch.__version__}")
    tokens = torch.arange(hidden.shape[0]).unsqueeze(1).expand(-1, index.shape[1]).reshape(-1)
    is_elsewhere = index.reshape(-1) >= self.num_experts
    ids = index.reshape(-1).clamp(0, self.num_experts - 1)
    order = ids.argsort()
    rows = expert_rows(self, hidden[tokens[order]], ends_of(ids[order], self.num_experts))
    rows = rows * weight.reshape(-1)[order].unsqueeze(-1)
    rows.masked_fill_(is_elsewhere[order].unsqueeze(-1), 0.0)
    return back_in_place(rows, order, index)


def marked(self: nn.Module, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """5.8 to 5.18: rows beyond the last expert come last and are zeroed in place, before and after."""
    ids, order = index.reshape(-1).sort()
    rows = hidden[order // index.shape[1]]
    ends = ends_of(ids, self.num_experts)
    is_elsewhere = (ids >= self.num_experts).unsqueeze(-1)
    ids.clamp_(max=self.num_experts - 1)
    rows.masked_fill_(is_elsewhere, 0.0)
    rows = expert_rows(self, rows, ends) * weight.reshape(-1)[order].unsqueeze(-1)
    rows.masked_fill_(is_elsewhere, 0.0)
    return back_in_place(rows, order, index)


@pytest.mark.parametrize(("experts", "family"), [(clamped, "qwen3_moe"), (marked, "deepseek_v3")])
def test_ids_below_the_number_of_experts_need_no_marks(
    family: str, experts: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", experts)
    torch.manual_seed(0)
    model = tiny_causal_lm(family, num_hidden_layers=2)
    optimized = copy.deepcopy(model)
    memfine_fx.optimize(optimized, config=memfine_fx.Config(inner_backend="eager", rows_per_chunk=5))
    tokens = torch.randint(1, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    losses = []
    for one in (model, optimized):
        loss = one(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.detach())
    assert memfine_fx.report(optimized).num_chunked >= 1
    assert relative_error(losses[1], losses[0]) < FP32_TOLERANCE
    for (name, expected), found in zip(model.named_parameters(), optimized.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
        if expected.grad is not None and found.grad is not None:
            assert relative_error(found.grad, expected.grad) < FP32_TOLERANCE, name


@pytest.mark.parametrize(
    ("has_labels", "has_checkpoints", "is_cut"),
    [(False, False, False), (True, False, False), (True, True, False), (True, True, True)],
)
def test_padded_batches_of_any_length_share_a_graph(has_labels: bool, has_checkpoints: bool, is_cut: bool) -> None:
    """A padding mask and labels are integers [B,S], as an index [T,K] may be, and their S is no number of choices.

    Where layers are checkpointed, the graph that is given these has no choice of its own: all are in layers' bodies.
    A warning of transformers (`use_cache`) cuts it, and what follows holds nothing but the loss.
    """
    torch._dynamo.reset()
    model = tiny_causal_lm("qwen3_moe", num_hidden_layers=1, use_cache=is_cut)
    if has_checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    memfine_fx.optimize(model, config=memfine_fx.Config(inner_backend="eager", rows_per_chunk=5))
    num_graphs = []
    for length in (6, 7, 8, 9):
        tokens = torch.randint(1, 60, (2, length))
        labels = tokens.clone() if has_labels else None
        found = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels)
        (found.loss if has_labels else found.logits.sum()).backward()
        num_graphs.append(memfine_fx.report(model).num_graphs)
    num_parts = 2 if is_cut else 1
    assert num_graphs == [num_parts, 2 * num_parts, 2 * num_parts, 2 * num_parts]
