"""A short training run in a process of its own: what it computed, predicted and took, as one line of JSON.

`python -m tests.integration.warm_start silu [least | device]` with TORCHINDUCTOR_CACHE_DIR set; see test_warm_start.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import memfine_fx
from memfine_fx.memory.measure import trace_memory
from tests.devices import give_device
from tests.integration.comparison import relative_error
from tests.rates import give_rates

EXPERTS, TOP_K, HIDDEN, WIDTH, TOKENS = 8, 2, 64, 128, 64
"""Gradients are more than what the last layer may keep, so that it costs nothing."""


class Layer(nn.Module):
    """Experts on gathered weights: the graph around them is the same for every activation."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = getattr(F, activation)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * WIDTH**-0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight, chosen = torch.topk(torch.softmax(self.gate(hidden), dim=-1), TOP_K)
        out = torch.zeros_like(hidden)
        for expert in range(EXPERTS):
            token, place = torch.where(chosen == expert)
            inner = self.activation(hidden[token] @ self.up[expert].T)
            out = out.index_add(0, token, (inner @ self.down[expert].T) * weight[token, place, None])
        return out


class Model(nn.Sequential):
    """Two layers and a loss."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(hidden)
        return out.square().mean()


def run(activation: str, budget: str | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = Model(Layer(activation), Layer(activation))
    hidden = torch.randn(TOKENS, HIDDEN)
    if budget == "device":
        give_device(1 << 30)
    model = memfine_fx.optimize(copy.deepcopy(plain), memory_budget=None if budget == "device" else budget)
    digest: list[float] = []
    for is_retained in (True, False):
        for one in (plain, model):
            loss = one(hidden)
            loss.backward(retain_graph=is_retained)
            if is_retained:  # twice through one forward: saved tensors that backward may write over are copied
                loss.backward()
        digest += [float(loss.detach()), *(float(one.grad.double().sum()) for one in model.parameters())]
    errors = [
        relative_error(ours.grad, theirs.grad)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    accumulated = str(memfine_fx.report(model))
    model.zero_grad()
    trace = trace_memory(lambda: model(hidden).backward(), torch.device("cpu"))
    cached = counters["aot_autograd"]
    return {
        "hits": cached["autograd_cache_hit"],
        "misses": cached["autograd_cache_miss"],
        "error": max(errors),
        "digest": digest,
        "measured": trace.peak_bytes,
        "reports": [accumulated, str(memfine_fx.report(model))],
    }


if __name__ == "__main__":
    give_rates()
    print(json.dumps(run(*sys.argv[1:])))
