"""All sessions of this process, and the hook by which they learn of optimizers' steps."""

from __future__ import annotations

import itertools
import threading
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memfine_fx.compat.checks import warn_outside_tested_range
from memfine_fx.compiler.observer import Observer
from memfine_fx.compiler.reporting import log_first_step
from memfine_fx.compiler.session import Session, sessions_of_optimizer
from memfine_fx.config import Config
from memfine_fx.report.logs import set_up_logs

__all__ = ["open_session", "sessions"]

_all_sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
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
) -> Session:
    """Open a session, which lives as long as what holds it.

    Args:
        config, mode, holds_compiled, observer: see `Session`.
    """
    set_up_logs()
    warn_outside_tested_range()
    session = Session(config, mode, holds_compiled, observer or Observer())
    if config.disable_passes:
        session.notes.append(f"disabled passes: {', '.join(config.disable_passes)}")
    with _lock:
        number = next(_session_numbers)
        if number == 0:
            register_optimizer_step_post_hook(_note_step)
        _all_sessions[number] = session
    return session


def _note_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Tell the sessions of its parameters; all sessions are asked at its first step only."""
    owners = sessions_of_optimizer.get(optimizer)
    is_first = optimizer not in _stepped
    # The hook runs after every step of every optimizer in the process, so the answer is kept.
    if owners is None:
        ours = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        owners = weakref.WeakSet(session for session in sessions() if session.reads_any(ours))
        sessions_of_optimizer[optimizer] = owners
    _stepped.add(optimizer)
    for session in list(owners):
        session.note_step(is_first=is_first)
        if is_first and session.observer.compiles and not session.has_logged_first_step:
            session.has_logged_first_step = True
            log_first_step(session)
