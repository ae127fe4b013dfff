"""Shared fixtures."""

import pytest
import torch

from memfine_fx.compat import checks
from tests.rates import give_rates


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    """Each test compiles from scratch, with its own Dynamo state and a fixed seed, and hears every warning anew."""
    checks.forget_failures()
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _given_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans follow rates that are the same on every machine."""
    give_rates(monkeypatch.setattr)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh-golden", action="store_true", help="write tests/golden again")
