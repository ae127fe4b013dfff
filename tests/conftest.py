"""Shared fixtures."""

import gc
from collections.abc import Iterator

import pytest
import torch

from memfine_fx.compat import checks
from memfine_fx.compiler import own_code
from tests.rates import give_rates

gc.get_freeze_count = lambda: 0
"""What is frozen below holds no optimizer that a later test asks for, so the search for them stays switched on."""
gc.set_threshold(100_000, 50, 100)
"""Captures allocate millions of objects that live briefly: a collection every 700 of them takes a sixth of the time."""


@pytest.fixture(scope="module", autouse=True)
def _earlier_objects_are_left_alone() -> None:
    """Collecting garbage and searching for optimizers look at every object: seconds, after hundreds of tests. Of those
    that earlier modules left behind none is looked at again.
    """
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_compiler(request: pytest.FixtureRequest) -> None:
    """Each test compiles from scratch, with its own Dynamo state and a fixed seed, and hears every warning anew.

    Each capture fills torch's cache of fake tensors, which checks what it takes in and is seldom asked for by layers as
    small as these: a third of the fast tests' time. Slow tests have it, as users do.
    """
    checks.forget_failures()
    torch._dynamo.config.fake_tensor_cache_enabled = request.node.get_closest_marker("slow") is not None
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _given_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans follow rates that are the same on every machine."""
    give_rates(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def _without_own_code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are compared with their own code in tests that ask for it: elsewhere the tests themselves compare, and a
    second capture of each layer would take a third of their time.
    """
    if request.node.get_closest_marker("own_code") is None:
        monkeypatch.setattr(own_code, "compare_with_own_code", lambda graph, outcomes, *_: list(outcomes))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh-golden", action="store_true", help="write tests/golden again")


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    """Tensors that name no dtype are of float64, so that a wrong result is no rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
