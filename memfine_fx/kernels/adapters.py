"""A layer's adapters in one pass: their narrow rows, what these add to the layer's products, and their gradients.

Of each adapter s (x A^T) B^T a window has narrow rows [R,r], of x or of what is activated and, in backward, of
gradients too (`low_rank`). Neither B A, which is as large as a table, nor its gradient is ever computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from memfine_fx.kernels.adapter_tables import Adapter
from memfine_fx.kernels.launches import Tiles
from memfine_fx.kernels.low_rank import narrow_product
from memfine_fx.kernels.sorting import Routing
from memfine_fx.kernels.tables import Layout, Tables, Term, Terms
from memfine_fx.kernels.tiling import AdapterTiles, LayerTiles
from memfine_fx.kernels.weight_gradient import TableGradients, weight_gradient
from memfine_fx.kernels.windows import Window

__all__ = ["AdapterGradients", "AdapterPass", "LayerAdapters"]


@dataclass(frozen=True)
class AdapterPass:
    """The settings that one forward or backward of a layer shares among its adapters.

    Args:
        routing: of the layer.
        capacity: rows of the largest window.
        tiles: of the layer's kernels.
        precision: of products of fp32, "ieee" or "tf32".
    """

    routing: Routing
    capacity: int
    tiles: LayerTiles
    precision: str

    def tiles_of(self, adapter: Adapter) -> AdapterTiles:
        return AdapterTiles.of(self.tiles, adapter.rank)


class _NarrowRows:
    """Buffers for one window's narrow rows of adapters, [capacity,r] each."""

    def __init__(self, adapters: Sequence[Adapter], run: AdapterPass, beside: torch.Tensor) -> None:
        self._run, self._adapters = run, adapters
        self._rooms = [beside.new_empty((run.capacity, adapter.rank)) for adapter in adapters]

    def write(self, number: int, rows: torch.Tensor, window: Window, *, is_gathered: bool) -> torch.Tensor:
        """Compute the narrow rows [R,r] of one adapter, from tokens [T,D] or from rows [R,D] of the window."""
        adapter, result = self._adapters[number], self._rooms[number].narrow(0, 0, window.num_rows)
        narrow_product(
            rows, adapter.first, adapter.scale, self._run.routing, window, result, self._run.tiles_of(adapter).narrow,
            self._run.precision, is_gathered=is_gathered,
        )  # fmt: skip
        return result


class LayerAdapters:
    """The adapters of gate and up, or both in one, and of down.

    Args:
        adapters: those of each projection, all or none, and that of down; or an empty sequence.
        layout: of the layer.
        run: of the pass.
        beside: a tensor of the rows' dtype and device.
    """

    def __init__(
        self, adapters: Sequence[Adapter | None], layout: Layout, run: AdapterPass, beside: torch.Tensor
    ) -> None:
        *projections, self.down = adapters or [None]
        self.projections = [adapter for adapter in projections if adapter is not None]
        self.layout, self.run = layout, run
        self.every = [*self.projections, *([] if self.down is None else [self.down])]
        self._narrow = _NarrowRows(self.every, run, beside)

    def narrow(self, hidden: torch.Tensor, window: Window) -> list[torch.Tensor]:
        """Compute the narrow rows of the projections' adapters."""
        return [self._narrow.write(at, hidden, window, is_gathered=True) for at in range(len(self.projections))]

    def of_projections(self, narrow: Sequence[torch.Tensor]) -> Terms | None:
        """Return the low-rank terms that are added to gate's and up's products, or None without adapters."""
        terms = [Term(rows, adapter.second) for rows, adapter in zip(narrow, self.projections, strict=True)]
        return Terms.of(terms, self.layout) if terms else None

    def of_down(self, activated: torch.Tensor, window: Window) -> list[Term]:
        """Return the low-rank terms that are added to the down projection of the activated rows [R,F]: one or none."""
        if self.down is None:
            return []
        return [Term(self._narrow.write(-1, activated, window, is_gathered=False), self.down.second)]


class AdapterGradients:
    """The narrow rows of gradients, and the gradients of the adapters' factors.

    Args:
        adapters: of the pass.
        into: views of the adapters' gradients, in the adapters' order; not written where nothing is trained.
        trains_projections, trains_down: whether adapters of gate and up are trained, and of down; False without any.
        are_added: for each factor, A before B, whether its gradient is added in place to an existing one.
        is_cut: whether a window may cut an expert.
        beside: as of `LayerAdapters`.
    """

    def __init__(
        self,
        adapters: LayerAdapters,
        into: Sequence[Adapter | None],
        are_added: Sequence[bool],
        beside: torch.Tensor,
        *,
        trains_projections: bool,
        trains_down: bool,
        is_cut: bool,
    ) -> None:
        self._adapters, self._run = adapters, adapters.run
        self.trains_projections, self.trains_down = trains_projections, trains_down
        # narrow' = s (y' @ B), and narrow' @ A goes on: factors that have changed places.
        self._turned = [Adapter(adapter.second.mT, adapter.first.mT, adapter.scale) for adapter in adapters.every]
        self._narrow = _NarrowRows(self._turned, self._run, beside)
        num_of_projections = 2 * len(adapters.projections)
        self._into = [
            _gradient_of_matrix(
                table, is_written=self.trains_projections if at < num_of_projections else self.trains_down,
                is_added=is_added, is_cut=is_cut,
            )
            for at, (table, is_added) in enumerate(zip(_factors(into), are_added, strict=True))
        ]  # fmt: skip

    def of_projections(self, rows: Sequence[torch.Tensor], window: Window) -> list[Term]:
        """Return the low-rank terms of the tokens' gradient, from gradients of each projection's products, [R,C]."""
        num_projections = len(self._adapters.projections)
        return [
            Term(self._narrow.write(at, rows[at], window, is_gathered=False), self._turned[at].second)
            for at in range(num_projections)
        ]

    def of_down(self, grad: torch.Tensor, window: Window) -> Term | None:
        """Return the low-rank term of the activated rows' gradient, from the gradient of the output [T,H].

        It is None where down has no adapter.
        """
        if self._adapters.down is None:
            return None
        return Term(self._narrow.write(-1, grad, window, is_gathered=True), self._turned[-1].second)

    def add_projections(
        self,
        window: Window,
        hidden: torch.Tensor,
        rows: Sequence[torch.Tensor],
        narrow: Sequence[torch.Tensor],
        turned: Sequence[Term],
    ) -> None:
        """Add a window's part to the gradients of gate's and up's factors.

        Args:
            hidden: [T,H].
            rows: gradients of each projection's products, [R,C].
            narrow: of `LayerAdapters.narrow`.
            turned: of `of_projections`.
        """
        for at, adapter in enumerate(self._adapters.projections):
            tiles, (first, second) = self._run.tiles_of(adapter), self._into[2 * at : 2 * at + 2]
            self._add(first, turned[at].rows, hidden, window, tiles.flat, is_gathered=True)
            self._add(second, rows[at], narrow[at], window, tiles.tall, is_gathered=False)

    def add_down(self, window: Window, grad: torch.Tensor, activated: torch.Tensor, turned: Term) -> None:
        """Add a window's part to the gradients of down's factors.

        Args:
            grad: of the output, [T,H].
            activated: [R,F].
            turned: of `of_down`.
        """
        (term,) = self._adapters.of_down(activated, window)
        tiles, (first, second) = self._run.tiles_of(self._turned[-1]).flat, self._into[-2:]
        self._add(first, turned.rows, activated, window, tiles, is_gathered=False)
        self._add(second, term.rows, grad, window, tiles, is_gathered=True)

    def _add(
        self,
        into: TableGradients,
        left: torch.Tensor,
        tokens: torch.Tensor,
        window: Window,
        tiles: Tiles,
        *,
        is_gathered: bool,
    ) -> None:
        routing = self._run.routing if is_gathered else replace(self._run.routing, top_k=0)
        weight_gradient([left], tokens, left, tokens, None, routing, window, into, tiles, self._run.precision)


def _factors(into: Sequence[Adapter | None]) -> list[torch.Tensor]:
    """Return the gradients of all factors as `weight_gradient` writes them: A and B of each, but B^T of down."""
    factors = [table for adapter in into[:-1] if adapter is not None for table in (adapter.first, adapter.second)]
    down = into[-1] if into else None
    return factors if down is None else [*factors, down.first, down.second.mT]


def _gradient_of_matrix(table: torch.Tensor, *, is_written: bool, is_added: bool, is_cut: bool) -> TableGradients:
    """Return the destination of the gradient of one matrix [E,C,D]."""
    tables = Tables(table, table, table.mT, projections=[table])
    return TableGradients.of(
        tables, has_projections=is_written, has_down=False, is_cut=is_cut, are_added=[is_added, False]
    )
