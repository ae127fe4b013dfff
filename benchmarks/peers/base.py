"""One interface for everything that is compared: a module in, a callable of its inputs out."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch

from benchmarks.records import Sizes

ROWS_PER_CHUNK = 2048

Forward = Callable[..., Any]
Wrap = Callable[[Any, Sizes], Forward]
# What backward computes again of the expert forward: nothing, the first projection, or all of it.
Recompute = Literal["nothing", "first projection", "forward"]


@dataclass(frozen=True)
class Peer:
    """One thing to compare.

    Args:
        name: how it is called on the command line and in tables.
        wrap: (module, sizes) -> forward. The module may be changed in place.
        recompute: what its backward computes again.
        is_compiled: whether a compiler runs in it.
        is_memfine: whether the code measured is this project's.
        missing: why it cannot run on a device ("cpu", "cuda") here, or None.
    """

    name: str
    wrap: Wrap
    recompute: Recompute = "nothing"
    is_compiled: bool = False
    is_memfine: bool = False
    missing: Callable[[str], str | None] = lambda device: None


def compiled(wrap: Wrap, *, dynamic: bool | None = None) -> Wrap:
    """What `wrap` makes, under torch.compile."""
    return lambda module, sizes: torch.compile(wrap(module, sizes), dynamic=dynamic)


def needs(*packages: str, cuda: bool = False) -> Callable[[str], str | None]:
    """A `missing` that asks for importable packages, and for a CUDA device where the kernels are only there."""

    def missing(device: str) -> str | None:
        if cuda and device != "cuda":
            return "its kernels need a CUDA device"
        absent = [package for package in packages if find_spec(package) is None]
        return f"{', '.join(absent)} not installed" if absent else None

    return missing


def num_token_chunks(hidden: torch.Tensor, sizes: Sizes) -> int:
    """Chunks of about ROWS_PER_CHUNK routed rows each, of tokens [batch, sequence, H]."""
    return max(1, hidden.shape[0] * hidden.shape[1] * sizes.top_k // ROWS_PER_CHUNK)
