"""Forward and backward of a whole layer of experts, in kernels over windows.

Between forward and backward it saves its inputs and the index arrays, 8 bytes a routed row, and, where asked, the
products of gate and up. A pass allocates three rows [R,F] of a window, and [R,H] where sums are deterministic; for
each adapter one row [R,r] in forward and two in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memfine_fx.kernels.adapter_tables import Adapter, AdapterForms, adapters_of, num_adapter_params, trained_adapters
from memfine_fx.kernels.adapters import AdapterGradients, AdapterPass, LayerAdapters
from memfine_fx.kernels.combine import combine
from memfine_fx.kernels.down import add_products
from memfine_fx.kernels.down_backward import down_backward, num_weight_parts
from memfine_fx.kernels.gate_up import gate_up
from memfine_fx.kernels.launches import Tiles
from memfine_fx.kernels.sorting import Routing
from memfine_fx.kernels.tables import (
    Activation,
    Layout,
    ListTable,
    Param,
    Sources,
    Table,
    Tables,
    Term,
    are_projections,
    divided,
    has_up,
    num_projections_of,
    standing,
    trained_parts,
)
from memfine_fx.kernels.tiling import LayerTiles, target_of, tiles_for
from memfine_fx.kernels.weight_gradient import TableGradients, weight_gradient
from memfine_fx.kernels.windows import Window, most_rows, windows_of
from memfine_fx.runtime.halving import ChunkOutOfMemory, is_allocation_failure

__all__ = ["Gradients", "LayerOptions", "layer_windows", "run_backward", "run_forward"]


@dataclass(frozen=True)
class LayerOptions:
    """The form of a layer's parameters, and how its kernels are run.

    Args:
        rows_per_window: R.
        layout: of its parameters.
        activation: of its experts; "relu2" goes with the layouts that have no up projection, and with no other.
        has_bias: whether every projection has one.
        saves_products: whether forward saves gate's and up's products, [N,F] each, or backward recomputes them.
        is_deterministic: whether a token's rows are added in the same order in every run, by one more launch a window.
        precision: of products of fp32, "ieee" or "tf32".
        tiles: of the kernels, or None for the device's and dtype's own.
        sources: as of `KernelForm`; parameters that a table is computed from follow each other in its place, and have
            no gradient.
        adapters: as of `KernelForm`; A and B of each follow all others.
    """

    rows_per_window: int
    layout: Layout = "halves"
    activation: Activation = "swiglu"
    has_bias: bool = False
    saves_products: bool = False
    is_deterministic: bool = False
    precision: str = "ieee"
    tiles: LayerTiles | None = None
    sources: Sources = ()
    adapters: AdapterForms = ()

    @property
    def has_up(self) -> bool:
        return has_up(self.activation)

    def num_own(self, params: Sequence[object]) -> int:
        """Return how many of the parameters are not factors of adapters."""
        return len(params) - num_adapter_params(self.adapters)

    def adapters_of(self, params: Sequence[Param]) -> list[Adapter | None]:
        """Return the adapter of each projection and of down, or an empty list where the layer has none.

        Raises:
            ValueError: factors do not meet, or some projections have an adapter and others none.
        """
        adapters = adapters_of(list(map(standing, params[self.num_own(params) :])), self.adapters)
        if len({adapter is None for adapter in adapters[:-1]}) > 1:
            raise ValueError("adapters of gate and up come together")
        return adapters

    def tables_of(self, params: Sequence[Param]) -> Tables:
        """Return views of the parameters, or of their gradients, as the kernels read them.

        Raises:
            ValueError: the parameters do not have this layout, or the activation does not go with it.
        """
        if self.has_up is (self.layout in ("single", "single_in_out")):
            raise ValueError(f"activation {self.activation!r} does not go with layout {self.layout!r}")
        own = params[: self.num_own(params)]
        return Tables.of(own, self.layout, has_bias=self.has_bias, sources=self.sources)

    def tiles_of(self, hidden: torch.Tensor, params: Sequence[Param]) -> LayerTiles:
        table_dtype = torch.uint8 if any(self.sources) else params[0].dtype
        return self.tiles or tiles_for(target_of(hidden.device), hidden.dtype, table_dtype)


@dataclass(frozen=True)
class Gradients:
    """The gradients of hidden [T,H], the routing weight [N] and the parameters; None for each that is not wanted.

    The gradient of a list of experts' matrices is a list.
    """

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    params: Sequence[torch.Tensor | list[torch.Tensor] | None]


Products = tuple[torch.Tensor, torch.Tensor]
There = torch.Tensor | Sequence[torch.Tensor | None] | None
"""An existing gradient that is added to in place, or one per expert of a list; None where there is none."""


def layer_windows(routing: Routing, options: LayerOptions, saved: Products | None) -> list[Window]:
    """Return a layer's windows; one ends where the saved products end."""
    return windows_of(routing.num_rows, options.rows_per_window, 0 if saved is None else saved[0].shape[0])


def run_forward(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    routing: Routing,
    params: Sequence[Param],
    options: LayerOptions,
    out_dtype: torch.dtype | None = None,
    saved: Products | None = None,
) -> tuple[torch.Tensor, Products | None]:
    """Run a layer's forward, and return (combined outputs [T,H], saved products or None).

    Args:
        saved: where to save the products, [M,F] each of the first M rows, of the same strides. Where it is None and
            they are to be saved, new ones of all rows are allocated.
        out_dtype: of the outputs, or None for hidden's.
        hidden: [T,H], contiguous.
        weight: [N] by assignment, or None for ones.
    """
    tables, tiles = options.tables_of(params), options.tiles_of(hidden, params)
    out = hidden.new_zeros((hidden.shape[0], tables.hidden), dtype=torch.float32)
    if options.saves_products and saved is None:
        saved, _ = _room(hidden, routing.num_rows, tables.width, options)
    windows = layer_windows(routing, options, saved)
    activated = hidden.new_empty((most_rows(windows), tables.width))
    add = _Adder(routing, options, tiles.down, hidden, most_rows(windows))
    adapters = _adapters(hidden, routing, params, options, tiles, windows)
    for window in windows:
        terms = adapters.of_projections(adapters.narrow(hidden, window))
        gate_up(
            hidden, weight, routing, tables, window, options.activation, _part(saved, window), activated, tiles.gate_up,
            options.precision, terms,
        )  # fmt: skip
        of_down = adapters.of_down(activated, window)
        add([activated], [tables.down], window, out, tables.down_bias, weight, terms=of_down)
        del terms, of_down
    del activated, add, adapters  # what a window holds goes before the sums are cast, as plans count it
    return out.to(out_dtype or hidden.dtype), saved


def run_backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    routing: Routing,
    params: Sequence[Param],
    saved: Products | None,
    options: LayerOptions,
    wanted: Sequence[bool],
    onto: Sequence[There] = (),
) -> Gradients:
    """Compute the wanted gradients, window by window.

    Args:
        grad: [T,H] of the output.
        wanted: hidden, weight, then each parameter.
        onto: for each parameter an existing gradient in its dtype and strides, which is added to in place and returned,
            or None.
        others: as in `run_forward`.

    Raises:
        ChunkOutOfMemory: memory ran out after something may have been added to, so that nobody may run this again.
    """
    tables, tiles = options.tables_of(params), options.tiles_of(hidden, params)
    windows = layer_windows(routing, options, saved)
    # A copy of the gradient is the run's alone, which lets it go.
    run = _Backward(
        grad.to(hidden.dtype).contiguous(),
        hidden,
        weight,
        routing,
        tables,
        options,
        tiles,
        wanted,
        params,
        windows,
        onto,
    )
    try:
        for window in windows:
            run.window(window, _part(saved, window))
        return run.gradients()
    except RuntimeError as error:
        if not any(existing_grad is not None for existing_grad in onto) or not is_allocation_failure(error):
            raise
        message = f"{error} (gradients were added to in place by then)"
    raise ChunkOutOfMemory([("gradient of the tokens", hidden.nbytes)], message)


class _Adder:
    """Adds a window's products to the tokens' sums, atomically or by row and then by token."""

    def __init__(
        self, routing: Routing, options: LayerOptions, tiles: Tiles, hidden: torch.Tensor, capacity: int
    ) -> None:
        self._routing, self._tiles, self._precision = routing, tiles, options.precision
        self._rows: torch.Tensor | None = None
        if options.is_deterministic:
            self._rows = hidden.new_empty((capacity, hidden.shape[1]), dtype=torch.float32)

    def __call__(
        self,
        rows: list[torch.Tensor],
        matrices: list[Table],
        window: Window,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        *,
        terms: Sequence[Term] = (),
    ) -> None:
        is_atomic = self._rows is None
        result = out if self._rows is None else self._rows
        add_products(
            rows, matrices, self._routing, window, result, self._tiles, self._precision, is_atomic=is_atomic, bias=bias,
            weight=weight, terms=terms,
        )  # fmt: skip
        if self._rows is not None:
            combine(self._rows, self._routing, window, out)


class _Backward:
    """The state that a layer's backward holds from window to window."""

    def __init__(
        self,
        grad: torch.Tensor,
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        routing: Routing,
        tables: Tables,
        options: LayerOptions,
        tiles: LayerTiles,
        wanted: Sequence[bool],
        params: Sequence[Param],
        windows: Sequence[Window],
        onto: Sequence[There],
    ) -> None:
        self._grad, self._hidden, self._weight, self._routing = grad, hidden, weight, routing
        self._tables, self._options, self._tiles, self._wanted = tables, options, tiles, wanted
        self._given, self._onto = params, list(onto or [None] * len(params))
        num_own = options.num_own(params)
        capacity = most_rows(windows)
        self._add = _Adder(routing, options, tiles.down, hidden, capacity)
        self._room, self._rows = _room(hidden, capacity, tables.width, options)
        self._hidden_grad = torch.zeros_like(hidden, dtype=torch.float32) if wanted[0] else None
        self._parts: torch.Tensor | None = None
        if weight is not None:
            num_parts = num_weight_parts(tables.width, tiles.down_backward)
            self._parts = hidden.new_zeros((num_parts, routing.num_rows), dtype=torch.float32)
        has_bias, sources = options.has_bias, options.sources
        is_projection = are_projections(options.layout, has_bias=has_bias, sources=sources)
        of_own, of_adapters = wanted[2 : 2 + num_own], wanted[2 + num_own :]
        has_projections, has_down = trained_parts(options.layout, of_own, has_bias=has_bias, sources=sources)
        trains_projections, trains_down = trained_adapters(options.adapters, of_adapters)
        self._activated = hidden.new_empty((capacity, tables.width)) if has_down or trains_down else hidden
        # What is not written stands for itself; the projections are written together, and down with its bias.
        are_written = [has_projections if is_one else has_down for is_one in is_projection]
        num_of_projections = num_adapter_params(options.adapters[:-1])
        are_written += [trains_projections] * num_of_projections
        are_written += [trains_down] * (len(of_adapters) - num_of_projections)
        self._params = [
            _new_gradient(param, existing_grad, is_written)
            for param, existing_grad, is_written in zip(params, self._onto, are_written, strict=True)
        ]
        num_tables = num_projections_of(options.layout) + 1
        self._into = TableGradients.of(
            options.tables_of(self._params), has_projections=has_projections, has_down=has_down,
            is_cut=len(windows) > 1,
            are_added=None if sources else list(map(_is_there, self._onto[:num_tables])),
        )  # fmt: skip
        self._adapters = _adapters(hidden, routing, params, options, tiles, windows)
        self._of_adapters = AdapterGradients(
            self._adapters, options.adapters_of(self._params), list(map(_is_there, self._onto[num_own:])),
            hidden, trains_projections=trains_projections, trains_down=trains_down, is_cut=len(windows) > 1,
        )  # fmt: skip

    def window(self, window: Window, saved: Products | None) -> None:
        """Compute one window's part of all gradients."""
        options, tiles, tables, routing = self._options, self._tiles, self._tables, self._routing
        precision, into, adapters, of_adapters = options.precision, self._into, self._adapters, self._of_adapters
        narrow = adapters.narrow(self._hidden, window) if saved is None or of_adapters.trains_projections else []
        if saved is None:
            gate_up(
                self._hidden, None, routing, tables, window, options.activation, self._room, None, tiles.gate_up,
                precision, adapters.of_projections(narrow),
            )  # fmt: skip
        of_down = of_adapters.of_down(self._grad, window)
        down_backward(
            self._grad, self._weight, routing, tables, window, options.activation, saved or self._room, self._room,
            self._activated if into.has_down or of_adapters.trains_down else None, self._parts, tiles.down_backward,
            precision, of_down,
        )  # fmt: skip
        of_hidden: list[Term] = []
        if self._hidden_grad is not None or of_adapters.trains_projections:
            of_hidden = of_adapters.of_projections(self._rows, window)
        if self._hidden_grad is not None:
            turned = [table.mT for table in tables.projections]
            self._add(self._rows, turned, window, self._hidden_grad, terms=of_hidden)
        if of_adapters.trains_projections:
            of_adapters.add_projections(window, self._hidden, self._rows, narrow, of_hidden)
        if of_adapters.trains_down and of_down is not None:
            of_adapters.add_down(window, self._grad, self._activated, of_down)
        if into.has_projections or into.has_down:
            weight_gradient(
                self._rows, self._hidden, self._activated, self._grad, self._weight, routing, window, into,
                tiles.weight_gradient, precision,
            )  # fmt: skip

    def gradients(self) -> Gradients:
        """Return the gradients after the last window.

        All buffers of windows are freed before sums are cast, as plans count it.
        """
        del self._room, self._rows, self._activated, self._add, self._into, self._grad
        del self._adapters, self._of_adapters
        weight = None
        if self._wanted[1] and self._parts is not None and self._weight is not None:
            weight = self._parts.sum(0).to(self._weight.dtype)
        self._parts = None
        hidden = None if self._hidden_grad is None else self._hidden_grad.to(self._hidden.dtype)
        every = zip(self._params, self._given, self._onto, self._wanted[2:], strict=True)
        params = [
            _finished_param(gradient, param, existing_grad) if is_wanted else None
            for gradient, param, existing_grad, is_wanted in every
        ]
        return Gradients(hidden, weight, params)


def _adapters(
    hidden: torch.Tensor,
    routing: Routing,
    params: Sequence[Param],
    options: LayerOptions,
    tiles: LayerTiles,
    windows: Sequence[Window],
) -> LayerAdapters:
    run = AdapterPass(routing, most_rows(windows), tiles, options.precision)
    return LayerAdapters(options.adapters_of(params), options.layout, run, hidden)


def _room(
    hidden: torch.Tensor, num_rows: int, width: int, options: LayerOptions
) -> tuple[Products, list[torch.Tensor]]:
    """Allocate buffers for gate's and up's products.

    Returns:
        The products, [R,F] each, the same where there is no up projection; and the tensors that hold them, one
        contiguous tensor for each of the tables' projections, with outputs as that parameter has them.
    """
    size = 1 + (options.has_up and num_projections_of(options.layout) == 1)
    buffers = [hidden.new_empty((num_rows, size * width)) for _ in range(num_projections_of(options.layout))]
    return divided(buffers, options.layout), buffers


def _of_experts(param: ListTable, there: There) -> Sequence[torch.Tensor | None]:
    return [None] * len(param.tensors) if there is None or isinstance(there, torch.Tensor) else there


def _is_there(there: There) -> bool:
    """Return whether an existing gradient can be added to in place: of a list, every expert's."""
    if there is None or isinstance(there, torch.Tensor):
        return there is not None
    return all(expert_grad is not None for expert_grad in there)


def _new_gradient(param: Param, there: There, is_written: bool) -> Param:
    """Return the tensors into which a parameter's gradient is written; a bias's gradient is summed in fp32."""
    if not is_written:
        return param
    if isinstance(param, ListTable):
        before = _of_experts(param, there if _is_there(there) else None)
        pairs = zip(param.tensors, before, strict=True)
        return ListTable.of(
            [torch.empty_like(tensor) if existing_grad is None else existing_grad for tensor, existing_grad in pairs]
        )
    assert there is None or isinstance(there, torch.Tensor), "a tensor's gradient is one"
    if param.ndim == 2:
        return torch.zeros_like(param, dtype=torch.float32)
    return torch.empty_like(param) if there is None else there


def _finished_param(gradient: Param, param: Param, there: There) -> torch.Tensor | list[torch.Tensor]:
    if isinstance(gradient, ListTable) and isinstance(param, ListTable):
        every = zip(gradient.tensors, param.tensors, _of_experts(param, there), strict=True)
        return [_finished(*expert_tensors) for expert_tensors in every]
    assert there is None or isinstance(there, torch.Tensor), "a tensor's gradient is one"
    return _finished(standing(gradient), standing(param), there)


def _finished(gradient: torch.Tensor, param: torch.Tensor, there: torch.Tensor | None) -> torch.Tensor:
    """Return a parameter's gradient in its dtype; gradients of tables have already been added to the existing ones."""
    if there is None:
        return gradient.to(param.dtype)
    return there if gradient is there else there.add_(gradient)


def _part(saved: Products | None, window: Window) -> Products | None:
    """Return a window's part of the saved products, or None where nothing is saved of its rows."""
    if saved is None or window.last > saved[0].shape[0]:
        return None
    return saved[0].narrow(0, window.first, window.num_rows), saved[1].narrow(0, window.first, window.num_rows)
