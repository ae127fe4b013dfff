"""Dynamo's flags for data-dependent shapes: tried at the first call, used only where they help.

A loop over experts takes as many rows as the routing gives. Dynamo leaves such code out of the graph unless
its flags are on; with them, other code may fail to compile. So settings are tried from the most capable on:
a setting is left for the next as soon as compiling under it fails (backward graphs are compiled at once, so
that this shows in the forward), or as soon as it lets data-dependent shapes into a graph without a loop that is
raised (`LeftoverShapes`). The last setting is the user's own.

What an abandoned attempt ran is undone (`capture/undo.py`), in the first call and in any later one that compiles again.
Later calls pay for that only when they compile: generators are read at each call's start (about a microsecond on a
host), the rest when the compiler asks for the call's first new graph. What ran before in this call was compiled by an
earlier one, which showed the buffers that it writes to; these few are copied at each call's start.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memfine_fx.capture.source import RewrittenLoops
from memfine_fx.capture.structure import FoundAgain
from memfine_fx.capture.undo import Contents, Generators, ModelState
from memfine_fx.compat.dynamo import capturing_more, compile_failures
from memfine_fx.compat.settings import CAPTURE_FLAGS
from memfine_fx.errors import GuardRefused, LeftoverShapes

__all__ = ["SETTINGS", "CapturingCall", "flags_set"]

log = logging.getLogger(__name__)

SETTINGS: tuple[tuple[str, ...], ...] = (
    ("capture_dynamic_output_shape_ops", "capture_scalar_outputs"),
    ("capture_dynamic_output_shape_ops",),
    (),
)
"""Flags to switch on, in the order of trying; the last is the user's own setting."""

_MOST_BYTES = 2**20
"""Of one buffer that is copied at each call's start."""


def flags_set(setting: tuple[str, ...]) -> contextlib.AbstractContextManager[object]:
    """Dynamo's flags of a setting switched on, for compilations inside."""
    return capturing_more(setting) if setting else contextlib.nullcontext()


class CapturingCall:
    """A model's compiled call, under the first setting that works.

    Args:
        model: whose forward is compiled.
        compile_with: (setting, note) -> compiled callable; called once per setting tried. `note` must be called
            whenever a graph is about to be compiled.
        on_settled: called after each call that worked under a new setting, with it and why the one before did not.
        on_refused: called with (module, place, reason) of each loop that skips experts and stays as it is written.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        compile_with: Callable[[tuple[str, ...], Callable[[], None]], Callable[..., Any]],
        on_settled: Callable[[tuple[str, ...], str | None], None],
        on_refused: Callable[[str, str, str], None],
    ) -> None:
        self._model = model
        self._compile_with = compile_with
        self._on_settled, self._on_refused = on_settled, on_refused
        self._refused: set[str] = set()
        self._rewritten = FoundAgain(model, self._rewrite)
        self._place = 0
        self._is_settled = False
        self._failure: str | None = None
        self._compiled: Callable[..., Any] | None = None
        self._written: tuple[torch.Tensor, ...] = ()
        self._calls = _Calls()
        functools.update_wrapper(self, model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._place == 0 and not CAPTURE_FLAGS.holds():
            self._place = len(SETTINGS) - 1
        while True:
            setting, place = SETTINGS[self._place], self._place
            if self._compiled is None:
                self._compiled = self._compile_with(setting, self._note_compilation)
            if not setting:
                return self._settled(self._compiled(*args, **kwargs))
            with flags_set(setting), self._rewritten.current().installed(), self._calls.entered(self._begun()) as begun:
                try:
                    result = self._compiled(*args, **kwargs)
                except _compile_failures() as failure:
                    begun.restore()
                    if self._leaves_method(failure):
                        continue
                    log.info("capturing with %s did not help: %s", ", ".join(setting), failure)
                    self._failure = str(failure).strip().splitlines()[0]
                else:
                    self._written = begun.written(self._written)
                    return self._settled(result)
            if place == self._place:  # another thread's call may have failed and gone on already
                self._place, self._compiled, self._is_settled = place + 1, None, False

    def _rewrite(self, model: torch.nn.Module) -> RewrittenLoops:
        rewritten = RewrittenLoops(model, self._refused)
        for module, left in rewritten.left:
            self._on_refused(module, left.where, left.reason)
        return rewritten

    def _leaves_method(self, failure: BaseException) -> bool:
        """Leave the method as it is written whose loop was refused; return whether it was rewritten before."""
        refusal = guard_refusal(failure)
        if refusal is None or refusal.where in self._refused:
            return False
        self._on_refused(refusal.module, refusal.where, refusal.reason)
        self._refused.add(refusal.where)
        self._rewritten, self._compiled = FoundAgain(self._model, self._rewrite), None
        return True

    def _begun(self) -> _Begun:
        begun = _Begun(self._model, self._written)
        if not self._is_settled:
            begun.keep_all()
        return begun

    def _note_compilation(self) -> None:
        for begun in self._calls.under_way():
            begun.keep_all()

    def _settled(self, result: Any) -> Any:
        if not self._is_settled:
            self._is_settled = True
            self._on_settled(SETTINGS[self._place], self._failure)
        return result


class _Begun:
    """A call under way, and how to undo it.

    Args:
        model: that is called.
        written: buffers that calls are known to write to.
    """

    def __init__(self, model: torch.nn.Module, written: tuple[torch.Tensor, ...]) -> None:
        self._model = model
        self._generators = Generators()
        self._contents = Contents(written)
        self._rest: ModelState | None = None

    def keep_all(self) -> None:
        """Remember all else that the call may change, before it runs code that no call has run."""
        if self._rest is None:
            self._rest = ModelState(self._model, attributes="buffers")

    def restore(self) -> None:
        if self._rest is not None:
            self._rest.restore()
        self._contents.restore()
        self._generators.restore()

    def written(self, known: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The buffers that are known to be written to, after this call; large ones (a cache of keys) are left out."""
        if self._rest is None:
            return known
        written_ids = {id(buffer) for buffer in (*known, *self._rest.changed())}
        return tuple(
            buffer for buffer in self._model.buffers() if id(buffer) in written_ids and buffer.nbytes <= _MOST_BYTES
        )


class _Calls(threading.local):
    """The calls of one thread that are under way, outermost first."""

    def __init__(self) -> None:
        self._stack: list[_Begun] = []

    @contextlib.contextmanager
    def entered(self, begun: _Begun) -> Iterator[_Begun]:
        self._stack.append(begun)
        try:
            yield begun
        finally:
            self._stack.pop()

    def under_way(self) -> tuple[_Begun, ...]:
        return tuple(self._stack)


def guard_refusal(failure: BaseException | None) -> GuardRefused | None:
    """Return the refusal of a loop that Dynamo wrapped in what it raised; None where it raised something else."""
    exceptions, visited = [failure], set()
    while exceptions:
        exception = exceptions.pop()
        if isinstance(exception, GuardRefused):
            return exception
        if exception is not None and id(exception) not in visited:  # one raised in a handler may lead back to it
            visited.add(id(exception))
            inner = getattr(exception, "inner_exception", None)
            exceptions += [exception.__context__, exception.__cause__, inner]
    return None


def _compile_failures() -> tuple[type[Exception], ...]:
    """Return the exceptions of a failed compilation. Those of the running model reach the user."""
    return *compile_failures(), LeftoverShapes
