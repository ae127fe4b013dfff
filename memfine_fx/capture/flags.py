"""Dynamo's flags for data-dependent shapes: tried at the first call, kept only where they help.

A loop over experts takes as many rows as the routing gives. Dynamo leaves such code out of the graph unless
told to capture it; told so, other code may fail to compile. So settings are tried from the most capable on:
a setting is left for the next as soon as compiling under it fails (backward graphs are compiled at once, so
that this shows in the forward), or as soon as it lets data-dependent shapes into a graph without a loop that is
raised (`LeftoverShapes`). The last setting is the user's own. What an abandoned
attempt ran is undone: random number generators and buffers are put back.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memfine_fx.capture.loops import RewrittenLoops
from memfine_fx.compat.dynamo import CAPTURE_FLAGS, capturing_more, compile_failures
from memfine_fx.errors import LeftoverShapes

__all__ = ["SETTINGS", "CapturingCall", "flags_set"]

log = logging.getLogger(__name__)

SETTINGS: tuple[tuple[str, ...], ...] = (
    ("capture_dynamic_output_shape_ops", "capture_scalar_outputs"),
    ("capture_dynamic_output_shape_ops",),
    (),
)
"""Flags to switch on, in the order of trying; the last is the user's own setting."""


@contextlib.contextmanager
def flags_set(setting: tuple[str, ...]) -> Iterator[None]:
    """Dynamo's flags of a setting switched on, for compilations inside."""
    if not setting:
        yield
        return
    with capturing_more(setting):
        yield


class CapturingCall:
    """A model's compiled call, under the first setting that works.

    Args:
        model: whose forward is compiled.
        compile_with: setting -> compiled callable; called once per setting tried.
        on_settled: told the setting, after each call that worked under a new one, and why the one before did not.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        compile_with: Callable[[tuple[str, ...]], Callable[..., Any]],
        on_settled: Callable[[tuple[str, ...], str | None], None],
    ) -> None:
        self._model = model
        self._compile_with = compile_with
        self._on_settled = on_settled
        self._rewritten = RewrittenLoops(model)
        self._place = 0
        self._is_settled = False
        self._failure: str | None = None
        self._compiled: Callable[..., Any] | None = None
        functools.update_wrapper(self, model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._place == 0 and not CAPTURE_FLAGS.holds():
            self._place = len(SETTINGS) - 1
        while True:
            setting = SETTINGS[self._place]
            if self._compiled is None:
                self._compiled = self._compile_with(setting)
            if not setting:
                return self._settled(self._compiled(*args, **kwargs))
            state = None if self._is_settled else _State(self._model)
            try:
                with flags_set(setting), self._rewritten.installed():
                    return self._settled(self._compiled(*args, **kwargs))
            except _compile_failures() as failure:
                log.info("capturing with %s did not help: %s", ", ".join(setting), failure)
                self._failure = str(failure).strip().splitlines()[0]
            if state is not None:
                state.restore()
            self._place, self._compiled, self._is_settled = self._place + 1, None, False

    def _settled(self, result: Any) -> Any:
        if not self._is_settled:
            self._is_settled = True
            self._on_settled(SETTINGS[self._place], self._failure)
        return result


def _compile_failures() -> tuple[type[Exception], ...]:
    """What compiling raises; what running raises is the user's to see."""
    return *compile_failures(), LeftoverShapes


class _State:
    """What a forward may change besides its result: generators and buffers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
