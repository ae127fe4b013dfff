"""Check gradients: a raised region's backward against autograd through the region as captured, on a few tokens.

The proof of outputs and gradients is the reading of the captured graph. This is another one behind it, for what a
host's next version may spell in a way that nobody has read, and for what was read wrong: it runs once for every kind
of layer, when that is first compiled.

Steps:
1. outline the region, and lower a copy of the outline (`region.Forms`);
2. make inputs: a few tokens where sizes are symbols, K different experts a token, random floats in fp64. Widths are
   divided by a common factor in both forms where real ones would take more than `_SMALL_BYTES`;
3. run both in fp64 (`reference`), the rewritten form with the very graphs that its chunks compile;
4. outputs agree and gradients do not: refuse. Outputs differ, or a form does not run: narrow widths may be the reason,
   so the next larger sizes are tried, up to `_MOST_BYTES`. Then outputs that differed are a refusal too, and of forms
   that never ran it is said that nothing was compared.

Nothing is left changed: no global random state is drawn from, no tensor of the model is read.

Dynamo writes a model's widths (H, F, 2F) into views, splits and slices as numbers, so a captured region runs at these
widths only. Where one factor divides all of them, every such number can be divided by it: sums and halves of widths
stay sums and halves. Whether the narrow graph means the same is not proved here; who runs it asks that it gives what
another narrow form of the same computation gives. Refused: widths without a common factor, and widths that may be
confused with counts (experts, choices, tokens).
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from memfine_fx.compat.autograd import run_without_modes, without_autocast, without_saved_tensor_hooks
from memfine_fx.compat.tensors import tree_leaves
from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.dataflow import is_int_tensor, node_value, static_size
from memfine_fx.passes.verify.reference import ExactRun
from memfine_fx.passes.verify.region import Forms, Tensors, errors_of, run_step
from memfine_fx.records import ChunkPlan, Modes, MoERegion, SavePolicy
from memfine_fx.runtime.compiled_expert import Compiled, CompiledBackward, CompiledExpert, SavingFunctions
from memfine_fx.runtime.store import LiveRegion

__all__ = ["check_gradients", "in_words", "narrow_graph", "narrow_widths"]

_SMALL_BYTES = 4 << 20
_MOST_BYTES = 64 << 20
_TOLERANCE = 1e-4
_RUN_ERRORS = (
    CannotChunk, RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError,
)  # fmt: skip
_PLAN = ChunkPlan("rows", 1 << 20, 0, 0, "to compare gradients")
_known: dict[str, _Found] = {}
_lock = threading.RLock()


@dataclass(frozen=True)
class _Found:
    """Why a region could not be compared, or how its output or gradients differ; all "" where they agree."""

    uncompared: str = ""
    difference: str = ""
    other_output: str = ""


def check_gradients(region: MoERegion, compiled_expert: CompiledExpert, modes: Modes) -> str:
    """Compare the two backwards, once for equal regions.

    Args:
        region: raised, its experts on one rank, not yet lowered.
        compiled_expert: what its chunks run, one expert at a time.
        modes: at its exit.

    Returns:
        "" where they agree or no gradient is wanted, else why they could not be compared.

    Raises:
        CannotChunk: they differ, or the outputs do.
    """
    if modes.disables_grad or not torch.is_grad_enabled():
        return ""
    if region.expert_index is not None and region.expert_index not in region.cut.inputs:  # weights [T,E] stand for it
        region = replace(region, cut=replace(region.cut, inputs=(*region.cut.inputs, region.expert_index)))
    key = _fingerprint(region, compiled_expert, modes)
    with _lock:
        if key not in _known:
            _known[key] = _check_kind(region, compiled_expert, modes)
    record = _known[key]
    if record.other_output:
        raise CannotChunk(
            Reason.OTHER_OUTPUT,
            f"in chunks it would have another output than the layer as written: {record.other_output}",
            region.cut.exit,
        )
    if record.difference:
        raise CannotChunk(
            Reason.OTHER_GRADIENTS,
            f"in chunks it would have other gradients than autograd finds in the layer as written: {record.difference}",
            region.cut.exit,
        )
    return record.uncompared


def _check_kind(region: MoERegion, compiled_expert: CompiledExpert, modes: Modes) -> _Found:
    try:
        return _compared(Forms.of(region, _live(region, compiled_expert), modes), compiled_expert)
    except _RUN_ERRORS as error:
        return _Found(in_words(error))


def in_words(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _live(region: MoERegion, compiled_expert: CompiledExpert) -> LiveRegion:
    dims = region.dims
    return LiveRegion(
        region_id=f"{compiled_expert.key}/gradients",
        compiled_expert=compiled_expert,
        num_experts=dims.num_experts,
        top_k=dims.top_k,
        out_dtype=torch.float64,
        out_of_range=region.out_of_range,
        choose_plan=lambda num_tokens: _PLAN,
    )


def _fingerprint(region: MoERegion, compiled_expert: CompiledExpert, modes: Modes) -> str:
    """Equal for regions that are the same but for names."""
    nodes = (*region.cut.inputs, *region.cut.nodes)
    names = {node: f"%{place}" for place, node in enumerate(nodes)}
    calls = [f"{node.target} {fx.map_arg((node.args, node.kwargs), names.get)}" for node in region.cut.nodes]
    inputs = [_description(node_value(node)) for node in region.cut.inputs]
    roles = [node and names[node] for node in (region.hidden, region.expert_index, region.routing_weight, region.base)]
    params = [names.get(node) for node in region.params]
    text = repr((compiled_expert.key, calls, inputs, roles, params, region.dims, modes))
    return hashlib.sha256(text.encode()).hexdigest()


def _description(value: object) -> object:
    if isinstance(value, Tensor):
        return tuple(map(str, value.shape)), value.dtype, value.requires_grad, str(value.device)
    return str(value)


def _compared(forms: Forms, compiled_expert: CompiledExpert) -> _Found:
    if not forms.wants_grad:
        return _Found()
    reason, other_output = "its sizes are too large", ""
    for sizes in _choices(forms.region):
        inputs = _Inputs(forms.region, sizes)
        if inputs.num_bytes > _MOST_BYTES:
            continue
        try:
            with without_saved_tensor_hooks(), without_autocast():
                run = functools.partial(_run, forms, compiled_expert, inputs, sizes.widths)
                original, rewritten = run_without_modes(run)
        except _RUN_ERRORS as error:
            reason = in_words(error)
            continue
        errors = errors_of(rewritten, original)
        off = errors.pop("output")
        if not off <= _TOLERANCE:
            other_output = f"off by {off:.1e} relative on made-up inputs"
            continue
        worst = max(errors, key=lambda name: errors[name], default="")
        if worst and not errors[worst] <= _TOLERANCE:
            return _Found(difference=f"{worst} differs by {errors[worst]:.1e} relative")
        return _Found()
    return _Found(other_output=other_output) if other_output else _Found(reason)


def _run(
    forms: Forms, compiled_expert: CompiledExpert, inputs: _Inputs, widths: Mapping[int, int]
) -> tuple[Tensors, Tensors]:
    """Output and gradients of the region as captured and in chunks."""
    values, chosen = inputs.values()
    original = run_step(ExactRun(narrow_graph(forms.original, widths)).run, values, forms)
    narrow = replace(forms, rewritten=narrow_graph(forms.rewritten, widths))
    rewritten = narrow.run_rewritten(values, _PLAN, _ExactExpert(compiled_expert, widths))
    for name, mask in zip(forms.placeholders, chosen, strict=True):
        for tensors in (original, rewritten):
            if mask is not None and f"d {name}" in tensors:  # constants where a token chose others: none flows on there
                tensors[f"d {name}"] *= mask
    return original, rewritten


@dataclass(frozen=True)
class _Sizes:
    """Numbers that stand for symbols and for widths in one run."""

    symbols: Mapping[sympy.Symbol, int]
    widths: Mapping[int, int]

    def of(self, size: Any) -> int:
        number = static_size(size)
        if number is not None:
            return self.widths.get(number, number)
        expr = size.node.expr
        # Not all symbols: a loop over experts has some for each, and every tensor in it asks.
        return int(expr.subs({symbol: self.symbols[symbol] for symbol in expr.free_symbols if symbol in self.symbols}))


def _choices(region: MoERegion) -> Iterator[_Sizes]:
    """Sizes worth trying, best first: real widths where they are small, then narrow ones, then real ones."""
    symbols = _few_tokens(region)
    real = _Sizes(symbols, {})
    is_small = _Inputs(region, real).num_bytes <= _SMALL_BYTES
    if is_small:
        yield real
    widths = _narrow_widths(region)
    if widths:
        yield _Sizes(symbols, widths)
    if not is_small:
        yield real


def _few_tokens(region: MoERegion) -> dict[sympy.Symbol, int]:
    """Numbers for the symbols of the inputs; those that routing decides inside are only needed to count bytes."""
    symbols = _symbols(region.cut.inputs)
    inside = {symbol: 16 for symbol in _symbols(region.cut.nodes)}
    return inside | {symbol: 5 if len(symbols) == 1 else 2 + place for place, symbol in enumerate(symbols)}


def _symbols(nodes: Iterable[fx.Node]) -> list[sympy.Symbol]:
    values = [value for node in nodes for value in tree_leaves(node_value(node))]
    shapes = [value.shape if isinstance(value, Tensor) else value for value in values]
    sizes = [size for shape in shapes for size in (shape if isinstance(shape, torch.Size) else (shape,))]
    exprs = [size.node.expr for size in sizes if isinstance(size, torch.SymInt)]
    return list(dict.fromkeys(symbol for expr in exprs for symbol in sorted(expr.free_symbols, key=str)))


def _narrow_widths(region: MoERegion) -> dict[int, int]:
    """Return narrower widths of the tokens and of the parameters; E, K and sizes that are numbers by chance stay.

    No width is made narrower where parameters are packed: how wide they are unpacked is a number in the code, not
    the size of a tensor that comes in.
    """
    if any(is_int_tensor(node) for node in region.params):
        return {}
    inner: list[int] = []
    counts = [region.dims.num_experts, region.dims.top_k]
    for node in region.cut.inputs:
        value = node_value(node)
        if not isinstance(value, Tensor):
            continue
        sizes = list(map(static_size, value.shape))
        if node in region.params or isinstance(value, torch.nn.Parameter):
            inner += [size for size in sizes if size is not None and size != region.dims.num_experts]
        elif sizes and value.dtype.is_floating_point:
            inner += [region.dims.hidden] if node is region.hidden else []
            counts += [size for size in sizes[:-1] if size is not None]
    widths = narrow_widths(inner, [region.dims.num_experts, region.dims.top_k])
    return {} if set(counts) & set(widths) else widths


class _Inputs:
    """Made-up values for a region's inputs."""

    def __init__(self, region: MoERegion, sizes: _Sizes) -> None:
        self._region = region
        self._sizes = sizes
        self._generator = torch.Generator("cpu").manual_seed(0)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all inputs and of all that the region as captured computes, in fp64."""
        nodes = (*self._region.cut.inputs, *self._region.cut.nodes)
        tensors = [value for node in nodes for value in tree_leaves(node_value(node)) if isinstance(value, Tensor)]
        return sum(8 * math.prod(map(self._sizes.of, value.shape)) for value in tensors)

    def values(self) -> tuple[list[Any], list[Tensor | None]]:
        """In the order of the cut's inputs; with each that is a weight of every expert, which a token chose."""
        index, nodes = self._index(), self._region.cut.inputs
        chosen = [self._chosen(node, index) for node in nodes]
        return [self._value(node, index, mask) for node, mask in zip(nodes, chosen, strict=True)], chosen

    def _index(self) -> Tensor | None:
        """[...,K] different experts a token."""
        node, dims = self._region.expert_index, self._region.dims
        if node is None:
            return None
        value = node_value(node)
        assert isinstance(value, Tensor)
        shape = tuple(map(self._sizes.of, value.shape))
        num_tokens = math.prod(shape) // dims.top_k
        few = torch.randperm(dims.num_experts, generator=self._generator, device="cpu")[
            : dims.top_k + 1
        ]  # each costs a compiled function's run
        order = torch.rand(num_tokens, len(few), generator=self._generator, device="cpu").argsort(1)
        return few[order[:, : dims.top_k]].view(shape).to(value.device, value.dtype)

    def _value(self, node: fx.Node, index: Tensor | None, chosen: Tensor | None) -> Any:
        value = node_value(node)
        if isinstance(value, torch.SymInt):
            return self._sizes.of(value)
        if isinstance(value, torch.Size):
            return torch.Size(map(self._sizes.of, value))
        if isinstance(value, torch.SymFloat):
            return float(value.node.hint)
        if not isinstance(value, Tensor):
            return self._sizes.widths.get(value, value) if type(value) is int else value
        if node is self._region.expert_index:
            return index
        shape = tuple(map(self._sizes.of, value.shape))
        if not value.dtype.is_floating_point:
            return (
                torch.zeros(shape, dtype=value.dtype, device=value.device) if chosen is None else chosen.to(value.dtype)
            )
        filled = torch.randn(shape, dtype=torch.float64, generator=self._generator, device="cpu") / math.sqrt(
            max((1, *shape[-1:]))
        )
        filled = filled.abs() + 0.1 if index is not None and shape[: index.ndim - 1] == index.shape[:-1] else filled
        filled = _laid_out(filled, value).to(value.device)
        return filled if chosen is None else filled * chosen

    def _chosen(self, node: fx.Node, index: Tensor | None) -> Tensor | None:
        """[T,E] (or an expert's column of it): which experts a token chose, for weights that are zero elsewhere."""
        num_experts, value = self._region.dims.num_experts, node_value(node)
        if index is None or not isinstance(value, Tensor):
            return None
        shape = tuple(map(self._sizes.of, value.shape))
        choices = index.cpu().long().reshape(-1, self._region.dims.top_k)
        table = torch.zeros(choices.shape[0], num_experts, dtype=torch.float64, device="cpu").scatter(1, choices, 1.0)
        if node in self._region.weight_columns:
            return table[:, self._region.weight_columns.index(node)].reshape(shape).to(value.device)
        if self._region.gathers_weight and node is self._region.routing_weight:  # a router may know further experts
            table = torch.nn.functional.pad(table, (0, shape[-1] - num_experts))
        is_table = shape[-1:] == table.shape[-1:] and math.prod(shape) == table.numel()
        return table.reshape(shape).to(value.device) if is_table and node is not self._region.hidden else None


def _laid_out(filled: Tensor, like: Tensor) -> Tensor:
    """The same numbers with dimensions in memory in the order of `like`."""
    if like.ndim < 2 or like.is_contiguous() or any(not isinstance(step, int) for step in like.stride()):
        return filled
    order = sorted(range(like.ndim), key=like.stride().__getitem__, reverse=True)
    back = [order.index(dim) for dim in range(like.ndim)]
    return filled.permute(order).contiguous().permute(back)


class _ExactExpert:
    """Compiled functions as graphs, run in fp64 at the widths of the check."""

    contribution_dtype = torch.float64

    def __init__(self, compiled_expert: CompiledExpert, widths: Mapping[int, int]) -> None:
        self._compiled_expert, self._widths = compiled_expert, widths
        self.key, self.has_weight, self.param_kinds = (
            compiled_expert.key,
            compiled_expert.has_weight,
            compiled_expert.param_kinds,
        )
        self.takes_group, self.num_factored = compiled_expert.takes_group, compiled_expert.num_factored
        self.out_width = widths.get(compiled_expert.out_width, compiled_expert.out_width)

    def forward(self) -> Compiled:
        return _ExactCall(self._compiled_expert.forward(), self._widths)

    def backward(self, wanted: tuple[bool, ...]) -> CompiledBackward:
        backward = self._compiled_expert.backward(wanted)
        return replace(backward, call=_ExactCall(backward.call, self._widths))

    def saving(self, policy: SavePolicy, wanted: tuple[bool, ...]) -> SavingFunctions | None:
        return None


class _ExactCall:
    def __init__(self, call: Any, widths: Mapping[int, int]) -> None:
        self.peak_bytes, self.results_bytes = call.peak_bytes, call.results_bytes
        self._run: Callable[..., Sequence[Tensor]] = ExactRun(narrow_graph(call.graph_module, widths)).run

    def __call__(self, *args: Tensor) -> Sequence[Tensor]:
        return self._run(*args)


_LEAST_WIDTH = 32
"""Numbers below it are ranks of adapters, heads, dimensions: they stay."""


def narrow_widths(widths: Iterable[int], counts: Iterable[int]) -> dict[int, int]:
    """Return what each width becomes, divided by a common factor; empty where they cannot be divided.

    Args:
        widths: every size of a tensor's inner dimensions.
        counts: numbers that stay: E, K, and T where it is a number.
    """
    wide = {width for width in widths if width >= _LEAST_WIDTH}
    factor = math.gcd(*wide)
    if factor < 2 or min(wide) <= max(counts, default=0):
        return {}
    while factor % 2 == 0 and min(wide) // factor < 2:  # a width of one would hide what a layout does
        factor //= 2
    return {width: width // factor for width in wide} if factor > 1 else {}


def narrow_graph(graph_module: fx.GraphModule, widths: Mapping[int, int]) -> fx.GraphModule:
    """A copy with every number that is a width replaced by its narrow one."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, copies))

    def narrowed(value: Any) -> Any:
        return widths.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else value

    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, narrowed)
        node.kwargs = fx.node.map_aggregate(node.kwargs, narrowed)
    return fx.GraphModule(graph_module, graph)
