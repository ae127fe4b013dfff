"""The compiler's passes, in the order in which they run, and the one function that runs them.

`run_pass` times a pass, shows its subject before and after it to who dumps graphs, and skips it where it is disabled.
Any pass may be disabled: the step then computes the same, but saves less memory or time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeVar

from memfine_fx.config import PassName

__all__ = ["PASSES", "Pass", "PassObserver", "is_disabled", "observed_by", "run_pass"]

ResultT = TypeVar("ResultT")
Form = Literal["captured graph", "expert function", "joint graph", "generated kernels"]


@dataclass(frozen=True)
class Pass:
    """A pass of the compiler.

    Args:
        name: by which `Config.disable_passes` disables it.
        form: of the program that it works on.
        purpose: what it does.
        refuses: what it leaves as it is, or gives up.
    """

    name: PassName
    form: Form
    purpose: str
    refuses: str


PASSES: tuple[Pass, ...] = (
    Pass(
        "guards", "captured graph", "lets a loop run the body that it skips for an expert without rows",
        "a body whose effects for no rows are not proved to be nothing: the loop stays as written",
    ),
    Pass(
        "regions", "captured graph", "replaces each MoE region by memfine::route and memfine::experts",
        "layers whose rows are not proved to be independent, or that differ from the model's own code when compared",
    ),
    Pass(
        "heads", "captured graph", "replaces a projection and its cross-entropy by memfine::head_loss",
        "logits that anything else reads; losses of another form",
    ),
    Pass(
        "fold_weight", "expert function", "multiplies rows by the routing weight before the last projection",
        "functions whose result is not linear in the last projection's input",
    ),
    Pass(
        "low_rank", "expert function", "multiplies rows by the factors of a low-rank term, not by their product",
        "terms of a rank so large that the product costs less",
    ),
    Pass(
        "lift", "expert function", "runs the experts of a chunk in one grouped matmul, on CUDA in 16 bits",
        "functions with operators that have no grouped form: experts run one by one",
    ),
    Pass(
        "save_rows", "joint graph", "gives regions room to save what they compute of routed rows",
        "regions for which recomputing costs less than saving",
    ),
    Pass(
        "fuse_gradients", "joint graph", "lets a region add to its parameters' gradients in place",
        "gradients that the graph returns changed, or adds up of several results",
    ),
    Pass(
        "partition", "joint graph", "chooses what forward saves for backward",
        "what a policy of the user or of the model's checkpoints demands",
    ),
    Pass(
        "region_distance", "generated kernels", "keeps Inductor from fusing kernels across a region",
        "nothing; such kernels count as far apart",
    ),
    Pass(
        "kernel_order", "generated kernels", "runs each fused kernel in the place of its last member",
        "nothing; Inductor's own reordering runs afterwards",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class PassObserver:
    """Who watches passes run.

    Args:
        disabled: names of passes that are skipped.
        timed: counts the time within it under a name.
        note: called with the name of a pass, "before" or "after", and what it works on.
    """

    disabled: tuple[PassName, ...] = ()
    timed: Callable[[str], AbstractContextManager[None]] = lambda name: contextlib.nullcontext()
    note: Callable[[str, str, object], None] = lambda name, moment, subject: None


_NOBODY = PassObserver()
_observer: ContextVar[PassObserver] = ContextVar("observer", default=_NOBODY)


@contextlib.contextmanager
def observed_by(observer: PassObserver) -> Iterator[None]:
    """Have passes that run inside watched by an observer."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def is_disabled(name: PassName) -> bool:
    """Return whether a pass is to be skipped."""
    return name in _observer.get().disabled


def run_pass(name: PassName, subject: object, run: Callable[[], ResultT], otherwise: ResultT) -> ResultT:
    """Run a pass.

    Args:
        subject: the graph module that it may change, or the list of kernels that it orders.
        run: the pass.
        otherwise: returned where the pass is disabled.
    """
    observer = _observer.get()
    if name in observer.disabled:
        return otherwise
    observer.note(name, "before", subject)
    with observer.timed(name):
        result = run()
    observer.note(name, "after", result if isinstance(subject, list) else subject)
    return result
