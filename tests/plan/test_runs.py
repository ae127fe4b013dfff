"""What a run records of the gradients that were there before it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.weak import WeakIdRef

from memfine_fx.plan.runs import Caller, RunHistory
from tests.plan.deep_model import deep_model


@pytest.mark.parametrize("is_limited", [False, True])
@pytest.mark.parametrize("with_gradient", [0, 1])
def test_all_gradients_are_asked_for_where_bytes_decide_or_the_first_parameter_has_one(
    with_gradient: int, is_limited: bool
) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))]
    parameters[with_gradient].grad = torch.zeros(4)
    model, history = deep_model(1), RunHistory()
    caller = Caller(model, tuple(map(WeakIdRef, parameters)))
    run = history.begin(caller, model.step, {}, 0, is_limited=is_limited)
    assert run.gradient_bytes == (16 if is_limited or with_gradient == 0 else 0)
