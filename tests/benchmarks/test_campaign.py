"""The campaign of faults: every kind is injected and survived, and what would be wrong is seen."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks.campaign import faults
from benchmarks.campaign.faults import FaultResult, Subject, run_faults

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*an allocation failed in a chunk:RuntimeWarning"),
    # `any` closes its generator, and Python drops what a fault raises there: the fault is one that nobody meets.
    pytest.mark.filterwarnings("ignore:Exception ignored in. <generator:pytest.PytestUnraisableExceptionWarning"),
]


def inject(subject: Subject, kinds: list[str], times: int = 2) -> FaultResult:
    result, draw = FaultResult(), random.Random(3)
    for number, kind in enumerate(kinds * times):
        faults._inject(number, kind, subject, draw, result)
    return result


def test_faults_of_every_kind_at_run_time_leave_nothing_wrong() -> None:
    subject = Subject("mixtral", "eager", num_layers=1)
    result = inject(subject, [kind for kind in faults._SHARES if kind != "compiler"])
    assert not result.failures and result.kinds.total() == 10
    assert 0 < result.num_survived < 10


def test_what_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject("mixtral", "eager", num_layers=1)
    rightly = subject.run

    def step_that_draws() -> None:
        torch.rand(1)
        rightly()

    monkeypatch.setattr(subject, "run", step_that_draws)
    (line,) = inject(subject, ["hook"], times=1).failures
    assert "changed generator of torch" in line

    def step_that_counts_twice() -> None:
        rightly()
        rightly()

    monkeypatch.setattr(subject, "run", step_that_counts_twice)
    point = faults._Failing
    monkeypatch.setattr(faults, "_Failing", lambda *_, **__: point())
    (line,) = inject(subject, ["hook"], times=1).failures
    assert "half a gradient of layers.0.gate.weight" in line
    monkeypatch.setattr(subject, "run", rightly)
    subject.expected["layers.0.gate.weight"] += 1
    (line,) = inject(subject, ["hook"], times=1).failures
    assert "the next step is" in line and "injected" not in line


def test_the_same_seed_draws_the_same_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, str]] = []
    monkeypatch.setattr(faults, "Subject", lambda *_, **__: Subject.__new__(Subject))
    monkeypatch.setattr(Subject, "fresh", lambda self: self)
    monkeypatch.setattr(faults, "_inject", lambda number, kind, *_: drawn.append((number, kind)))
    for seed in (7, 7, 8):
        run_faults(50, seed)
    assert drawn[:50] == drawn[50:100] != drawn[100:]


@pytest.mark.slow
def test_a_short_campaign_finds_nothing() -> None:
    result = run_faults(60, 1)
    assert not result.failures and "60 faults" in str(result)
