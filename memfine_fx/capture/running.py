"""The model that runs: asked from inside a compiled graph, which knows its inputs and not whose they are."""

from __future__ import annotations

import sys
from types import FrameType

import torch

__all__ = ["running_model"]


def running_model() -> torch.nn.Module | None:
    """The outermost module whose call is under way in this thread, None outside of any."""
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.nn.Module):
            found = caller
        frame = frame.f_back
    return found
