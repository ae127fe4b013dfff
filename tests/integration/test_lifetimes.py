"""Nothing of ours outlives its model: not its graphs, plans and bodies, and no entry in a list of torch's."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch

import memfine_fx
from memfine_fx.compiler.sessions import open_session, sessions
from memfine_fx.config import Config
from tests.integration.lives import TinyLM, backward_of, fresh_model, tokens

BATCH = tokens((2, 64))
BUDGET = 10_000_000
EAGER, UNFUSED = Config(inner_backend="eager"), Config(inner_backend="aot_eager")


def optimized(model: TinyLM) -> None:
    memfine_fx.optimize(model, memory_budget=BUDGET, config=UNFUSED)


def named(model: TinyLM) -> None:
    model.compile(backend="memfine", options={"config": UNFUSED, "memory_budget": BUDGET})


def explained(model: TinyLM) -> None:
    memfine_fx.explain(model, BATCH, BATCH, config=EAGER)


def measured(model: TinyLM) -> None:
    memfine_fx.explain(model, BATCH, BATCH, measure=True, config=UNFUSED)


def verified(model: TinyLM) -> None:
    memfine_fx.verify(model, BATCH, BATCH, config=EAGER)


def own_objects() -> Counter[str]:
    gc.collect()
    kinds = [type(one) for one in gc.get_objects()]
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("memfine_fx"))


def cycle(use: Callable[[TinyLM], None]) -> None:
    """A model that is made, used, trained for a step and given up."""
    model = fresh_model(torch.float32)
    use(model)
    backward_of(model, [BATCH])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("use", [optimized, explained], ids=lambda use: use.__name__)
def test_a_model_leaves_nothing_behind(use: Callable[[TinyLM], None]) -> None:
    cycle(use)
    before = own_objects()
    cycle(use)
    assert own_objects() - before == Counter()


@pytest.mark.slow
@pytest.mark.parametrize("use", [optimized, named, explained, measured, verified], ids=lambda use: use.__name__)
def test_many_models_leave_nothing_behind(use: Callable[[TinyLM], None]) -> None:
    cycle(use)
    before = own_objects()
    for _ in range(6):
        cycle(use)
    assert own_objects() - before == Counter()


def test_an_optimizer_tells_only_the_sessions_of_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh_model(torch.float32)
    memfine_fx.optimize(model, config=UNFUSED)
    others = [open_session(Config()) for _ in range(3)]
    backward_of(model, [BATCH])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[object] = []
    monkeypatch.setattr("memfine_fx.compiler.session.Session.note_step", lambda session, is_first: told.append(session))
    for _ in range(2):
        optimizer.step()
    assert len(told) == 2 and not any(one in others for one in told)
    assert all(one in sessions() for one in others)
