"""Records of what a launch loads and stores, counted from its kernel's source; the counts are beside each kernel.

    elements    those of every program, so that an element that many programs read counts as often: traffic between L2
                and the units
    distinct    different elements of a tensor: the least that a device's memory gives, were its caches large enough

Both are exact for given rows by expert (tests/kernels/test_traffic.py counts them in the interpreter), except
for those of the sort, which are upper bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from memfine_fx.kernels.launches import Launch
from memfine_fx.kernels.windows import Window, ceil_div

__all__ = ["Access", "Load", "even_loads", "loads_of", "of_tiles"]


@dataclass(frozen=True)
class Access:
    """The loads, stores or atomic additions of one launch on one tensor.

    Args:
        argument: its name among the kernel's arguments.
        elements, distinct: see the module.
        kind: an atomic addition loads and stores.
    """

    argument: str
    elements: int
    distinct: int
    kind: Literal["load", "store", "atomic"] = "load"


@dataclass(frozen=True)
class Load:
    """The rows that routing gives a window.

    Args:
        counts: rows of each expert in the window.
        num_tokens: different tokens of these rows.
        has_first_token: whether token 0 is among them; tiles with rows to spare read it.
        num_empty: experts without rows in the whole layer.
        is_continued, is_cut: whether an expert's rows began in the window before, and go on in the next.
    """

    counts: tuple[int, ...]
    num_tokens: int
    has_first_token: bool = True
    num_empty: int = 0
    is_continued: bool = False
    is_cut: bool = False

    @property
    def num_rows(self) -> int:
        return sum(self.counts)

    @property
    def num_present(self) -> int:
        """Return how many experts have rows here."""
        return sum(count > 0 for count in self.counts)

    def num_tiles(self, tile_rows: int) -> int:
        return sum(ceil_div(count, tile_rows) for count in self.counts)

    def num_tokens_read(self, tile_rows: int) -> int:
        """Return how many different tokens the tiles read, rows to spare included."""
        has_spare = any(count % tile_rows for count in self.counts)
        return self.num_tokens + (has_spare and not self.has_first_token)


def loads_of(counts: Sequence[int], windows: Sequence[Window], num_tokens: int) -> Iterator[Load]:
    """Yield each window's load where expert e has counts[e] rows in the layer, of tokens drawn evenly.

    Args:
        num_tokens: T; a window of R rows has T (1 - (1 - 1/T)^R) different ones, at the mean.
    """
    for window in windows:
        start, here, is_continued, is_cut = 0, [], False, False
        for count in counts:
            begin, end = max(start, window.first), min(start + count, window.last)
            here.append(max(0, end - begin))
            is_continued |= start < window.first < start + count
            is_cut |= start < window.last < start + count
            start += count
        expected = round(num_tokens * (1 - (1 - 1 / num_tokens) ** sum(here))) if num_tokens else 0
        yield Load(
            tuple(here),
            expected,
            num_empty=sum(not count for count in counts),
            is_continued=is_continued,
            is_cut=is_cut,
        )


def even_loads(num_rows: int, num_experts: int, windows: Sequence[Window], num_tokens: int) -> list[Load]:
    """Return the loads of windows where every expert has as many rows, but for what does not divide."""
    each, more = divmod(num_rows, num_experts)
    return list(loads_of([each + (expert < more) for expert in range(num_experts)], windows, num_tokens))


def of_tiles(launch: Launch) -> Access:
    """Return the accesses to the offsets by a kernel whose programs all find their tile (`tile_search`)."""
    num_experts = launch.constants["NUM_EXPERTS"]
    num_programs = launch.grid[0] * launch.grid[1]
    return Access("offsets", (2 * num_experts + 2) * num_programs, num_experts + 1)
