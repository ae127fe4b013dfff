"""All sessions of this process, and the hook by which they learn of optimizers' steps.

MEMFINE_LOGS writes what the compiler found and planned to stderr (TORCH_TRACE has the same as records of a
compilation):

    MEMFINE_LOGS=passes,plans python train.py

`passes` names every region and refusal when its graph is compiled, `plans` every plan when it is chosen. Both are
loggers of Python's `logging` ("memfine_fx.passes", "memfine_fx.plans") at INFO, for programs that set up their own.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import weakref
from typing import TextIO

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memfine_fx.compat.checks import warn_outside_tested_range
from memfine_fx.compiler.reporting import log_first_step
from memfine_fx.compiler.session import Observer, Session
from memfine_fx.config import Config, log_names

__all__ = ["open_session", "sessions", "set_up_logs"]

_all_sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
_owners: weakref.WeakKeyDictionary[
    torch.optim.Optimizer, tuple[tuple[tuple[int, int], ...], weakref.WeakSet[Session]]
] = weakref.WeakKeyDictionary()
"""(number and revision of each session, sessions whose graphs read the optimizer's parameters) by optimizer."""
_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_lock = threading.Lock()
_session_numbers = itertools.count()


def sessions() -> list[Session]:
    """Return every living session of this process, oldest first."""
    return [session for _, session in sorted(_all_sessions.items())]


def open_session(
    config: Config,
    *,
    mode: str | None = None,
    holds_compiled: bool = False,
    observer: Observer | None = None,
    replays_routing: bool = False,
) -> Session:
    """Open a session, which lives as long as what holds it.

    Args:
        config, mode, holds_compiled, observer, replays_routing: see `Session`.
    """
    set_up_logs()
    warn_outside_tested_range()
    session = Session(config, mode, holds_compiled, observer or Observer(), replays_routing)
    if config.disable_passes:
        session.diagnostics.notes.append(f"disabled passes: {', '.join(config.disable_passes)}")
    with _lock:
        number = next(_session_numbers)
        if number == 0:
            register_optimizer_step_post_hook(_note_step)
        _all_sessions[number] = session
    return session


def _note_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Note a step of an optimizer in the sessions whose graphs read its parameters.

    The hook runs after every step of every optimizer in the process, so that the sessions are asked for their
    parameters only where they have new ones.
    """
    is_first = optimizer not in _stepped
    _stepped.add(optimizer)
    living = sorted(_all_sessions.items())
    revisions = tuple((number, session.steps.revision) for number, session in living)
    known = _owners.get(optimizer)
    if known is None or known[0] != revisions:
        ours = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        owners = weakref.WeakSet(session for _, session in living if session.steps.reads_any(ours))
        known = _owners[optimizer] = revisions, owners
    for session in list(known[1]):
        session.note_step(is_first=is_first)
        if is_first and session.observer.compiles:
            # Models compiled by the backend's name with equal options share a session.
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            part = session if session.holds_compiled else session.restricted_to(parameters)
            if part is not None and session.diagnostics.is_first_line(part.models):
                log_first_step(part)


_LOGS = {"passes": "memfine_fx.passes", "plans": "memfine_fx.plans"}


def set_up_logs() -> None:
    """Let the logs that MEMFINE_LOGS names reach stderr; calling it again changes nothing.

    Raises:
        ConfigError: MEMFINE_LOGS names something else.
    """
    for name in log_names(tuple(_LOGS)):
        logger = logging.getLogger(_LOGS[name])
        if not any(isinstance(handler, _Handler) for handler in logger.handlers):
            logger.addHandler(_Handler(sys.stderr))
            logger.setLevel(logging.INFO)


class _Handler(logging.StreamHandler[TextIO]):
    """A handler of memfine_fx, as a class of its own so that a user's handler is not taken for it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
