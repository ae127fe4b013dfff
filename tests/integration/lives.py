"""Lives: scripted runs of training, replayed on an optimized model and its unmodified twin.

After every step the twin's gradients are compared, and what the allocator handed out is held against the budget: bytes
that were there when the step began (parameters, gradients, optimizer state, inputs) and the peak beyond them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memfine_fx
from memfine_fx.errors import BudgetInfeasible
from memfine_fx.memory.measure import trace_memory
from memfine_fx.models.mixtral import MixtralConfig, MixtralMoE
from memfine_fx.runtime import op
from tests.integration.comparison import relative_error

VOCAB, HIDDEN, HEADS = 256, 64, 2
CPU = torch.device("cpu")
STANDARD = (2, 128)
Plans = list[tuple[int, str]]


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_experts = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.experts = MixtralMoE(
            MixtralConfig(hidden=HIDDEN, expert_width=HIDDEN, num_experts=4, top_k=2, spelling="gathered")
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, HEADS, hidden // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.experts(self.norm_experts(x))


class TinyLM(nn.Module):
    """Two layers of attention and experts between an embedding and a head: the smallest model with a life."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.layers = nn.ModuleList(_Layer() for _ in range(2))
        self.is_checkpointed = False

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """The loss where labels are given, else logits [B,S,V]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        logits: torch.Tensor = self.head(x)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@dataclass
class Life:
    """One model's life under a budget, beside its twin without memfine_fx.

    Args:
        budget: bytes, None for none, "least" for none and nothing kept.
        dtype: of the parameters.
        inner: what compiles the rewritten graph.
    """

    budget: int | Literal["least"] | None
    dtype: torch.dtype = torch.float32
    inner: Any = "aot_eager"
    model: TinyLM = field(init=False)
    twin: TinyLM = field(init=False)
    wide: TinyLM | None = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    num_steps: int = 0
    worst_error: float = 0.0
    most_bytes: int = 0

    def __post_init__(self) -> None:
        self.model, self.twin = fresh_model(self.dtype), fresh_model(self.dtype)
        if self.dtype is not torch.float32:
            self.wide = fresh_model(self.dtype).float()
        self.optimize()

    def optimize(self) -> None:
        memfine_fx.optimize(self.model, inner_backend=self.inner, dynamic=True, memory_budget=self.budget)

    @property
    def models(self) -> tuple[TinyLM, ...]:
        """Ours, its twin, and in low precision the twin in fp32, which says how far off the twin itself is."""
        return (self.model, self.twin) if self.wide is None else (self.model, self.twin, self.wide)

    def train(self, size: tuple[int, int] = STANDARD, *, zero: bool | None = True, losses: int = 1) -> None:
        """One forward and backward; gradients before it are None (`zero`), zeros (None) or left (False)."""
        for model in self.models:
            if zero is not False:
                model.zero_grad(set_to_none=zero is True)
        batches = [tokens(size, seed=seed) for seed in range(losses)]
        self._measured(lambda: backward_of(self.model, batches))
        for model in self.models[1:]:
            backward_of(model, batches)
        self.check()

    def evaluate(self, guard: Callable[[], Any] = torch.no_grad, size: tuple[int, int] = STANDARD) -> None:
        batch = tokens(size, seed=5)
        for model in self.models:
            model.eval()
        with guard():
            found = self._measured(lambda: self.model(batch).detach())
            expected = self.twin(batch).detach()
        assert relative_error(found, expected) <= self.tolerance
        for model in self.models:
            model.train()

    def generate(self, num_tokens: int = 4) -> None:
        prompt = tokens((1, 7), seed=3)
        found, expected = (_generated(model, prompt, num_tokens) for model in (self.model, self.twin))
        if self.dtype is torch.float32:  # in bf16 two logits may tie
            assert torch.equal(found, expected)

    def make_optimizer(self, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        self.optimizers = [kind(model.parameters(), lr=1e-3) for model in self.models]

    def step(self) -> None:
        """All optimizers step; the others then take over our parameters, so that roundings do not add up."""
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for ours, *others in zip(*(model.parameters() for model in self.models), strict=True):
                for theirs in others:
                    theirs.copy_(ours)

    def freeze(self, name: str, frozen: bool = True) -> None:
        for model in self.models:
            for path, parameter in model.named_parameters():
                if name in path:
                    parameter.requires_grad_(not frozen)
                    parameter.grad = None

    def checkpoint(self) -> None:
        for model in self.models:
            model.is_checkpointed = True

    def fail_in_forward(self) -> None:
        """An exception of the user's between forward and backward."""
        with contextlib.suppress(ZeroDivisionError):
            batch = tokens(STANDARD)
            loss = self.model(batch, batch)
            loss / (1 // int(loss.item() < 0))

    def interrupt_in_backward(self) -> None:
        """Ctrl-C while the experts' backward runs; what was accumulated by then is cleared, as a retry does."""
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(op, "run_backward", _interrupted)
            backward_of(self.model, [tokens(STANDARD)])

    @property
    def tolerance(self) -> float:
        return 1e-5 if self.dtype is torch.float32 else 3e-2

    def check(self) -> None:
        """Gradients equal the twin's, or in low precision all of them together are no further from fp32 than its are.

        Single ones, of a norm or a router, are a few numbers that cancel, and the inner compiler rounds elsewhere.
        """
        found, expected = gradients_of(self.model), gradients_of(self.twin)
        assert found.keys() == expected.keys()
        errors = {name: relative_error(found[name], expected[name]) for name in found}
        self.worst_error = max(self.worst_error, *errors.values())
        worst = max(errors, key=errors.__getitem__)
        allowed = self.tolerance if self.wide is None else 5 * self.tolerance
        assert errors[worst] <= allowed, f"{worst} is off by {errors[worst]:.1e}"
        if self.wide is not None:
            truth = gradients_of(self.wide)
            ours, theirs = pooled_error(found, truth), pooled_error(expected, truth)
            # Of 256 tokens a few choose between experts that nearly tie, and each that goes elsewhere is a hundredth.
            assert ours <= max(1.25 * theirs, 5e-2), f"gradients are off by {ours:.1e}, the twin's by {theirs:.1e}"

    def plans(self) -> Plans:
        """(rows a chunk, what is kept) of each region in the latest step that trained."""
        regions = memfine_fx.report(self.model).regions
        return [(one.plan.rows_per_chunk, one.plan.policy) for one in regions if one.plan is not None]

    def _measured(self, run: Callable[[], Any]) -> Any:
        results: list[Any] = []
        there = self._static_bytes()
        trace = trace_memory(lambda: results.append(run()), CPU, collects_garbage=False)
        total = there + trace.peak_bytes
        self.num_steps, self.most_bytes = self.num_steps + 1, max(self.most_bytes, total)
        if isinstance(self.budget, int):
            assert total <= self.budget, f"step {self.num_steps} took {total:,} B of {self.budget:,}"
        return results[0]

    def _static_bytes(self) -> int:
        parameters = list(self.model.parameters())
        gradients = [one.grad for one in parameters if one.grad is not None]
        states = [
            value
            for optimizer in self.optimizers[:1]
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return sum(one.nbytes for one in (*parameters, *gradients, *states))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.grad.float() for name, one in model.named_parameters() if one.grad is not None}


def pooled_error(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """Of all gradients as one vector."""
    names = sorted(truth)
    return relative_error(*(torch.cat([one[name].flatten() for name in names]) for one in (found, truth)))


def fresh_model(dtype: torch.dtype) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM().to(dtype)


def tokens(size: tuple[int, int], seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, size, generator=torch.Generator().manual_seed(seed))


def backward_of(model: nn.Module, batches: list[torch.Tensor]) -> None:
    """One backward of the sum of the batches' losses."""
    losses = [model(batch, batch) for batch in batches]
    torch.stack(losses).sum().backward()


def _generated(model: nn.Module, tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens


def smallest_life(script: Callable[[Life], None], dtype: torch.dtype = torch.float32, inner: Any = "aot_eager") -> Life:
    """A life under the smallest budget that it can be lived in: what its refusals name, each time it is refused."""
    budget = 1 << 20
    for _ in range(6):
        torch._dynamo.reset()
        life = Life(budget, dtype, inner)
        try:
            script(life)
            return life
        except BudgetInfeasible as refusal:
            assert refusal.minimum_bytes > budget
            budget = refusal.minimum_bytes
    raise AssertionError(f"refused again and again, at last with a smallest budget of {budget:,} B")


def _interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt
