"""Forwards that stand on PEFT's wrapped tables for the time of a call, beside what others set there."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from memfine_fx.capture import adapters
from memfine_fx.capture.adapters import TracedAdapters
from memfine_fx.capture.installing import InstalledMethods


class ParamWrapper(nn.Module):
    """In the place of PEFT's class of this name, around a module without parametrizations."""

    parameter_name = "weight"

    def get_base_layer(self) -> nn.Module:
        return nn.Identity()


@pytest.fixture(autouse=True)
def peft(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def wrapped_tables(model: nn.Module) -> list[nn.Module]:
        return [one for one in model.modules() if type(one) is ParamWrapper]

    monkeypatch.setattr(adapters, "wrapped_tables", wrapped_tables)
    yield


def forward_of(module: nn.Module) -> object:
    return vars(module).get("forward")


def test_a_forward_that_somebody_else_set_stays_and_the_report_says_so() -> None:
    theirs, plain = ParamWrapper(), ParamWrapper()
    own = theirs.forward = lambda: "theirs"  # type: ignore[method-assign]
    traced = TracedAdapters(nn.ModuleList([theirs, plain]))
    with traced.installed():
        assert forward_of(theirs) is own and forward_of(plain) is not None
    assert forward_of(theirs) is own and forward_of(plain) is None
    assert traced.notes == ["1 adapters on expert weights have a forward of their own and run as it was set"]
    assert not TracedAdapters(plain).notes


def test_a_forward_set_later_or_inside_a_call_stays() -> None:
    module = ParamWrapper()
    traced = TracedAdapters(module)
    with traced.installed():
        own = module.forward = lambda: "set inside"  # type: ignore[method-assign]
    assert forward_of(module) is own
    with traced.installed():
        assert forward_of(module) is own
    assert forward_of(module) is own


def test_calls_inside_one_another_and_errors_leave_nothing() -> None:
    module = ParamWrapper()
    traced = TracedAdapters(module)
    with pytest.raises(KeyboardInterrupt), traced.installed():
        with traced.installed():
            inner = forward_of(module)
        assert forward_of(module) is inner is not None
        raise KeyboardInterrupt
    assert forward_of(module) is None


def test_methods_stay_until_the_last_thread_has_left() -> None:
    module = nn.Linear(2, 2)
    methods = InstalledMethods([(module, "forward", lambda self, x: x)])
    is_in, may_leave = threading.Event(), threading.Event()

    def call() -> None:
        with methods.installed():
            is_in.set()
            may_leave.wait(20)

    thread = threading.Thread(target=call)
    thread.start()
    assert is_in.wait(20)
    with methods.installed():
        pass
    assert forward_of(module) is not None
    may_leave.set()
    thread.join()
    assert forward_of(module) is None
    assert torch.equal(module(torch.zeros(2)), module.bias)
