"""Whatever a run does between steps, its budget is kept, gradients are exact and its plan is that of a fresh process.

See `lives`; all of them under every budget are the campaign of `make campaign`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

import memfine_fx
from memfine_fx.compiler import regions
from memfine_fx.errors import BudgetInfeasible
from tests.integration.lives import Life, Plans, backward_of, fresh_model, smallest_life, tokens


@pytest.fixture(autouse=True)
def no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with autograd takes megabytes of its own (docs/reliability.md), as much as these models, in
    whichever step a kind of layer is first compiled in a process."""
    monkeypatch.setattr(regions, "check_gradients", lambda *_: "")


SHORT, LONG, WIDE = (2, 96), (2, 160), (3, 128)


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def beside_a_second_model(life: Life) -> None:
    other = memfine_fx.optimize(fresh_model(life.dtype), inner_backend=life.inner, memory_budget=life.budget)
    backward_of(other, [tokens(SHORT)])


STEPS: dict[str, Callable[[Life], None]] = {
    "train": lambda life: life.train(),
    "train short": lambda life: life.train(SHORT),
    "train long": lambda life: life.train(LONG),
    "train wide": lambda life: life.train(WIDE),
    "train at 112": lambda life: life.train((2, 112)),
    "train from zeros": lambda life: life.train(zero=None),
    "add": lambda life: life.train(zero=False),
    "add long": lambda life: life.train(LONG, zero=False),
    "two losses": lambda life: life.train(losses=2),
    "add two losses": lambda life: life.train(losses=2, zero=False),
    "evaluate": lambda life: life.evaluate(),
    "evaluate short": lambda life: life.evaluate(size=SHORT),
    "evaluate long": lambda life: life.evaluate(size=LONG),
    "infer": lambda life: life.evaluate(torch.inference_mode),
    "evaluate with gradients": lambda life: life.evaluate(torch.enable_grad),
    "generate": lambda life: life.generate(),
    "make AdamW": lambda life: life.make_optimizer(),
    "make SGD": lambda life: life.make_optimizer(sgd),
    "step": lambda life: life.step(),
    "freeze experts": lambda life: life.freeze("experts"),
    "train experts again": lambda life: life.freeze("experts", frozen=False),
    "freeze embedding": lambda life: life.freeze("embedding"),
    "train embedding again": lambda life: life.freeze("embedding", frozen=False),
    "checkpoint": lambda life: life.checkpoint(),
    "use a second model": beside_a_second_model,
    "optimize again": lambda life: life.optimize(),
    "fail in forward": lambda life: life.fail_in_forward(),
    "interrupt in backward": lambda life: life.interrupt_in_backward(),
}
LIVES = {
    "plain": "train",
    "evaluated": "train, evaluate",
    "evaluated in inference mode": "train, infer",
    "evaluated with gradients": "train, evaluate with gradients",
    "evaluated first": "evaluate, train",
    "evaluated on more": "train, evaluate long",
    "evaluated often": "train, evaluate, train short, evaluate short",
    "evaluated with gradients first": "evaluate with gradients, train",
    "generated": "train, generate",
    "generated first": "generate, train",
    "accumulated": "train, add",
    "accumulated over three": "train, add, add, train",
    "accumulated after an evaluation": "train, evaluate, add",
    "accumulated twice": "train, add, train, add",
    "accumulated with other lengths": "train short, add long, add",
    "zeroed": "train, train from zeros",
    "shorter": "train, train short",
    "longer": "train, train long",
    "longer first": "train long, train",
    "wider": "train, train wide",
    "of many lengths": "train short, train long, train at 112, train",
    "optimized late": "train, make AdamW, step, train",
    "optimized early": "make AdamW, train, step, train",
    "optimizer swapped": "make SGD, train, step, make AdamW, train, step, train",
    "optimized and evaluated": "make AdamW, train, step, evaluate, train, step, evaluate",
    "optimized and accumulated": "make AdamW, train, add, step, train, add, step",
    "frozen": "train, freeze experts, train, train experts again",
    "frozen first": "freeze experts, train, train experts again",
    "embedding frozen": "train, freeze embedding, train, add, train embedding again",
    "checkpointed midway": "train, checkpoint, train",
    "checkpointed and accumulated": "checkpoint, train, add",
    "two losses": "two losses, two losses",
    "two losses and evaluated": "two losses, evaluate, train",
    "two losses accumulated": "two losses, add two losses",
    "beside a second model": "train, use a second model, train",
    "optimized again": "train, optimize again, train",
    "optimized again after an evaluation": "train, evaluate, optimize again, train",
    "failed in forward": "train, fail in forward, train",
    "failed first": "fail in forward, train",
    "interrupted in backward": "train, interrupt in backward, train",
    "interrupted first": "interrupt in backward, train",
    "all at once": "make AdamW, train short, add, step, evaluate, generate, fail in forward, train long, step",
}
_BEGINS_WITH_ANOTHER_LENGTH = ("longer first", "of many lengths", "accumulated with other lengths", "all at once")
"""A graph is partitioned for the length of its first call, and keeps that partition while it keeps the budget: what is
kept at another length may be less, or more, than a fresh process would choose (docs/design/plan.md, limits)."""


def ended(name: str) -> Callable[[Life], None]:
    """Return the steps of a life with a standard one behind them."""

    def run(life: Life) -> None:
        for step in LIVES[name].split(", "):
            STEPS[step](life)
        life.train()

    return run


def lived(name: str, budget: int | Literal["least"] | None, dtype: torch.dtype, inner: Any = "aot_eager") -> Life:
    torch._dynamo.reset()
    life = Life(budget, dtype, inner)
    ended(name)(life)
    return life


def fresh_plans(life: Life, name: str) -> Plans:
    """Of a model that has seen nothing but such a step, with the same optimizer and the same checkpoints."""
    optimizer = type(life.optimizers[0]) if life.optimizers else None
    return _fresh_plans(life.budget, life.dtype, life.inner, "checkpoint," in LIVES[name], optimizer)


@functools.cache
def _fresh_plans(
    budget: int | None,
    dtype: torch.dtype,
    inner: Any,
    is_checkpointed: bool,
    optimizer: type[torch.optim.Optimizer] | None,
) -> Plans:
    torch._dynamo.reset()
    life = Life(budget, dtype, inner)
    if is_checkpointed:
        life.checkpoint()
    if optimizer is not None:
        life.make_optimizer(optimizer)
        life.train()
        life.step()
    life.train()
    return life.plans()


def assert_kept(life: Life, name: str) -> None:
    """No step exceeded the budget; plans at the end are a fresh process's."""
    assert life.num_steps and (not isinstance(life.budget, int) or life.most_bytes <= life.budget)
    if LIVES[name].endswith("two losses"):  # that step is planned for both losses, the one after it for one
        life.train()
    assert name in _BEGINS_WITH_ANOTHER_LENGTH or life.plans() == fresh_plans(life, name)


@functools.cache
def budget_of_a_plain_life() -> int:
    budget = smallest_life(STEPS["train"]).budget
    assert budget is not None
    return budget


@pytest.mark.slow
def test_an_evaluation_does_not_change_what_training_may_use() -> None:
    budget = budget_of_a_plain_life()
    life = lived("evaluated", budget, torch.float32)
    assert life.most_bytes <= budget
    assert life.plans() == fresh_plans(life, "evaluated")


@pytest.mark.slow
def test_a_micro_batch_that_no_plan_holds_is_refused_before_it_begins_and_works_with_what_is_named() -> None:
    life = lived("plain", budget_of_a_plain_life(), torch.float32)
    before = {name: one.grad.clone() for name, one in life.model.named_parameters() if one.grad is not None}
    with pytest.raises(BudgetInfeasible) as refused:
        life.train(zero=False)
    after = {name: one.grad for name, one in life.model.named_parameters() if one.grad is not None}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    life = lived("accumulated", refused.value.minimum_bytes, torch.float32)
    assert life.most_bytes <= refused.value.minimum_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["optimized and accumulated", "of many lengths", "two losses", "checkpointed midway", "all at once"]
)
def test_a_life_keeps_its_smallest_budget_and_its_plans(name: str) -> None:
    assert_kept(smallest_life(ended(name)), name)


@pytest.mark.campaign
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LIVES)
def test_every_life_keeps_every_budget(name: str, dtype: torch.dtype) -> None:
    smallest = smallest_life(ended(name), dtype)
    assert isinstance(smallest.budget, int)
    assert_kept(smallest, name)
    for budget in (smallest.budget * 5 // 4, None):
        assert_kept(lived(name, budget, dtype), name)


_IN_COMPILED_CODE = (
    "evaluated", "accumulated", "optimized late", "of many lengths", "checkpointed midway", "two losses",
)  # fmt: skip


@pytest.mark.campaign
@pytest.mark.parametrize("name", _IN_COMPILED_CODE)
def test_without_a_budget_a_life_takes_hardly_more_than_where_nothing_is_kept(name: str) -> None:
    free, least = (lived(name, budget, torch.float32, "inductor") for budget in (None, "least"))
    assert free.most_bytes <= 1.02 * least.most_bytes


@pytest.mark.campaign
@pytest.mark.parametrize("name", _IN_COMPILED_CODE)
def test_lives_in_compiled_code_keep_their_budgets(name: str) -> None:
    smallest = smallest_life(ended(name), inner="inductor")
    assert isinstance(smallest.budget, int)
    for life in (smallest, lived(name, smallest.budget * 5 // 4, torch.float32, "inductor")):
        assert life.num_steps and isinstance(life.budget, int) and life.most_bytes <= life.budget
