"""Every rule against its operator on numbers: what a value claims is what the operator gives.

Each sample is read by the real reader and run on numbers; all its calls are compared, their arguments too. A sample
that must be refused is refused by the rule itself: its operands were understood.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memfine_fx.passes.read.rules import RULES
from memfine_fx.passes.read.values import Unknown
from tests.passes.read.operators import OPERATORS, POINTWISE
from tests.passes.read.routings import ROUTINGS
from tests.passes.read.samples import Sample
from tests.passes.read.walks import Heard, Walk, walk


def test_every_rule_has_a_sample_that_claims_numbers() -> None:
    assert set(OPERATORS) == set(RULES)
    assert all(any(sample.says is not None for sample in samples) for samples in OPERATORS.values())


@pytest.mark.parametrize("target", [*OPERATORS, *POINTWISE], ids=str)
def test_a_rule_says_what_its_operator_gives(target: Any) -> None:
    for number, sample in enumerate((OPERATORS | POINTWISE)[target]):
        for name in sample.routings:
            try:
                _check(target, sample, walk(sample.layer, ROUTINGS[name]))
            except AssertionError as wrong:
                raise AssertionError(f"{target}, sample {number}, {name} routing: {wrong}") from wrong


def _check(target: Any, sample: Sample, walked: Walk) -> None:
    counts = [walked.check(heard, call) for heard, call in walked.calls]
    places = [place for place, (heard, _) in enumerate(walked.calls) if heard.call.target is target]
    assert places, f"it was not called, but {[str(heard.call.target) for heard, _ in walked.calls]}"
    heard, _ = walked.calls[places[-1]]
    if sample.says is None:
        _check_refusal(heard, sample.reason)
    elif isinstance(heard.call.out, (torch.Tensor, tuple, list)):
        assert isinstance(heard.results[0], sample.says), f"it is {heard.results[0]}"
        assert sample.is_silent is (counts[places[-1]] == 0), f"{counts[places[-1]]} numbers are claimed"


def _check_refusal(heard: Heard, reason: str) -> None:
    unknown = heard.results[0]
    assert isinstance(unknown, Unknown), f"it is {unknown}"
    assert not any(isinstance(value, Unknown) for value in heard.operands), f"its operands are {heard.operands}"
    assert reason in unknown.refusal.details, unknown.refusal.details
