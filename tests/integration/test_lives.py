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
from tests.integration.lives import STANDARD, Life, Plans, backward_of, fresh_model, smallest_life, tokens

Script = Callable[[Life], None]


@pytest.fixture(autouse=True)
def no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with autograd takes megabytes of its own (docs/reliability.md), as much as these models, in
    whichever step a kind of layer is first compiled in a process."""
    monkeypatch.setattr(regions, "check_gradients", lambda *_: "")


SHORT, LONG, WIDE = (2, 96), (2, 160), (3, 128)


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def plain(life: Life) -> None:
    life.train()


def evaluated(life: Life) -> None:
    life.train()
    life.evaluate()


def evaluated_in_inference_mode(life: Life) -> None:
    life.train()
    life.evaluate(torch.inference_mode)


def evaluated_with_gradients(life: Life) -> None:
    life.train()
    life.evaluate(torch.enable_grad)


def evaluated_first(life: Life) -> None:
    life.evaluate()
    life.train()


def evaluated_on_more(life: Life) -> None:
    life.train()
    life.evaluate(size=LONG)


def evaluated_often(life: Life) -> None:
    for size in (STANDARD, SHORT):
        life.train(size)
        life.evaluate(size=size)


def evaluated_with_gradients_first(life: Life) -> None:
    life.evaluate(torch.enable_grad)
    life.train()


def generated(life: Life) -> None:
    life.train()
    life.generate()


def generated_first(life: Life) -> None:
    life.generate()
    life.train()


def accumulated(life: Life) -> None:
    life.train()
    life.train(zero=False)


def accumulated_over_three(life: Life) -> None:
    for micro_batch in range(3):
        life.train(zero=micro_batch == 0)
    life.train()


def accumulated_after_an_evaluation(life: Life) -> None:
    life.train()
    life.evaluate()
    life.train(zero=False)


def accumulated_twice(life: Life) -> None:
    for _ in range(2):
        life.train()
        life.train(zero=False)


def accumulated_with_other_lengths(life: Life) -> None:
    life.train(SHORT)
    life.train(LONG, zero=False)
    life.train(zero=False)


def zeroed(life: Life) -> None:
    life.train()
    life.train(zero=None)


def shorter(life: Life) -> None:
    life.train()
    life.train(SHORT)


def longer(life: Life) -> None:
    life.train()
    life.train(LONG)


def longer_first(life: Life) -> None:
    life.train(LONG)
    life.train()


def wider(life: Life) -> None:
    life.train()
    life.train(WIDE)


def of_many_lengths(life: Life) -> None:
    for length in (96, 160, 112, 128):
        life.train((2, length))


def optimized_late(life: Life) -> None:
    life.train()
    life.make_optimizer()
    life.step()
    life.train()


def optimized_early(life: Life) -> None:
    life.make_optimizer()
    life.train()
    life.step()
    life.train()


def optimizer_swapped(life: Life) -> None:
    life.make_optimizer(sgd)
    life.train()
    life.step()
    life.make_optimizer()
    life.train()
    life.step()
    life.train()


def optimized_and_evaluated(life: Life) -> None:
    life.make_optimizer()
    for _ in range(2):
        life.train()
        life.step()
        life.evaluate()


def optimized_and_accumulated(life: Life) -> None:
    life.make_optimizer()
    for _ in range(2):
        life.train()
        life.train(zero=False)
        life.step()


def frozen(life: Life) -> None:
    life.train()
    life.freeze("experts")
    life.train()
    life.freeze("experts", frozen=False)


def frozen_first(life: Life) -> None:
    life.freeze("experts")
    life.train()
    life.freeze("experts", frozen=False)


def embedding_frozen(life: Life) -> None:
    life.train()
    life.freeze("embedding")
    life.train()
    life.train(zero=False)
    life.freeze("embedding", frozen=False)


def checkpointed_midway(life: Life) -> None:
    life.train()
    life.checkpoint()
    life.train()


def checkpointed_and_accumulated(life: Life) -> None:
    life.checkpoint()
    life.train()
    life.train(zero=False)


def two_losses(life: Life) -> None:
    life.train(losses=2)
    life.train(losses=2)


def two_losses_and_evaluated(life: Life) -> None:
    life.train(losses=2)
    life.evaluate()
    life.train()


def two_losses_accumulated(life: Life) -> None:
    life.train(losses=2)
    life.train(losses=2, zero=False)


def beside_a_second_model(life: Life) -> None:
    life.train()
    other = memfine_fx.optimize(fresh_model(life.dtype), inner_backend=life.inner, memory_budget=life.budget)
    backward_of(other, [tokens(SHORT)])
    life.train()


def optimized_again(life: Life) -> None:
    life.train()
    life.optimize()
    life.train()


def optimized_again_after_an_evaluation(life: Life) -> None:
    life.train()
    life.evaluate()
    life.optimize()
    life.train()


def failed_in_forward(life: Life) -> None:
    life.train()
    life.fail_in_forward()
    life.train()


def failed_first(life: Life) -> None:
    life.fail_in_forward()
    life.train()


def interrupted_in_backward(life: Life) -> None:
    life.train()
    life.interrupt_in_backward()
    life.train()


def interrupted_first(life: Life) -> None:
    life.interrupt_in_backward()
    life.train()


def all_at_once(life: Life) -> None:
    life.make_optimizer()
    life.train(SHORT)
    life.train(zero=False)
    life.step()
    life.evaluate()
    life.generate(2)
    life.fail_in_forward()
    life.train(LONG)
    life.step()


LIVES: tuple[Script, ...] = (
    plain,
    evaluated,
    evaluated_in_inference_mode,
    evaluated_with_gradients,
    evaluated_first,
    evaluated_on_more,
    evaluated_often,
    evaluated_with_gradients_first,
    generated,
    generated_first,
    accumulated,
    accumulated_over_three,
    accumulated_after_an_evaluation,
    accumulated_twice,
    accumulated_with_other_lengths,
    zeroed,
    shorter,
    longer,
    longer_first,
    wider,
    of_many_lengths,
    optimized_late,
    optimized_early,
    optimizer_swapped,
    optimized_and_evaluated,
    optimized_and_accumulated,
    frozen,
    frozen_first,
    embedding_frozen,
    checkpointed_midway,
    checkpointed_and_accumulated,
    two_losses,
    two_losses_and_evaluated,
    two_losses_accumulated,
    beside_a_second_model,
    optimized_again,
    optimized_again_after_an_evaluation,
    failed_in_forward,
    failed_first,
    interrupted_in_backward,
    interrupted_first,
    all_at_once,
)
_CHANGES_THE_MODEL = (checkpointed_midway, checkpointed_and_accumulated)
_BEGINS_WITH_ANOTHER_LENGTH = (longer_first, of_many_lengths, accumulated_with_other_lengths, all_at_once)
"""A graph is partitioned for the length of its first call, and keeps that partition while it keeps the budget: what is
kept at another length may be less, or more, than a fresh process would choose (docs/design/plan.md, limits)."""


def ended(script: Script) -> Script:
    def with_standard_step(life: Life) -> None:
        script(life)
        life.train()

    return with_standard_step


def lived(script: Script, budget: int | Literal["least"] | None, dtype: torch.dtype, inner: Any = "aot_eager") -> Life:
    """A life, ended by a standard step."""
    torch._dynamo.reset()
    life = Life(budget, dtype, inner)
    ended(script)(life)
    return life


_ENDS_WITH_TWO_LOSSES = (two_losses, two_losses_accumulated)
"""A step that begins like one with two losses is planned for both; the plan of one loss is back a step later."""


def fresh_plans(life: Life, script: Script) -> Plans:
    """Of a model that has seen nothing but such a step, with the same optimizer and the same checkpoints."""
    optimizer = type(life.optimizers[0]) if life.optimizers else None
    return _fresh_plans(life.budget, life.dtype, life.inner, script in _CHANGES_THE_MODEL, optimizer)


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


def assert_kept(life: Life, script: Script) -> None:
    """No step exceeded the budget; plans at the end are a fresh process's."""
    assert life.num_steps and (not isinstance(life.budget, int) or life.most_bytes <= life.budget)
    if script in _ENDS_WITH_TWO_LOSSES:
        life.train()
    assert script in _BEGINS_WITH_ANOTHER_LENGTH or life.plans() == fresh_plans(life, script)


@functools.cache
def budget_of_a_plain_life() -> int:
    budget = smallest_life(plain).budget
    assert budget is not None
    return budget


@pytest.mark.slow
def test_an_evaluation_does_not_change_what_training_may_use() -> None:
    budget = budget_of_a_plain_life()
    life = lived(evaluated, budget, torch.float32)
    assert life.most_bytes <= budget
    assert life.plans() == fresh_plans(life, evaluated)


@pytest.mark.slow
def test_a_micro_batch_that_no_plan_holds_is_refused_before_it_begins_and_works_with_what_is_named() -> None:
    life = lived(plain, budget_of_a_plain_life(), torch.float32)
    before = {name: one.grad.clone() for name, one in life.model.named_parameters() if one.grad is not None}
    with pytest.raises(BudgetInfeasible) as refused:
        life.train(zero=False)
    after = {name: one.grad for name, one in life.model.named_parameters() if one.grad is not None}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    life = lived(accumulated, refused.value.minimum_bytes, torch.float32)
    assert life.most_bytes <= refused.value.minimum_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [optimized_late, optimized_and_accumulated, of_many_lengths, two_losses, checkpointed_midway, all_at_once],
    ids=lambda script: script.__name__,
)
def test_a_life_keeps_its_smallest_budget_and_its_plans(script: Script) -> None:
    assert_kept(smallest_life(ended(script)), script)


@pytest.mark.campaign
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("script", LIVES, ids=lambda script: script.__name__)
def test_every_life_keeps_every_budget(script: Script, dtype: torch.dtype) -> None:
    smallest = smallest_life(ended(script), dtype)
    assert isinstance(smallest.budget, int)
    assert_kept(smallest, script)
    for budget in (smallest.budget * 5 // 4, None):
        assert_kept(lived(script, budget, dtype), script)


_IN_COMPILED_CODE = (evaluated, accumulated, optimized_late, of_many_lengths, checkpointed_midway, two_losses)


@pytest.mark.campaign
@pytest.mark.parametrize("script", _IN_COMPILED_CODE, ids=lambda script: script.__name__)
def test_without_a_budget_a_life_takes_hardly_more_than_where_nothing_is_kept(script: Script) -> None:
    free, least = (lived(script, budget, torch.float32, "inductor") for budget in (None, "least"))
    assert free.most_bytes <= 1.02 * least.most_bytes


@pytest.mark.campaign
@pytest.mark.parametrize(
    "script",
    _IN_COMPILED_CODE,
    ids=lambda script: script.__name__,
)
def test_lives_in_compiled_code_keep_their_budgets(script: Script) -> None:
    smallest = smallest_life(ended(script), inner="inductor")
    assert isinstance(smallest.budget, int)
    for life in (smallest, lived(script, smallest.budget * 5 // 4, torch.float32, "inductor")):
        assert life.num_steps and isinstance(life.budget, int) and life.most_bytes <= life.budget
