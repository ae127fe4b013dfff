"""Say on stderr what takes long while it does, and silence what other packages write meanwhile.

Terms
    work    what takes long: compiling a model, a command
    stage   a part of a work

Works and stages are records of the logger "memfine_fx.progress" at INFO, which a program may handle itself. Where it
does not, `working` shows its work once that has taken a second, and `shown_stages` shows every stage of a command. A
terminal shows in its last line what is under way, other files have a line a minute. MEMFINE_QUIET=1 switches both off.

Nothing heavy is imported here: the first stage of a command is shown before torch is loaded, which takes seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TextIO

from memfine_fx.config import is_quiet

__all__ = ["shown_stages", "silenced_packages", "stage", "stages", "under_way", "unspoken", "working"]

stages = logging.getLogger("memfine_fx.progress")
_PATIENCE = 1.0  # seconds of a work of which nothing is said
_PACKAGES = ("torch", "transformers", "huggingface_hub", "peft", "bitsandbytes", "accelerate")
_QUIET = {
    "KINETO_LOG_LEVEL": "6",  # torch's profiler counts the scratch of kernels; below 6 it prints when it starts
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


class _Screen(logging.Handler):
    """A handler that writes records to stderr, and what is under way.

    Args:
        patience: seconds in which nothing is written; a screen that is closed within them writes nothing at all.
        prefix: of each line, given the seconds since the screen was opened.
    """

    def __init__(self, patience: float, prefix: Callable[[float], str]) -> None:
        super().__init__(logging.INFO)
        self.stage, self._latest = "", ""
        self._stream: TextIO = sys.stderr
        self._prefix, self._patience = prefix, patience
        self._begin = time.monotonic()
        self._waiting: list[str] | None = [] if patience else None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_showing, name="memfine_fx.progress", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; the handler's lock is held."""
        line = f"{self._prefix(time.monotonic() - self._begin)}{record.getMessage()}"
        self.stage, self._latest = "", record.getMessage().partition(";")[0]
        if self._waiting is not None:
            self._waiting.append(line)
        else:
            self._write(f"{self._erase}{line}\n")

    def end(self) -> None:
        """Stop showing what is under way."""
        self._closed.set()
        self._thread.join()
        self.close()

    @property
    def is_waiting(self) -> bool:
        """Whether nothing was written so far, because the patience is not over."""
        return self._waiting is not None

    @property
    def _is_terminal(self) -> bool:
        return self._stream.isatty() if hasattr(self._stream, "isatty") else False

    @property
    def _erase(self) -> str:
        return "\r\x1b[K" if self._is_terminal else ""

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed file is no reason to stop working
            self._stream.write(text)
            self._stream.flush()

    def _keep_showing(self) -> None:
        if self._closed.wait(self._patience):
            return
        with self.lock or contextlib.nullcontext():
            self._write("".join(f"{self._erase}{line}\n" for line in self._waiting or ()))
            self._waiting = None
        while not self._closed.wait(0.5 if self._is_terminal else 60):
            seconds = time.monotonic() - self._begin
            under_way = f"still {self.stage or self._latest} ({seconds:.0f} s)"
            with self.lock or contextlib.nullcontext():
                is_line = not self._is_terminal
                # A warning that another package writes begins where this line does.
                self._write(f"{self._prefix(seconds)}{under_way}\n" if is_line else f"{self._erase}  {under_way}\r")
        with self.lock or contextlib.nullcontext():
            self._write(self._erase)


_screen: _Screen | None = None
_num_works = 0
_is_muted = False


@contextlib.contextmanager
def working(title: str | Callable[[], str], done: str, outcome: Callable[[], str] = str) -> Iterator[None]:
    """Say that a work began once it has taken a second, and how long it took when it is done.

    A work within another one is a stage of it. One that raises ends without a word, because its error says more.

    Args:
        title: what is done, such as "compiling a model", or what returns it, called only where somebody listens.
        done: that it is done, such as "compiled"; its seconds follow.
        outcome: returns what came of it, "" for nothing to say.
    """
    global _num_works
    is_logged = stages.isEnabledFor(logging.INFO) and _is_written()
    is_shown = _screen is None and not is_logged and _speaks()
    if not (_num_works or is_logged or is_shown):
        yield
        return
    text = title if isinstance(title, str) else title()
    if _num_works:
        with stage(text):
            yield
        return
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        screen = _Screen(_PATIENCE, lambda seconds: "memfine_fx: ") if is_shown else None
        if screen is not None:
            stack.enter_context(_shown(screen))
        stages.info("%s", text)
        _num_works += 1
        try:
            yield
        finally:
            _num_works -= 1
        if screen is not None and screen.is_waiting:
            return  # what is said now is never written, so its outcome need not be computed
        seconds, came_of_it = time.monotonic() - begin, outcome()
        stages.info("%s in %.1f s%s", done, seconds, f": {came_of_it}" if came_of_it else "")


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Show inside the context, where something is shown, that this stage is under way."""
    screen = _screen
    if screen is None:
        yield
        return
    before, screen.stage = screen.stage, name
    try:
        yield
    finally:
        screen.stage = before


def under_way(name: str) -> None:
    """Show, where something is shown, that this part of the latest stage is under way."""
    if _screen is not None:
        _screen.stage = name


@contextlib.contextmanager
def unspoken() -> Iterator[None]:
    """Say nothing on stderr of works inside the context."""
    global _is_muted
    _is_muted = True
    try:
        yield
    finally:
        _is_muted = False


@contextlib.contextmanager
def shown_stages() -> Iterator[None]:
    """Write each stage inside the context to stderr, with the seconds since its begin."""
    if is_quiet():
        yield
        return
    with _shown(_Screen(0.0, lambda seconds: f"[{seconds:6.1f} s] ")):
        yield


@contextlib.contextmanager
def _shown(screen: _Screen) -> Iterator[None]:
    global _screen
    level, propagates = stages.level, stages.propagate
    stages.addHandler(screen)
    stages.setLevel(logging.INFO)
    stages.propagate = False  # a handler of the root would write them twice
    _screen = screen
    try:
        yield
    finally:
        _screen = None
        stages.removeHandler(screen)
        stages.setLevel(level)
        stages.propagate = propagates
        screen.end()


def _is_written() -> bool:
    """Return whether a handler of the program writes records of stages; many let only records of their own pass."""
    record = stages.makeRecord(stages.name, logging.INFO, __file__, 0, "", (), None)
    logger: logging.Logger | None = stages
    while logger is not None:
        if any(record.levelno >= handler.level and handler.filter(record) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _speaks() -> bool:
    """Return whether this process may write to stderr unasked: the first rank, and no test of another program."""
    if _is_muted or is_quiet():
        return False
    distributed = sys.modules.get("torch.distributed")
    is_initialized = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return not is_initialized or distributed.get_rank() == 0  # type: ignore[union-attr]  # it is there


@contextlib.contextmanager
def silenced_packages() -> Iterator[None]:
    """Load torch and transformers, and hide warnings and logs of other packages inside the context.

    Errors pass, and so do warnings of memfine_fx, those that PYTHONWARNINGS or -W asks for, and logs of TORCH_LOGS.
    """
    unset = {name: value for name, value in _QUIET.items() if name not in os.environ}
    os.environ.update(unset)
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as levels:
            if not sys.warnoptions:
                warnings.simplefilter("ignore")
                warnings.filterwarnings("default", message="memfine_fx")
            # Both set the levels of their loggers when they are imported.
            importlib.import_module("torch")
            with contextlib.suppress(ImportError):
                importlib.import_module("transformers.utils.logging")
            for name in _PACKAGES:
                if name != "torch" or "TORCH_LOGS" not in os.environ:
                    levels.enter_context(_errors_only(logging.getLogger(name)))
            yield
    finally:
        for name in unset:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _errors_only(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
