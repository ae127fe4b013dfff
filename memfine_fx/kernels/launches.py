"""Every launch of a kernel goes through `launch`, so that launches can be counted and compiled without a device."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections import deque
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Launch", "Tiles", "has_triton", "launch", "recording", "skipping"]


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class Tiles:
    """Sizes of a program's tile and how it is compiled.

    Args:
        rows, columns: of the tile that it writes.
        depth: of one step of its loop.
        num_warps, num_stages: Triton's options of these names.
        group_rows: tiles of rows that are computed at once (`tile_search.place_of`); a weight gradient has none.
        by_descriptor: whether blocks come by descriptors where tensors allow it (`blocks`).
    """

    rows: int
    columns: int
    depth: int
    num_warps: int = 4
    num_stages: int = 3
    group_rows: int = 16
    by_descriptor: bool = False


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel with its grid, arguments and compile-time constants.

    Args:
        kernel: a function under `triton.jit`.
        grid: number of programs by axis.
        arguments: its run-time arguments by name: tensors, descriptors of tensors or None, numbers.
        constants: its compile-time constants by name.
        num_warps, num_stages: Triton's options.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        return str(self.kernel.__name__).strip("_")

    def run(self) -> None:
        if 0 in self.grid:
            return
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
        # Triton launches on the current device, which need not be the one that holds the tensors.
        with self._device():
            self.kernel[self.grid](**self.arguments, **self.constants, **options)

    def _device(self) -> contextlib.AbstractContextManager[object]:
        device = next(argument.device for argument in self.arguments.values() if isinstance(argument, torch.Tensor))
        return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


_recorded: ContextVar[list[Launch] | deque[Launch] | None] = ContextVar("_recorded", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Record the launches of the `with` block in the list that this yields; none of them runs."""
    launches: list[Launch] = []
    with _instead(launches):
        yield launches


@contextlib.contextmanager
def skipping() -> Iterator[None]:
    """Neither run nor record the launches of the `with` block.

    Their arguments thus live no longer than in a step.
    """
    with _instead(deque(maxlen=0)):
        yield


@contextlib.contextmanager
def _instead(launches: list[Launch] | deque[Launch]) -> Iterator[None]:
    token = _recorded.set(launches)
    try:
        yield
    finally:
        _recorded.reset(token)


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], constants: Mapping[str, Any], tiles: Tiles
) -> None:
    """Launch `kernel`, or record the launch under `recording`."""
    new_launch = Launch(kernel, grid, arguments, constants, tiles.num_warps, tiles.num_stages)
    recorded = _recorded.get()
    if recorded is None:
        new_launch.run()
    else:
        recorded.append(new_launch)
