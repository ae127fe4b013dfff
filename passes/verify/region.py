"""Verify: a region's original subgraph against its rewritten form, on real inputs and on adversarial routings.

Steps, for each raised region, before anything is lowered:
1. record its inputs and output in one real run of the graph (`real_run`);
2. outline the original, and lower a copy of that outline with the very `lower_region` that rewrites the model;
3. run both, forward and backward, with the routing that was captured and with adversarial ones (few experts, each in
   turn, random), in chunks of the planned size and of a seventh of the rows; measure the output and every gradient
   against the original in fp64 (`reference`);
4. run the controls: the outline must give the recorded output exactly, and a rewritten form with one falsified chunk
   must be told apart.

Fails: an error above the tolerance and above twice the original's own; a control that does not do its work.
Adversarial routings name K different experts per token, as every top-k does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.dataflow import is_same_view, node_value
from memfine_fx.passes.lower.region import lower_region
from memfine_fx.passes.modes import enter_autocast
from memfine_fx.passes.verify.outline import outline
from memfine_fx.passes.verify.real_run import Recorded
from memfine_fx.passes.verify.reference import ExactRun
from memfine_fx.records import ChunkPlan, Modes, MoERegion
from memfine_fx.records.verification import Check, RegionVerification
from memfine_fx.runtime.compiled_expert import Compiled, CompiledExpert
from memfine_fx.runtime.mact import ChunkTuner
from memfine_fx.runtime.store import LiveRegion, register, unregister

__all__ = [
    "SMALL_CHUNKS",
    "TOLERANCES",
    "Forms",
    "Tensors",
    "errors_of",
    "failure_of",
    "run_exact",
    "run_step",
    "verify_region",
    "worst_of",
]

TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}
_ORIGINAL_FACTOR = 2.0
_LEAST_NORM = 1e-6
SMALL_CHUNKS = 7
_SEED = 0

Tensors = dict[str, Tensor]


def verify_region(region: MoERegion, live: LiveRegion, recorded: Recorded, modes: Modes) -> RegionVerification:
    """Compare the two forms of a region.

    Args:
        region: raised, not yet lowered.
        live: its registered counterpart; not changed.
        recorded: its values in one real run.
        modes: autocast state at its exit.
    """
    forms = Forms.of(region, live, modes)
    tolerance = TOLERANCES.get(recorded.output.dtype, 1e-5)
    identity_error = _relative_error(forms.outlined_output(recorded.values), recorded.output)
    captured = _Inputs.of(forms, recorded.values)
    plan = live.plan_for(captured.num_tokens)
    small = _small_chunks(plan, captured.num_tokens, region.dims.top_k)
    checks = [check for chosen in {plan, small} for check in _compare(forms, captured, "captured", chosen)]
    for name, routed in captured.adversarial(region.dims.num_experts):
        checks += _compare(forms, routed, name, small)
    corrupted = _corrupted_error(forms, captured, small)
    result = RegionVerification(
        region.where, region.family, "float64", tolerance, tuple(checks), identity_error, corrupted
    )
    return replace(result, failure=failure_of(result))


def failure_of(result: RegionVerification) -> str:
    for check in result.checks:
        if not check.error <= max(result.tolerance, _ORIGINAL_FACTOR * check.original_error):
            return (
                f"{check.worst} is off by {check.error:.1e} relative (the original by {check.original_error:.1e}) with "
                f"routing {check.routing!r} and {check.rows_per_chunk} rows a chunk"
            )
    if result.identity_error != 0.0:
        return f"control: the outlined original differs from the whole graph by {result.identity_error:.1e}"
    noise = max((check.original_error for check in result.checks), default=0.0)
    if result.corrupted_error is not None and result.corrupted_error <= max(result.tolerance, _ORIGINAL_FACTOR * noise):
        return f"control: a falsified chunk changed nothing beyond {result.corrupted_error:.1e}"
    return ""


class Leaves(Protocol):
    """Inputs that two forms of a piece of a graph read; see `Forms`."""

    @property
    def placeholders(self) -> tuple[str, ...]: ...

    @property
    def leaves(self) -> tuple[int, ...]: ...

    @property
    def wants_grad(self) -> frozenset[str]: ...


@dataclass(frozen=True)
class Forms:
    """A region outlined, and the same outline lowered.

    Args:
        placeholders: per input of the cut, the name of its placeholder.
        leaves: per input, the place of the first input that is the same view of the same tensor: they are one leaf.
        wants_grad: placeholders that had gradients in the capture.
    """

    original: fx.GraphModule
    rewritten: fx.GraphModule
    region: MoERegion
    live: LiveRegion
    modes: Modes
    placeholders: tuple[str, ...]
    leaves: tuple[int, ...]
    wants_grad: frozenset[str]

    @staticmethod
    def of(region: MoERegion, live: LiveRegion, modes: Modes) -> Forms:
        original, _ = outline(region.cut)
        rewritten, env = outline(region.cut)
        for node, copied in env.items():
            copied.meta.update(node.meta)
        output = next(iter(reversed(rewritten.graph.nodes)))
        region_id = f"{live.region_id}/verify"
        stand_in = replace(live, region_id=region_id, tuner=ChunkTuner(), plan=None, _plans={})
        register(stand_in)
        try:
            lower_region(rewritten, _translated(region, env), region_id, routes_on_device=live.kernels is not None)
        finally:
            unregister(region_id)
        assert output.op == "output"
        inputs = region.cut.inputs
        names = tuple(env[node].name for node in inputs)
        leaves = tuple(
            next(place for place, other in enumerate(inputs) if is_same_view(node, other)) for node in inputs
        )
        wanted = frozenset(names[place] for place in set(leaves) if _is_trained(inputs[place]))
        return Forms(original, rewritten, region, live, modes, names, leaves, wanted)

    def outlined_output(self, values: Sequence[Any]) -> Tensor:
        with torch.inference_mode(False), torch.no_grad(), enter_autocast(self.modes):
            output = self.original(*values)
        assert isinstance(output, Tensor)
        return output

    def run_original(self, inputs: _Inputs) -> Tensors:
        with enter_autocast(self.modes):
            return run_step(self.original, inputs.values, self)

    def run_exact(self, inputs: _Inputs) -> Tensors:
        return run_exact(self.original, inputs.values, self)

    def run_rewritten(self, values: Sequence[Any], plan: ChunkPlan, compiled_expert: CompiledExpert) -> Tensors:
        region_id = f"{self.live.region_id}/verify"
        live = replace(
            self.live,
            region_id=region_id,
            compiled_expert=compiled_expert,
            choose_plan=lambda _: plan,
            tuner=ChunkTuner(),
        )
        live = replace(live, plan=None, _plans={})
        register(live)
        try:
            with enter_autocast(self.modes):
                return run_step(self.rewritten, values, self)
        finally:
            unregister(region_id)


@dataclass(frozen=True)
class _Inputs:
    """Values of a region's inputs, and which of them is the expert index."""

    values: tuple[Any, ...]
    index_place: int | None

    @staticmethod
    def of(forms: Forms, values: Sequence[Any]) -> _Inputs:
        places = [place for place, node in enumerate(forms.region.cut.inputs) if node is forms.region.expert_index]
        return _Inputs(tuple(values), places[0] if places else None)

    @property
    def num_tokens(self) -> int:
        return 0 if self.index_place is None else int(self.values[self.index_place].shape[0])

    def adversarial(self, num_experts: int) -> Iterator[tuple[str, _Inputs]]:
        """The same inputs under other routings."""
        if self.index_place is None:
            return
        index: Tensor = self.values[self.index_place]
        if index.ndim != 2 or not 0 < index.shape[1] <= num_experts or not index.shape[0]:
            return
        for name, routing in _ROUTINGS.items():
            rerouted = routing(index.shape[0], index.shape[1], num_experts).to(index)
            values = [rerouted if place == self.index_place else value for place, value in enumerate(self.values)]
            yield name, _Inputs(tuple(values), self.index_place)


def _hot(num_tokens: int, top_k: int, num_experts: int) -> Tensor:
    """The first choice is always expert 0; the others take turns."""
    others = 1 + (torch.arange(num_tokens)[:, None] + torch.arange(top_k - 1)) % max(1, num_experts - 1)
    return torch.cat([torch.zeros(num_tokens, 1, dtype=torch.int64), others], dim=1)


def _random(num_tokens: int, top_k: int, num_experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    return torch.rand(num_tokens, num_experts, generator=generator).topk(top_k, dim=1).indices


_ROUTINGS: dict[str, Callable[[int, int, int], Tensor]] = {
    "first experts only": lambda t, k, e: torch.arange(k).expand(t, k),
    "last experts only": lambda t, k, e: torch.arange(e - k, e).expand(t, k),
    "in turn": lambda t, k, e: (torch.arange(t)[:, None] + torch.arange(k)) % e,
    "one expert hot": _hot,
    "random": _random,
}


def _translated(region: MoERegion, env: dict[fx.Node, Any]) -> MoERegion:
    """The region as it stands in the outline."""

    def translate(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value not in env:
                raise CannotChunk(Reason.OPAQUE, "the region refers to a node outside its cut", value)
            return env[value]
        if isinstance(value, (tuple, list)):
            return type(value)(map(translate, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and _holds_nodes(value):
            fields = {field.name: translate(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return replace(value, **fields)
        return value

    translated = translate(replace(region, seed=None))  # a router is no part of the outline
    assert isinstance(translated, MoERegion)
    return translated


def _holds_nodes(record: Any) -> bool:
    """Records about the graph, unlike the expert function, which is a graph of its own."""
    return not hasattr(record, "graph_module")


def _is_trained(node: fx.Node) -> bool:
    value = node_value(node)
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def run_step(function: Callable[..., Any], values: Sequence[Any], forms: Leaves) -> Tensors:
    """Output and gradients, with a fixed upstream gradient."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [
            value.detach().clone().requires_grad_(name in forms.wants_grad) if _is_float(value) else value
            for name, value in zip(forms.placeholders, values, strict=True)
        ]
        output = function(*(leaves[place] for place in forms.leaves))
        tensors = {"output": output.detach()}
        wanted = {name: leaf for name, leaf in zip(forms.placeholders, leaves, strict=True) if name in forms.wants_grad}
        if not wanted or not output.requires_grad:
            return tensors
        generator = torch.Generator().manual_seed(_SEED)
        upstream = torch.randn(output.shape, generator=generator).to(output)
        gradients = torch.autograd.grad(output, list(wanted.values()), upstream, allow_unused=True)
    named = zip(wanted, gradients, strict=True)
    return tensors | {f"d {name}": gradient for name, gradient in named if gradient is not None}


def run_exact(original: fx.GraphModule, values: Sequence[Any], forms: Leaves) -> Tensors:
    """The same in fp64."""
    wide = [value.double() if _is_float(value) else value for value in values]
    return run_step(ExactRun(original).run, wide, forms)


def _compare(forms: Forms, inputs: _Inputs, routing: str, plan: ChunkPlan) -> list[Check]:
    exact = forms.run_exact(inputs)
    original = forms.run_original(inputs)
    rewritten = forms.run_rewritten(inputs.values, plan, forms.live.compiled_expert)
    errors, own = errors_of(rewritten, exact), errors_of(original, exact)
    worst = worst_of(errors, own)
    return [Check(routing, plan.rows_per_chunk, worst, errors[worst], own.get(worst, math.inf))]


def worst_of(errors: dict[str, float], own: dict[str, float]) -> str:
    """The tensor furthest off for what the original itself achieves."""
    return max(errors, key=lambda name: errors[name] / max(_ORIGINAL_FACTOR * own.get(name, 0.0), _LEAST_NORM))


def _corrupted_error(forms: Forms, inputs: _Inputs, plan: ChunkPlan) -> float | None:
    if not inputs.num_tokens:
        return None
    exact = forms.run_exact(inputs)
    corrupted = forms.run_rewritten(inputs.values, plan, _CorruptedExpert(forms.live.compiled_expert))
    return max(errors_of(corrupted, exact).values())


class _CorruptedExpert:
    """Compiled functions whose first chunk is wrong: by 1%, in 16-bit by a quarter."""

    def __init__(self, compiled_expert: CompiledExpert) -> None:
        self._compiled_expert = compiled_expert

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled_expert, name)

    def forward(self) -> Any:
        return _CorruptedCall(self._compiled_expert.forward())

    def backward(self, wanted: tuple[bool, ...]) -> Any:
        backward = self._compiled_expert.backward(wanted)
        return replace(backward, call=_CorruptedCall(backward.call))


class _CorruptedCall:
    """A compiled function that is wrong the first time."""

    def __init__(self, call: Compiled) -> None:
        self.peak_bytes, self.results_bytes = call.peak_bytes, call.results_bytes
        self._call = call
        self._num_calls = 0

    def __call__(self, *args: Tensor) -> Sequence[Tensor]:
        results = self._call(*args)
        self._num_calls += 1
        return (
            [result * (1.01 if result.dtype.itemsize >= 4 else 1.25) for result in results]
            if self._num_calls == 1
            else results
        )


def _small_chunks(plan: ChunkPlan, num_tokens: int, top_k: int) -> ChunkPlan:
    tokens = max(1, num_tokens // SMALL_CHUNKS) if plan.tokens_per_chunk else 0
    return replace(plan, rows_per_chunk=max(1, num_tokens * top_k // SMALL_CHUNKS), tokens_per_chunk=tokens)


def errors_of(tensors: Tensors, reference: Tensors) -> dict[str, float]:
    """Return errors by name; infinite where one side has a gradient and the other none, unless it is zero anyway."""
    one_sided = {name: (tensors | reference)[name] for name in tensors.keys() ^ reference.keys()}
    missing = {name: 0.0 if not bool(value.any()) else math.inf for name, value in one_sided.items()}
    shared = tensors.keys() & reference.keys()
    return missing | {name: _relative_error(tensors[name], reference[name]) for name in shared}


def _relative_error(tensor: Tensor, reference: Tensor) -> float:
    """Return the relative error of the whole tensor in fp64, which is infinite where it is not a number.

    Against a reference of (nearly) zeros the error is absolute.
    """
    exact = reference.detach().double()
    error = float((tensor.detach().double() - exact).norm() / exact.norm().clamp_min(_LEAST_NORM))
    return error if error == error else math.inf
