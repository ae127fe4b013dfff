"""Diagnostics of a session: notes, warnings, refusals of abandoned attempts, and the seconds of its stages."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from memfine_fx import progress
from memfine_fx.compat.dynamo import graph_breaks, num_frames
from memfine_fx.compat.settings import CAPTURE_FLAGS
from memfine_fx.errors import Reason
from memfine_fx.records import Refusal, Where

__all__ = ["Diagnostics"]

log = logging.getLogger(__name__)
_IN_WORDS = {
    "read": "reading the layers",
    "check": "comparing gradients with autograd's",
    "compare": "comparing layers with your code",
    "plan": "planning chunks",
    "heads": "looking for a head of a large vocabulary",
    "fit": "fitting what is saved into the budget",
    "further partitions": "partitioning for other budgets",
    "recompile": "compiling for other sizes",
}
"""Stages as the line of progress names them; any other is a pass."""


@dataclass(eq=False)
class Diagnostics:
    """Notes and warnings of a session, and the seconds of its stages.

    Args:
        notes: what was changed on the model or in Dynamo to capture it, for the report.
        hint: what to do about packed layers that keep experts out of the graphs, for the warning and the report.
        refused_in_attempts: why layers were not chunked in attempts under Dynamo flags, before these were given up.
        graph_breaks: Dynamo's reasons for graph breaks in calls of the session's model, and for frames it gave up on.
        stage_seconds: wall time spent in each stage of the pipeline ("read", "check", "plan", ...).
        has_warned: whether the session has warned that nothing was chunked.
        has_logged_first_step: whether it has logged what was chunked.
    """

    notes: list[str] = field(default_factory=list)
    hint: str = ""
    refused_in_attempts: list[Refusal] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    has_warned: bool = False
    has_logged_first_step: bool = False
    _has_warned_of_failure: bool = False
    _known_breaks: Counter[str] = field(default_factory=Counter)
    _num_known_frames: int = -1
    _logged_models: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    _warned_models: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    _seconds_within: float = 0.0

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Count the time within as the stage's, without that of stages within it."""
        started = time.perf_counter()
        before, self._seconds_within = self._seconds_within, 0.0
        try:
            with progress.stage(_IN_WORDS.get(stage, f"pass {stage}")):
                yield
        finally:
            spent = time.perf_counter() - started
            # Stages nest: seconds that those within have counted are theirs.
            own = spent - self._seconds_within
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + own
            self._seconds_within = before + spent

    @contextlib.contextmanager
    def noting_breaks(self) -> Iterator[None]:
        """Take the graph breaks of what Dynamo compiles within for those of the session's model."""
        if self._num_known_frames != num_frames():  # others compiled since: their breaks are not this model's
            self._known_breaks, self._num_known_frames = graph_breaks(), num_frames()
        try:
            yield
        finally:
            if self._num_known_frames != num_frames():
                counted = graph_breaks()
                # Attempts set these flags, and have refusals of their own.
                new = (
                    text
                    for text in counted - self._known_breaks
                    if not any(flag in text for flag in CAPTURE_FLAGS.values)
                )
                self.graph_breaks = list(dict.fromkeys([*self.graph_breaks, *new]))
                self._known_breaks, self._num_known_frames = counted, num_frames()

    def note_loop(self, module: str, place: str, obstacle: str) -> None:
        """Note that a loop which skips experts without rows stays as it is written.

        Args:
            module: whose code it is, as a path.
            place: "file:line" of what is in the way, or of the condition that skips an expert.
            obstacle: what is in the way.
        """
        where = Where(module, place)
        log.info("a loop stays as it is written: %s, at %s", obstacle, place)
        if all(refusal.where != where for refusal in self.refused_in_attempts):
            self.refused_in_attempts.append(Refusal(where, Reason.BODY_NOT_RUN, obstacle, ""))

    def is_first_line(self, models: Iterable[torch.nn.Module]) -> bool:
        """Return whether nobody has logged yet what was chunked of these models, and note that somebody does now.

        Args:
            models: none where they are not known: then the line is the first one of the session.
        """
        new = [model for model in models if model not in self._logged_models]
        is_first = bool(new) or not self.has_logged_first_step
        self.has_logged_first_step = True
        self._logged_models.update(new)
        return is_first

    def is_first_warning(self, model: torch.nn.Module | None) -> bool:
        """Return whether nobody has warned yet that nothing of a model was chunked, and note that somebody does now.

        Args:
            model: None for all models of the session.
        """
        if self.has_warned if model is None else model in self._warned_models:
            return False
        self.has_warned = True
        if model is not None:
            self._warned_models.add(model)
        return True

    def warn_of_failure(self, where: Where, message: str) -> None:
        """Log an allocation failure of one region; the first of the session is a warning too."""
        log.info("%s: %s", where, message)
        if not self._has_warned_of_failure:
            self._has_warned_of_failure = True
            warnings.warn(f"{where}: {message}", RuntimeWarning, stacklevel=2)
