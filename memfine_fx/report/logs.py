"""MEMFINE_LOGS: what the compiler found and planned, on stderr; TORCH_TRACE: the same as records of a compilation.

    MEMFINE_LOGS=passes,plans python train.py

`passes` names every region and refusal when its graph is compiled, `plans` every plan when it is chosen. Both are
loggers of Python's `logging` ("memfine_fx.passes", "memfine_fx.plans") at INFO, for programs that set up their own.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from memfine_fx.config import log_names

__all__ = ["set_up_logs"]

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
