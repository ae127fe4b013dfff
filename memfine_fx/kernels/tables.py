"""The experts' tables as the kernels read them: three matrices an expert, wherever they are in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

import torch

from memfine_fx.compat.tensors import FakeTensor
from memfine_fx.kernels.adapter_tables import (
    AdapterForms,
    num_adapter_params,
)
from memfine_fx.runtime.routing import sent

__all__ = [
    "LAYOUTS",
    "Activation",
    "ActivationName",
    "KernelForm",
    "Layout",
    "ListTable",
    "Pointwise",
    "Sources",
    "Table",
    "Tables",
    "Term",
    "Terms",
    "TileSource",
    "TileTable",
    "are_projections",
    "divided",
    "has_up",
    "num_projections_of",
    "standing",
    "trained_parts",
]


@dataclass(frozen=True)
class Pointwise:
    """An activation that has no name here, as Triton source (`kernels.epilogue`).

    Args:
        source: `forward(gate, up)`, the result, and `backward(gate, up, grad)`, both gradients, of fp32 tiles.
        has_up: whether it reads `up`.
    """

    source: str
    has_up: bool


ActivationName = Literal["swiglu", "geglu", "geglu_exact", "clamped", "relu2"]
Activation = ActivationName | Pointwise
"""See `memfine_fx.kernels.activation`."""

Layout = Literal["apart", "apart_in_out", "halves", "halves_in_out", "interleaved_in_out", "single", "single_in_out"]
"""How the parameters hold them, matrices of E experts in front:

    apart               gate [F,H], up [F,H], down [H,F]
    apart_in_out        gate [H,F], up [H,F], down [F,H]
    halves              gate and up [2F,H] one after the other, down [H,F]
    halves_in_out       gate and up [H,2F] one after the other, down [F,H]
    interleaved_in_out  gate and up [H,2F] column by column, down [F,H]
    single              gate [F,H] and no up, down [H,F]
    single_in_out       gate [H,F] and no up, down [F,H]

Where experts have biases, those follow in the same order: of one or both projections, then [H] of down; a bias of gate
and up in one is [2F], divided as the columns are.
"""
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
_APART = ("apart", "apart_in_out")
_SINGLE = ("single", "single_in_out")
_OUT_IN = ("apart", "halves", "single")


@dataclass(frozen=True)
class TileSource:
    """The source by which kernels compute a table tile by tile, from packed numbers for instance; see
    `computed_tables`.

    Args:
        source: Triton source of `entries(parts, expert, row, column, is_entry)`, entries of an expert's matrix at rows
            and columns that broadcast to each other, finite where they are not entries.
        shape: of an expert's matrix, whose rows and columns these are.
        num_tensors: how many parameters it is computed from, [E,...] each and contiguous: `parts`, then `codes`.
        codes: numbers that `entries` looks up, in fp32.
    """

    source: str
    shape: tuple[int, int]
    num_tensors: int
    codes: tuple[float, ...] = ()


@dataclass(frozen=True)
class TileTable:
    """A table [E,C,D], or a part of its rows, that exists only tile by tile and has no gradient.

    Args:
        tensors: those that `how` reads, its codes included.
        shape: of this view.
        firsts, steps: of the matrix's rows and columns, which are the view's: the n-th is first + step n.
        is_turned: whether the view's rows are the matrix's columns.
    """

    how: TileSource
    tensors: tuple[torch.Tensor, ...]
    shape: tuple[int, int, int]
    firsts: tuple[int, int] = (0, 0)
    steps: tuple[int, int] = (1, 1)
    is_turned: bool = False

    @staticmethod
    def of(how: TileSource, tensors: Sequence[torch.Tensor]) -> TileTable:
        """Return the table that a source computes from these tensors.

        Raises:
            ValueError: they are not as many, not of as many experts, or not contiguous.
        """
        experts = {tensor.shape[0] for tensor in tensors}
        if (
            len(tensors) != how.num_tensors
            or len(experts) != 1
            or not all(tensor.is_contiguous() for tensor in tensors)
        ):
            raise ValueError(f"a table is computed from {how.num_tensors} contiguous tensors of its experts")
        codes = [_codes(how.codes, tensors[0].device)] if how.codes else []
        return TileTable(how, (*tensors, *codes), (experts.pop(), *how.shape))

    def stride(self, axis: int) -> int:
        """Return 0, since the entries are not in memory."""
        return 0

    @property
    def mT(self) -> TileTable:
        num_experts, rows, columns = self.shape
        return replace(self, shape=(num_experts, columns, rows), is_turned=not self.is_turned)

    def rows(self, first: int, number: int, step: int = 1) -> TileTable:
        """Return a view of `number` of this view's rows from `first` on, each `step` behind the one before."""
        num_experts, _, columns = self.shape
        firsts, steps, own = list(self.firsts), list(self.steps), int(self.is_turned)
        firsts[own] += steps[own] * first
        steps[own] *= step
        shape = (num_experts, number, columns)
        return replace(self, shape=shape, firsts=(firsts[0], firsts[1]), steps=(steps[0], steps[1]))


@dataclass(frozen=True)
class ListTable:
    """A table [E,C,D], or a part of its rows, of which each expert's matrix is a tensor of its own.

    Args:
        addresses: [E] int64 on the device, of each expert's first entry of this view.
        tensors: the experts' matrices, whose addresses these are.
        shape, strides: of this view; of experts 0.
        is_aligned: whether every address is a multiple of 16 bytes.
    """

    addresses: torch.Tensor
    tensors: tuple[torch.Tensor, ...]
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    is_aligned: bool

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> ListTable:
        """Return the table of these experts' matrices.

        Raises:
            ValueError: they are not matrices of one shape, dtype and strides.
        """
        first = tensors[0]
        if (
            first.ndim != 2
            or len({(tensor.shape, tensor.dtype, tensor.stride(), tensor.device) for tensor in tensors}) != 1
        ):
            raise ValueError("the experts of a list have matrices of one shape, dtype and strides")
        places = [0 if isinstance(tensor, FakeTensor) else tensor.data_ptr() for tensor in tensors]
        if isinstance(first, FakeTensor):  # stands nowhere, as its addresses do
            addresses = first.new_empty(len(places), dtype=torch.int64)
        else:
            addresses = sent(torch.tensor(places, dtype=torch.int64), first.device)
        (rows, columns), (row, column) = first.shape, first.stride()
        shape, strides = (len(tensors), rows, columns), (0, row, column)
        is_aligned = all(place % _ALIGNMENT == 0 for place in places)
        return ListTable(addresses, tuple(tensors), shape, strides, is_aligned)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    def stride(self, axis: int) -> int:
        return self.strides[axis]

    @property
    def mT(self) -> ListTable:
        (experts, rows, columns), (_, row, column) = self.shape, self.strides
        return replace(self, shape=(experts, columns, rows), strides=(0, column, row))

    def rows(self, first: int, number: int, step: int = 1) -> ListTable:
        """Return a view of `number` of this view's rows from `first` on, each `step` behind the one before."""
        (experts, _, columns), (_, row, column) = self.shape, self.strides
        offset = first * row * self.dtype.itemsize
        return replace(
            self, addresses=self.addresses + offset if offset else self.addresses, shape=(experts, number, columns),
            strides=(0, row * step, column), is_aligned=self.is_aligned and offset % _ALIGNMENT == 0,
        )  # fmt: skip


_ALIGNMENT = 16  # bytes


TableT = TypeVar("TableT", torch.Tensor, "Table")
Table = torch.Tensor | TileTable | ListTable
"""A table [E,C,D] of numbers in memory, or computed tile by tile."""
Param = torch.Tensor | ListTable
"""A parameter as the kernels' layer takes it."""


def standing(table: Table) -> torch.Tensor:
    """Return a table whose numbers are in one tensor, as references take it.

    Raises:
        ValueError: it is computed by tiles, or a list.
    """
    if not isinstance(table, torch.Tensor):
        raise ValueError(f"a table {list(table.shape)} that is computed by tiles, or of a list, is no tensor")
    return table


def _codes(codes: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return the codes as a tensor, created once for a device, since a copy to it is waited for.

    Fake tensors, which compilations create, are not cached.
    """
    key = codes, device
    codes_tensor = _kept_codes.get(key)
    if codes_tensor is None:
        codes_tensor = torch.tensor(codes, dtype=torch.float32, device=device)
    if not isinstance(codes_tensor, FakeTensor):
        _kept_codes[key] = codes_tensor
    return codes_tensor


_kept_codes: dict[tuple[tuple[float, ...], torch.device], torch.Tensor] = {}


@dataclass(frozen=True)
class Term:
    """A low-rank term that is added to a window's product: rows [R,r] times matrices [E,C,r] of their experts."""

    rows: torch.Tensor
    matrix: torch.Tensor


@dataclass(frozen=True)
class Terms:
    """The low-rank terms of gate's and up's products; of the same strides, as the tables are.

    Args:
        projections: the term of each parameter that holds them, in its columns' order.
        gate, up: the term of each, the same where there is no up projection.
    """

    projections: Sequence[Term]
    gate: Term
    up: Term

    @staticmethod
    def of(projections: Sequence[Term], layout: Layout) -> Terms:
        gate, up = divided([term.matrix for term in projections], layout)
        return Terms(projections, Term(projections[0].rows, gate), Term(projections[-1].rows, up))


@dataclass(frozen=True)
class KernelForm:
    """The form of an expert function that the kernels compute.

    Args:
        layout: of its parameters.
        positions: where gate and up, or both in one, down, the biases and the adapters' factors are among the
            parameters; all tensors that one is computed from, one after the other.
        activation: between the projections.
        has_bias: whether every projection has one.
        sources: for gate and up, or both in one, and down, how each is computed, or None where it is a parameter;
            empty where all are.
        adapters: their low-rank terms.
        is_list: whether each expert's matrices are tensors of their own; then there is nothing but matrices.
    """

    layout: Layout
    positions: tuple[int, ...]
    activation: Activation = "swiglu"
    has_bias: bool = False
    sources: Sources = ()
    adapters: AdapterForms = ()
    is_list: bool = False

    @property
    def has_up(self) -> bool:
        return has_up(self.activation)

    @property
    def num_own(self) -> int:
        """Return how many of the positions, in front, are not of adapters' factors."""
        return len(self.positions) - num_adapter_params(self.adapters)

    @property
    def computed_positions(self) -> frozenset[int]:
        """Return the positions of the parameters that tables are computed from by tiles."""
        counts = counts_of(self.layout, self.sources)
        firsts = [sum(counts[:place]) for place in range(len(counts))]
        of_each = zip(firsts, counts, self.sources, strict=True) if self.sources else ()
        return frozenset(
            self.positions[first + place] for first, count, how in of_each if how is not None for place in range(count)
        )

    def width(self, shape_of: Callable[[int], Sequence[int]]) -> int:
        """Return F, the length of the rows between the projections.

        Args:
            shape_of: of the parameter at a position, experts in front.
        """
        how = self.sources[-1] if self.sources else None
        counts = counts_of(self.layout, self.sources)
        first, second = how.shape if how is not None else shape_of(self.positions[sum(counts[:-1])])[1:]
        return int(second if self.layout in _OUT_IN else first)


Sources = tuple[TileSource | None, ...]


@dataclass(frozen=True)
class Tables:
    """Views of a layer's parameters, or of their gradients.

    Args:
        gate, up: [E,F,H], of the same strides; the same where there is no up projection.
        down: [E,H,F].
        gate_bias, up_bias: [E,F], of the same strides, or None.
        down_bias: [E,H], or None.
        projections: gate and up, or [E,2F,H] where one parameter holds both, or gate alone.
        projection_biases: their biases, [E,F] or [E,2F]; none where there are no biases.
    """

    gate: Table
    up: Table
    down: Table
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    projections: Sequence[Table] = ()
    projection_biases: Sequence[torch.Tensor] = ()

    @property
    def num_experts(self) -> int:
        return self.gate.shape[0]

    @property
    def width(self) -> int:
        return self.gate.shape[1]

    @property
    def hidden(self) -> int:
        return self.gate.shape[2]

    @staticmethod
    def of(params: Sequence[Param], layout: Layout, *, has_bias: bool = False, sources: Sources = ()) -> Tables:
        """Return the views of a layer's parameters.

        Raises:
            ValueError: the parameters do not have this layout.
        """
        num_params = sum(counts_of(layout, sources)) + has_bias * (num_projections_of(layout) + 1)
        if len(params) != num_params:
            with_bias = " with biases" if has_bias else ""
            raise ValueError(f"layout {layout!r}{with_bias} does not have {len(params)} parameters")
        left = list(params)
        matrices: list[Table] = []
        for how in sources or (None,) * (num_projections_of(layout) + 1):
            count = 1 if how is None else how.num_tensors
            parts, left = left[:count], left[count:]
            matrices.append(parts[0] if how is None else TileTable.of(how, list(map(standing, parts))))
        is_out_in, biases = layout in _OUT_IN, list(map(standing, left))
        *projections, down = matrices if is_out_in else [matrix.mT for matrix in matrices]
        gate, up = divided(projections, layout)
        if not has_bias:
            tables = Tables(gate, up, down, projections=projections)
        else:
            gate_bias, up_bias = divided(biases[:-1], layout)
            tables = Tables(gate, up, down, gate_bias, up_bias, biases[-1], projections, biases[:-1])
        tables._check(layout)
        return tables

    def _check(self, layout: Layout) -> None:
        num_experts, width, hidden = self.gate.shape
        if self.up.shape != self.gate.shape or _strides(self.up) != _strides(self.gate):
            raise ValueError(f"gate {_described(self.gate)} and up {_described(self.up)} differ in layout {layout!r}")
        if self.down.shape != (num_experts, hidden, width):
            raise ValueError(
                f"down {_described(self.down)} does not take back what gate {_described(self.gate)} gives, "
                f"in layout {layout!r}"
            )
        if self.gate_bias is None or self.up_bias is None or self.down_bias is None:
            return
        shapes = [tuple(bias.shape) for bias in (self.gate_bias, self.up_bias, self.down_bias)]
        if shapes != [(num_experts, width), (num_experts, width), (num_experts, hidden)]:
            raise ValueError(f"biases {shapes} of gate, up and down do not meet gate {_described(self.gate)}")
        if self.gate_bias.stride() != self.up_bias.stride():
            raise ValueError(f"biases {_described(self.gate_bias)} and {_described(self.up_bias)} differ in strides")


def _strides(table: Table) -> tuple[int, ...] | None:
    """Return a table's strides, or None where it is computed by tiles."""
    if isinstance(table, TileTable):
        return None
    return table.strides if isinstance(table, ListTable) else table.stride()


def num_projections_of(layout: Layout) -> int:
    """Return how many parameters hold gate and up."""
    return 2 if layout in _APART else 1


def has_up(activation: Activation) -> bool:
    """Return whether an activation is of gate and up, and not of one projection alone."""
    return activation.has_up if isinstance(activation, Pointwise) else activation != "relu2"


def counts_of(layout: Layout, sources: Sources) -> list[int]:
    """Return how many parameters each of gate and up, or both in one, and down consists of or is computed from."""
    return [1 if how is None else how.num_tensors for how in sources or (None,) * (num_projections_of(layout) + 1)]


def are_projections(layout: Layout, *, has_bias: bool, sources: Sources = ()) -> list[bool]:
    """Return for each parameter whether it is of gate and up, not of down."""
    group = [*[True] * num_projections_of(layout), False]
    of_matrices = zip(group, counts_of(layout, sources), strict=True)
    return [is_one for is_one, count in of_matrices for _ in range(count)] + group * has_bias


def trained_parts(
    layout: Layout, wanted: Sequence[bool], *, has_bias: bool, sources: Sources = ()
) -> tuple[bool, bool]:
    """Return whether anything of gate and up is trained, and whether anything of down is.

    Args:
        wanted: for each parameter, whether its gradient is.

    Raises:
        ValueError: a gradient is wanted of a table that is computed by tiles, or of a bias beside it.
    """
    pairs = list(zip(are_projections(layout, has_bias=has_bias, sources=sources), wanted, strict=True))
    if any(sources) and any(wanted):
        raise ValueError("experts whose tables are computed have no gradients of their parameters")
    projections = any(is_wanted for is_one, is_wanted in pairs if is_one)
    return projections, any(is_wanted for is_one, is_wanted in pairs if not is_one)


def divided(projections: Sequence[TableT], layout: Layout) -> tuple[TableT, TableT]:
    """Return (gate, up) of the tensors that hold them, experts or rows in front and the width behind them."""
    if layout in _APART:
        gate, up = projections
        return gate, up
    (both,) = projections
    if layout in _SINGLE:
        return both, both
    if not isinstance(both, torch.Tensor):
        width = both.shape[1] // 2
        is_interleaved = layout == "interleaved_in_out"
        step = 1 + is_interleaved
        return both.rows(0, width, step), both.rows(1 if is_interleaved else width, width, step)
    if layout == "interleaved_in_out":
        num_experts, width, *depth = both.shape
        gate, up = both.view(num_experts, width // 2, 2, *depth).unbind(2)
    else:
        gate, up = both.chunk(2, dim=1)
    return gate, up


def _described(table: Table) -> str:
    strides = _strides(table)
    return f"{list(table.shape)} " + ("computed by tiles" if strides is None else f"of strides {list(strides)}")
