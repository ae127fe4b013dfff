"""Choice of the tiles of a layer's kernels by their time on the device: each of a short list runs, the fastest stays.

A list has only what compiles without spills for its target (`tiling`, benchmarks/results/gpu_kernels.json). It is run
once for what the kernels are compiled for, before the first step: on tables of as many experts as `_TABLE_BYTES` hold,
which leave L2, with even routing, in one window. Beside them the same layer is timed in torch's grouped products, which
large experts may be faster in. The result is saved on disk beside the machine's rates.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from memfine_fx.kernels.launches import Launch, Tiles, recording
from memfine_fx.kernels.layer import LayerOptions, run_backward, run_forward
from memfine_fx.kernels.sorting import Routing, sort_assignments
from memfine_fx.kernels.tables import Activation, Layout, Tables, standing
from memfine_fx.kernels.tiling import LayerTiles, candidates, target_of, tiles_for
from memfine_fx.memory.machine import DamagedFile, load_measurement, measurement_key, number_between, save_measurement
from memfine_fx.memory.measure import run_outside_compilation
from memfine_fx.memory.timing import seconds_of

__all__ = ["KernelsDoNotRun", "LayerKind", "Times", "grouped_calls", "kind_of", "times_of", "tune", "tuned"]

_LOG = logging.getLogger(__name__)

_SECONDS = (1e-9, 1e4)
"""The least and the most seconds of a step that a file may contain."""
_TABLE_BYTES = 512 << 20
# Of 16 experts a few waves decided: smaller tiles came first that a layer's own sizes had last.
_MOST_EXPERTS, _ROWS_PER_EXPERT = 32, 512
_ROWS, _MOST_ROWS_PER_EXPERT = 1 << 14, 2048  # of all experts, so that few of them have as many as they get

Seconds = Callable[[Launch, torch.device], float]


class KernelsDoNotRun(RuntimeError):
    """None of a kernel's tiles compiles or launches here: the installed Triton, or the device, is another."""


@dataclass(frozen=True)
class LayerKind:
    """The properties of a layer that its kernels are compiled for.

    Args:
        layout, activation, has_bias, precision: as of `layer.LayerOptions`.
        dtype: of the rows.
        params: shape, strides and dtype of each parameter.
        top_k: K.
    """

    layout: Layout
    activation: Activation
    has_bias: bool
    precision: str
    dtype: torch.dtype
    params: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    top_k: int

    @property
    def table_dtype(self) -> torch.dtype:
        return self.params[0][2]


def kind_of(
    layout: Layout,
    activation: Activation,
    has_bias: bool,
    precision: str,
    hidden: torch.Tensor,
    params: Sequence[torch.Tensor],
    top_k: int,
) -> LayerKind:
    """Return the kind of a layer with these rows [T,H] and parameters, in the order of its layout."""
    metadata = tuple((tuple(map(int, param.shape)), tuple(map(int, param.stride())), param.dtype) for param in params)
    return LayerKind(layout, activation, has_bias, precision, hidden.dtype, metadata, top_k)


@dataclass(frozen=True)
class Times:
    """Seconds of a step of the timed layer, products saved: in the kernels, and in torch's grouped products.

    `grouped` is None where those do not take such a layer.
    """

    kernels: float
    grouped: float | None


@dataclass(frozen=True)
class _Found:
    """The chosen tiles and their times, which are None where nothing was timed."""

    tiles: LayerTiles
    times: Times | None


_known: dict[tuple[LayerKind, torch.device], _Found | KernelsDoNotRun] = {}


def tuned(kind: LayerKind, device: torch.device) -> LayerTiles | None:
    """Return the tiles that `tune` found in this process; None where it was not called, or nothing runs."""
    outcome = _known.get((kind, device))
    return outcome.tiles if isinstance(outcome, _Found) else None


def times_of(kind: LayerKind, device: torch.device) -> Times | None:
    """Return the times that `tune` measured, in this process or an earlier one; None where it did not or could not."""
    outcome = _known.get((kind, device))
    return outcome.times if isinstance(outcome, _Found) else None


def tune(kind: LayerKind, device: torch.device, seconds: Seconds | None = None) -> LayerTiles:
    """Return the fastest tiles of each kernel, from this process, from the disk, or measured now.

    Args:
        seconds: of a launch; of the device's time where it is None.

    Raises:
        KernelsDoNotRun: no tiles of a list run; they are not tried again in this process.
    """
    outcome = _known.get((kind, device))
    if isinstance(outcome, KernelsDoNotRun):
        raise KernelsDoNotRun(str(outcome))
    if outcome is None:
        lists = _lists(kind, device)
        name = f"tiles_{measurement_key('cuda', kind, lists)}"
        outcome = load_measurement(name, functools.partial(_decode, lists))
        if outcome is None:
            measure = functools.partial(_measured, kind, device, seconds or _seconds_of_launch)
            try:
                measured = run_outside_compilation(device.type, measure)
            except KernelsDoNotRun as error:
                # A new one: the traceback of what was raised holds the layer that was timed, up to 1 GB.
                _known[kind, device] = KernelsDoNotRun(str(error))
                raise
            if measured is not None:
                save_measurement(name, asdict(measured))
            if device.type == "cuda":
                torch.cuda.empty_cache()  # what stood there leaves gaps that the step's tensors do not fill
            outcome = measured or _Found(tiles_for(target_of(device), kind.dtype, kind.table_dtype), None)
        _known[kind, device] = outcome
    return outcome.tiles


def _lists(kind: LayerKind, device: torch.device) -> dict[str, tuple[Tiles, ...]]:
    target = target_of(device)
    return {field.name: candidates(target, kind.dtype, field.name, kind.table_dtype) for field in fields(LayerTiles)}


def _decode(lists: Mapping[str, Sequence[Tiles]], fields: Any) -> _Found:
    """Decode a file of `_measured`: tiles that are on these lists, and times unless there was nothing to choose."""
    tiles = LayerTiles(**{name: _decode_tiles(listed, fields["tiles"][name]) for name, listed in lists.items()})
    if all(len(listed) == 1 for listed in lists.values()):
        return _Found(tiles, None)
    kernels, grouped = fields["times"]["kernels"], fields["times"]["grouped"]
    grouped_seconds = None if grouped is None else number_between(grouped, *_SECONDS)
    return _Found(tiles, Times(number_between(kernels, *_SECONDS), grouped_seconds))


def _decode_tiles(listed: Sequence[Tiles], fields: Any) -> Tiles:
    for tiles in listed:
        if asdict(tiles) == fields:
            return tiles
    raise DamagedFile(f"expected tiles that are timed for this kernel, got {str(fields)[:200]}")


def _seconds_of_launch(launch: Launch, device: torch.device) -> float:
    return _seconds_of_call(launch.run, device)


def _seconds_of_call(call: Callable[[], object], device: torch.device) -> float:
    return seconds_of([call], device)


def _measured(kind: LayerKind, device: torch.device, seconds: Seconds) -> _Found | None:
    """Time the tiles, and return the fastest and their times; None where there is no memory for it.

    Raises:
        KernelsDoNotRun: nothing of a list runs.
    """
    chosen = tiles_for(target_of(device), kind.dtype, kind.table_dtype)
    lists = {name: tiles for name, tiles in _lists(kind, device).items() if len(tiles) > 1}
    if not lists:
        return _Found(chosen, None)
    total = 0.0
    try:
        layer = _Layer(kind, device)
        for name, tiles in lists.items():
            times = _times(layer, [replace(chosen, **{name: choice}) for choice in tiles], name, seconds)
            fastest = min(times, key=times.__getitem__)  # the first of equals
            chosen = replace(chosen, **{name: fastest})
            # The projections are launched twice, in forward and to recompute; with saved products, once.
            total += times[fastest] / (2 if name == "gate_up" else 1)
            _LOG.info(
                "tiles of %s: %s", name, {choice: f"{1e6 * duration:.0f} us" for choice, duration in times.items()}
            )
        measured = Times(total, layer.grouped_seconds())
    except torch.OutOfMemoryError:
        _LOG.warning("GPU kernels run with the tiles that stand in the code: there is no memory to time others in")
        return None
    _LOG.info("seconds of a layer: %s", measured)
    return _Found(chosen, measured)


def _times(layer: _Layer, choices: Sequence[LayerTiles], name: str, seconds: Seconds) -> dict[Tiles, float]:
    """Return the seconds of a step's launches of one kernel with each choice of its tiles that runs.

    Raises:
        KernelsDoNotRun: none does.
    """
    times: dict[Tiles, float] = {}
    refusal = ""
    for choice in choices:
        tiles: Tiles = getattr(choice, name)
        try:
            times[tiles] = sum(seconds(launch, layer.device) for launch in layer.launches(choice, name))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler or of the driver: its types differ by version and target
            refusal = f"{type(error).__name__}: {error}"
            _LOG.info("%s does not run with %s: %s", name, tiles, refusal)
    if not times:
        raise KernelsDoNotRun(f"{name} runs with none of its tiles: {refusal}")
    return times


class _Layer:
    """A layer of a kind, with fewer experts where its tables are large."""

    def __init__(self, kind: LayerKind, device: torch.device) -> None:
        self.device = device
        self._kind = kind
        sizes = [strides[0] * dtype.itemsize for _, strides, dtype in kind.params]
        experts = max(1, min(_MOST_EXPERTS, kind.params[0][0][0], _TABLE_BYTES // max(1, sum(sizes))))
        # Zeros would be multiplied faster than numbers are, and the user's own random state is not touched.
        self._numbers = torch.Generator(device).manual_seed(0)
        self._params = [
            torch.empty_strided((experts, *shape[1:]), strides, dtype=dtype, device=device).normal_(
                0.0, 0.02, generator=self._numbers
            )
            for shape, strides, dtype in kind.params
        ]
        rows = min(_MOST_ROWS_PER_EXPERT, max(_ROWS_PER_EXPERT, _ROWS // kind.params[0][0][0]))
        tokens = -(-experts * rows // kind.top_k)
        self._hidden = torch.randn(tokens, self._width(), dtype=kind.dtype, device=device, generator=self._numbers)
        self._weight = torch.ones(tokens * kind.top_k, dtype=kind.dtype, device=device)
        index = torch.arange(tokens * kind.top_k, device=device).remainder(experts).view(-1, kind.top_k)
        self._routing = sort_assignments(index, experts)

    def _width(self) -> int:
        return self._tables().hidden

    def _tables(self) -> Tables:
        kind = self._kind
        return LayerOptions(1, kind.layout, kind.activation, kind.has_bias).tables_of(self._params)

    def grouped_seconds(self) -> float | None:
        """Return the seconds of a step in torch's grouped products, its calls timed one by one.

        It is None where they do not take such tensors.
        """
        try:
            calls = grouped_calls(self._hidden, self._routing, self._tables())
            return sum(_seconds_of_call(call, self.device) for call in calls)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, AttributeError) as error:  # dtypes and strides that they refuse, an old torch
            _LOG.info("no grouped products: %s", error)
            return None

    def launches(self, tiles: LayerTiles, name: str) -> Iterator[Launch]:
        """Return the launches of one kernel in a step of the layer, ready to be run."""
        kind, num_rows = self._kind, self._weight.shape[0]
        options = LayerOptions(
            num_rows, kind.layout, kind.activation, kind.has_bias, precision=kind.precision, tiles=tiles
        )
        with recording() as launches:
            out, _ = run_forward(self._hidden, self._weight, self._routing, self._params, options)
            wanted = [True] * (2 + len(self._params))
            run_backward(out, self._hidden, self._weight, self._routing, self._params, None, options, wanted)
        return (launch for launch in launches if launch.name.removesuffix("_kernel") == name)


Call = Callable[[], object]


def grouped_calls(hidden: torch.Tensor, routing: Routing, tables: Tables) -> Iterator[Call]:
    """Yield the calls of a step with saved products, each to be timed alone: their results go nowhere.

    Rows are gathered, multiplied, added to tokens in fp32; then gradients likewise, and those of tables are copied to
    where they belong. A copy that moves as many bytes stands for what lies between products.

    Args:
        hidden: [T,H], in bf16.
        routing: of all rows, in one chunk.
        tables: in bf16.
    """
    product = functools.partial(torch.nn.functional.grouped_mm, offs=routing.offsets[1:])
    tokens = routing.order.long() // routing.top_k
    rows = hidden[tokens]
    activated = hidden.new_zeros(rows.shape[0], tables.width)
    projected = [hidden.new_zeros(rows.shape[0], projection.shape[1]) for projection in tables.projections]
    sums = torch.zeros_like(hidden, dtype=torch.float32)
    moved = [hidden.new_zeros(rows.shape[0], columns * tables.width) for columns in (1, 1, 3, 3)]

    def gather() -> None:
        hidden.index_select(0, tokens)

    def add_to_tokens() -> None:
        sums.index_add_(0, tokens, rows.float())

    for _ in range(2):  # forward's and backward's
        yield gather
        yield add_to_tokens
    yield gather  # the tokens again, for gradients of the projections
    yield functools.partial(moved[0].copy_, moved[1])  # the activation, of two columns into one
    yield functools.partial(moved[2].copy_, moved[3])  # its gradient, of three columns into three
    down = standing(tables.down)
    for table, left in zip(map(standing, tables.projections), projected, strict=True):
        yield functools.partial(product, rows, table.mT)
        yield functools.partial(product, left, table)
        yield functools.partial(product, left.mT, rows)
        yield table.clone
    yield functools.partial(product, activated, down.mT)
    yield functools.partial(product, rows, down)
    yield functools.partial(product, rows.mT, activated)
    yield down.clone
