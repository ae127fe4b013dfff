"""What the interpreter knows and no host says: the model that runs, and the optimizers that exist."""

from __future__ import annotations

import gc
import sys
from types import CodeType, FrameType

import torch

from memfine_fx.compat.checks import Hook, expect

__all__ = ["FRAMES", "OBJECTS", "calling_code", "every_optimizer", "running_model"]


def running_model() -> torch.nn.Module | None:
    """The outermost module whose call is under way in this thread, None outside of any."""
    return _outermost_module() if FRAMES.holds() else None


def _outermost_module() -> torch.nn.Module | None:
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.nn.Module):
            found = caller
        frame = frame.f_back
    return found


def calling_code() -> CodeType:
    """The code that calls the function which asks."""
    return sys._getframe(2).f_code


def every_optimizer() -> list[torch.optim.Optimizer]:
    """Every optimizer of the process.

    NOTE: an optimizer is never registered anywhere, so the collector is asked, which takes a fraction of a second.
    """
    if not OBJECTS.holds():
        return []
    return [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]


_MOST_FROZEN = 10_000
"""Objects; `import torch` alone makes more than ten times as many."""


class _Probe(torch.nn.Module):
    def forward(self) -> torch.nn.Module | None:
        return _outermost_module()


def _check_frames() -> None:
    probe = _Probe()
    expect(probe() is probe, "the frame of a module's call does not hold the module")


def _check_objects() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    expect(gc.is_tracked(optimizer), "the collector does not know of optimizers")
    # Python 3.12 freezes a few hundred objects of its own at its start; what freezes an optimizer freezes all of torch.
    expect(gc.get_freeze_count() < _MOST_FROZEN, f"gc.freeze() hides {gc.get_freeze_count()} objects from it")


FRAMES = Hook(
    name="torch.nn.Module.__call__'s frame",
    host="torch",
    purpose="telling which of several models compiled by the backend's name is the one without regions",
    seen=("2.11", "2.15"),
    loss="Where several models are compiled by the backend's name, one of them without regions gets no warning of its "
    "own.",
    check=_check_frames,
)
OBJECTS = Hook(
    name="torch.optim.Optimizer among gc.get_objects()",
    host="torch",
    purpose="counting the state of optimizers that have not stepped yet",
    seen=("2.11", "2.15"),
    loss="Optimizers made before the first step are not seen, so a memory_budget is kept from the second step on, when "
    "their state is there.",
    check=_check_objects,
)
