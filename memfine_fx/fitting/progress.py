"""Show on stderr the stage that an answer of `fit` has reached, and silence what other packages write meanwhile.

Stages are records of the logger "memfine_fx.fit" at INFO, which a program may handle itself. Nothing heavy is imported
here: the first stage is shown before torch is loaded, which takes seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator

__all__ = ["shown_stages", "silenced_packages", "stages"]

stages = logging.getLogger("memfine_fx.fit")
_PACKAGES = ("torch", "transformers", "huggingface_hub", "peft", "bitsandbytes", "accelerate")
_QUIET = {
    "KINETO_LOG_LEVEL": "6",  # torch's profiler counts the scratch of kernels; below 6 it prints when it starts
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


class _Stderr(logging.Handler):
    """A handler that writes each stage with the seconds since the first."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._begin = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        print(f"[{time.monotonic() - self._begin:6.1f} s] {record.getMessage()}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def shown_stages() -> Iterator[None]:
    """Write stages to stderr inside the context."""
    handler, level, propagates = _Stderr(), stages.level, stages.propagate
    stages.addHandler(handler)
    stages.setLevel(logging.INFO)
    stages.propagate = False  # a handler of the root would write them twice
    try:
        yield
    finally:
        stages.removeHandler(handler)
        stages.setLevel(level)
        stages.propagate = propagates


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
