"""Check one model: optimize a copy, compare outputs and every gradient with the original, measure both peaks."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
from torch.distributed import ProcessGroup

import memfine_fx
from benchmarks.coverage.families import Family
from benchmarks.coverage.multimodal import MULTIMODAL
from benchmarks.coverage.packages import PackagedLayer
from benchmarks.coverage.rows import (
    EAGER_FACTOR,
    EXPERTS_FUNCTION,
    NO_FUNCTION,
    NOT_INSTALLED,
    ROUTING_REPLAY,
    TOLERANCE,
    CoverageRow,
    MultimodalRow,
    PackageRow,
)
from benchmarks.coverage.spellings import SPELLINGS
from memfine_fx.capture.structure import moe_layers
from memfine_fx.compat.transformers import name_of_experts_function
from memfine_fx.demo.tiny import TinyModel, names_experts, tiny_model
from memfine_fx.errors import ConfigError
from memfine_fx.memory.measure import trace_memory
from memfine_fx.passes.verify.forced_choices import ROUTINGS, ForcedChoices, by_routing
from memfine_fx.runtime import op

__all__ = [
    "LayerModel",
    "check_experts_function",
    "check_family",
    "check_model",
    "check_multimodal",
    "check_package",
    "check_replay",
    "check_spelling",
]

RowT = TypeVar("RowT", bound=CoverageRow)

_BATCH, _LENGTH = 2, 64
_ROWS_PER_CHUNK = 16
_LEAST_NORM = 1e-6
_NUDGES = 5
_EXACT_OUTPUT = 10.0
"""Times the unmodified model's own error in its output: what rounding of parameters may make of it."""


@dataclass(frozen=True)
class LayerModel(TinyModel):
    """A layer called with its inputs in their order; all that it returns is compared and has a part in the loss."""


def check_family(family: Family) -> CoverageRow:
    """The row of one transformers family, from the first of its model types that can be built and run."""
    tiny = _first_that_runs(family)
    if isinstance(tiny, str):
        return CoverageRow("family", family.name, failure=tiny)
    return check_model("family", family.name, tiny)


def check_experts_function(family: Family) -> CoverageRow:
    """The row of one transformers family whose experts are chunked by `experts_implementation="memfine"` alone."""
    tiny = _first_that_runs(family)
    if isinstance(tiny, str):
        return CoverageRow(EXPERTS_FUNCTION, family.name, failure=tiny)
    if not any(name_of_experts_function(module) and hasattr(module, "has_gate") for module in tiny.module.modules()):
        return CoverageRow(EXPERTS_FUNCTION, family.name, failure=NO_FUNCTION)
    with mock.patch.dict(os.environ, MEMFINE_OPTIONS=f"rows_per_chunk={_ROWS_PER_CHUNK}"):
        return check_model(EXPERTS_FUNCTION, family.name, tiny)


def check_replay(family: Family) -> CoverageRow:
    """The row of one transformers family that replays its own routing, and one that its code is forced to follow.

    Own routing: outputs and gradients are those of the run that was recorded, bit by bit. Another one, "in turn": they
    are compared with the unmodified model, whose choices a dispatch mode forces.
    """
    tiny = _first_that_runs(family)
    if isinstance(tiny, str):
        return CoverageRow(ROUTING_REPLAY, family.name, failure=tiny)
    torch._dynamo.reset()
    row = CoverageRow(ROUTING_REPLAY, family.name, built=type(tiny.module).__name__)
    row = dataclasses.replace(row, num_layers=_num_expert_layers(tiny.module))
    optimized = _copied(tiny.module)
    config = memfine_fx.Config(rows_per_chunk=_ROWS_PER_CHUNK, inner_backend="eager")
    memfine_fx.optimize(optimized, config=config)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _step(optimized, tiny)
            with memfine_fx.record_routing(optimized) as record:
                own = _step(optimized, tiny)
            forwards = record.take()
            with memfine_fx.replay_routing(optimized, forwards):
                replayed = _step(optimized, tiny)
            dims = (region.dims for region in memfine_fx.report(optimized).regions)
            (num_experts,) = {sizes.num_experts for sizes in dims if sizes is not None}
            with memfine_fx.replay_routing(optimized, [_in_turn(ids, num_experts) for ids in forwards]):
                found = _step(optimized, tiny)
    except Exception as error:  # NOTE: whatever goes wrong belongs in the table, not in a traceback
        return dataclasses.replace(row, failure=f"{type(error).__name__}: {error}"[:400])
    differing = [name for name in own if not torch.equal(own[name], replayed[name])]
    if differing:
        return dataclasses.replace(row, failure=f"its own routing gives another {differing[0]}")
    row = dataclasses.replace(row, num_raised=sum(ids.shape[1] for ids in forwards), worst_error=0.0)
    with ForcedChoices(by_routing("in turn"), num_experts) as forced:
        expected = _step(_copied(tiny.module), tiny)
        if not forced.num_forced:  # tokens' experts are looked up: its code cannot be forced
            return row
        errors = _errors(found, expected)
        worst = max(errors, key=errors.__getitem__)
        row = dataclasses.replace(row, worst_error=errors[worst], worst_name=worst)
        return row if errors[worst] < TOLERANCE else _against_fp64(row, tiny, found, expected)


def _in_turn(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The routing "in turn" for as many tokens, layers and choices as recorded ids [T,L,K] have."""
    num_tokens, num_layers, top_k = ids.shape
    experts = ROUTINGS["in turn"](torch.arange(num_tokens)[:, None], torch.arange(top_k)[None], num_experts)
    return experts[:, None].expand(-1, num_layers, -1)


def _first_that_runs(family: Family) -> TinyModel | str:
    """Return a toy model of the first of a family's model types that can be built and run, else why none can."""
    failures = []
    for model_type in family.model_types:
        try:
            torch.manual_seed(0)
            tiny = tiny_model(model_type, batch=_BATCH, length=_LENGTH)
            _spread_weights(tiny.module)
            tiny.module(**tiny.inputs)
        except ConfigError as error:
            failures.append(str(error))
        except Exception as error:  # NOTE: a model that does not run as it is; the row says so
            failures.append(f"{model_type} does not run at toy size: {type(error).__name__}: {error}"[:300])
        else:
            return tiny
    return "; ".join(failures) or "no model type of it is registered"


def check_spelling(name: str) -> CoverageRow:
    """The row of one hand-written layer."""
    torch.manual_seed(0)
    layer, hidden = SPELLINGS[name]()
    return check_model("spelling", name, TinyModel(layer.train(), {"hidden": hidden}, False))


def check_package(entry: PackagedLayer) -> PackageRow:
    """The row of one layer as its package ships it."""
    row = PackageRow("package", entry.name, package=entry.package, version=entry.installed or entry.version)
    if entry.installed is None:
        return dataclasses.replace(row, failure=NOT_INSTALLED)
    try:
        torch.manual_seed(0)
        layer, inputs = entry.made(), entry.inputs()
        tiny = LayerModel(layer, {f"input {place}": value for place, value in enumerate(inputs)}, False)
        _step(_copied(layer), tiny)
    except Exception as error:  # NOTE: a layer that does not run as it is; the row says so
        return dataclasses.replace(row, failure=f"does not run here: {type(error).__name__}: {error}"[:300])
    checked = dataclasses.asdict(check_model("package", entry.name, tiny))
    return PackageRow(**{**checked, "num_layers": 1, "package": row.package, "version": row.version})


def check_multimodal(name: str) -> MultimodalRow:
    """The row of one deep model that is called with images, compiled as the other models of the table are."""
    torch.manual_seed(0)
    entry = MULTIMODAL[name]
    tiny = entry.build()
    _spread_weights(tiny.module)
    more = dataclasses.replace(tiny, inputs=entry.inputs(tiny.module.config, num_images=2, text_length=31))
    row = MultimodalRow("multimodal", name, built=type(tiny.module).__name__, num_layers=len(moe_layers(tiny.module)))
    row = dataclasses.replace(row, num_plain_graphs=_num_plain_graphs(tiny))
    torch._dynamo.reset()
    optimized = _copied(tiny.module)
    config = memfine_fx.Config(rows_per_chunk=_ROWS_PER_CHUNK)
    memfine_fx.optimize(optimized, inner_backend="eager", config=config)
    for call in (tiny, more):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = _step(optimized, call)  # compiles, tries flags of Dynamo, and compares layers with their code
                with mock.patch.object(op, "run_forward", wraps=op.run_forward) as run_forward:
                    _step(optimized, call)
            except Exception as error:  # NOTE: whatever goes wrong belongs in the table, not in a traceback
                return dataclasses.replace(row, failure=f"optimized: {type(error).__name__}: {error}"[:400])
        row = _with_call(
            row, dataclasses.replace(call, module=_copied(tiny.module)), found, int(run_forward.call_count)
        )
        report = memfine_fx.report(optimized)
        graphs = (row.num_graphs or report.num_graphs, report.num_graphs)
        row = dataclasses.replace(row, num_graphs=graphs[0], num_later_graphs=graphs[1] - graphs[0])
    refused = [region for region in report.regions if region.status == "refused"]
    return dataclasses.replace(
        row,
        num_found=row.num_raised + sum(region.has_experts for region in refused),
        reasons=tuple(dict.fromkeys(f"{region.where.module}: {region.reason}" for region in refused)),
        uncompared=tuple(dict.fromkeys(filter(None, (region.not_compared_with_code for region in report.regions)))),
    )


def _with_call(row: MultimodalRow, tiny: TinyModel, found: dict[str, torch.Tensor], num_regions: int) -> MultimodalRow:
    """The row after one more call: with the smaller number of regions, and the larger error."""
    expected = _step(_copied(tiny.module), tiny)
    errors = _errors(found, expected)
    worst = max(errors, key=errors.__getitem__)
    is_first = row.worst_error is None
    num_raised = num_regions if is_first else min(row.num_raised, num_regions)
    row = dataclasses.replace(row, num_raised=num_raised)
    of_call = dataclasses.replace(row, worst_error=errors[worst], worst_name=worst, exact_error=None, eager_error=None)
    if errors[worst] >= TOLERANCE:
        of_call = _against_fp64(of_call, tiny, found, expected)
    is_worse = is_first or (row.is_exact and (not of_call.is_exact or errors[worst] > (row.worst_error or 0.0)))
    return of_call if is_worse else row


def _num_plain_graphs(tiny: TinyModel) -> int:
    """Graphs that `torch.compile` has for a step."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph

    plain = _copied(tiny.module)
    plain.compile(backend=counting)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _step(plain, tiny)
    return len(graphs)


def check_model(kind: str, name: str, tiny: TinyModel) -> CoverageRow:
    """Chunk a copy, with the eager inner compiler where one is needed, and compare it with the model."""
    torch._dynamo.reset()
    module = tiny.module
    # NOTE: never run, so that its copies are as new: layers count tokens in buffers and keep their last loss.
    tiny = dataclasses.replace(tiny, module=_copied(module))
    row = CoverageRow(kind, name, built=type(module).__name__, num_layers=_num_expert_layers(module))
    optimized = _copied(module)
    config = memfine_fx.Config(rows_per_chunk=_ROWS_PER_CHUNK, inner_backend="eager")
    uses_function = kind == EXPERTS_FUNCTION
    try:
        if uses_function:
            module.set_experts_implementation("eager")
            optimized.set_experts_implementation("memfine")
        else:
            memfine_fx.optimize(optimized, inner_backend="eager", config=config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _step(optimized, tiny)
    except Exception as error:  # NOTE: whatever goes wrong belongs in the table, not in a traceback
        return dataclasses.replace(row, failure=f"optimized: {type(error).__name__}: {error}"[:400])
    expected = _step(module, tiny)
    errors = _errors(found, expected)
    worst = max(errors, key=errors.__getitem__)
    report = memfine_fx.report(optimized)
    refused = [region for region in report.regions if region.status == "refused"]
    num_raised = _num_chunked_calls(optimized, tiny)
    row = dataclasses.replace(
        row,
        num_graphs=report.num_graphs,
        num_found=num_raised + sum(region.has_experts for region in refused),
        num_raised=num_raised,
        worst_error=errors[worst],
        worst_name=worst,
        peak_ratio=_peak_ratio(optimized, tiny) if report.num_chunked and not uses_function else None,
        reasons=tuple(dict.fromkeys(region.reason for region in refused)),
        uncompared=tuple(dict.fromkeys(filter(None, (region.not_compared_with_code for region in report.regions)))),
    )
    return row if errors[worst] < TOLERANCE else _against_fp64(row, tiny, found, expected)


def _against_fp64(
    row: RowT, tiny: TinyModel, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> RowT:
    """The tensor in which the optimized model is worst, judged by the unmodified model in fp64.

    NOTE: one run of the unmodified model in fp32 is one draw of its rounding, which another CPU's kernels draw anew:
    where a gradient is ill-conditioned, draws lie a factor of ten apart (the decays of gated delta rules). So its
    distance from fp64 is the largest of that run and of runs with parameters one unit in the last place away, which
    are as right as it is.
    """
    reference = _copied(tiny.module).double()
    if hasattr(reference, "set_experts_implementation"):
        reference.set_experts_implementation("eager")
    wide = {name: value.double() if value.is_floating_point() else value for name, value in tiny.inputs.items()}
    # NOTE: for layers that go down to bf16 by themselves, as grouped matmuls do not take fp64.
    with (
        mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.double),
        mock.patch.object(torch, "_grouped_mm", _grouped_mm),
    ):
        exact = _step(reference, dataclasses.replace(tiny, inputs=wide))
    ours, eager = _errors(found, exact), _errors(expected, exact)
    most = _EXACT_OUTPUT * max(eager["output"], TOLERANCE)
    for seed in range(_NUDGES):
        nudged = _errors(_step(_nudged(tiny.module, seed), tiny), exact)
        if nudged["output"] <= most:  # beyond, a token was routed elsewhere, which is no rounding
            eager = {name: max(error, nudged.get(name, 0.0)) for name, error in eager.items()}
    worst = max(ours, key=lambda name: ours[name] / max(eager.get(name, 0.0), TOLERANCE / EAGER_FACTOR))
    return dataclasses.replace(row, worst_name=worst, exact_error=ours[worst], eager_error=eager.get(worst, 0.0))


def _grouped_mm(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """What `torch._grouped_mm` computes of rows (N, H), weights (E, H, F) and the ends of the experts' rows (E,)."""
    parts = rows.tensor_split(offs[:-1].tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def _nudged(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A copy in which every second number of the parameters, at random, is the next one in its precision."""
    generator = torch.Generator().manual_seed(seed)
    nudged = _copied(module)
    with torch.no_grad():
        for parameter in nudged.parameters():
            if parameter.is_floating_point():
                is_moved = torch.rand(parameter.shape, generator=generator) < 0.5
                parameter.copy_(torch.where(is_moved, torch.nextafter(parameter, 2 * parameter), parameter))
    return nudged


def _num_chunked_calls(optimized: torch.nn.Module, tiny: TinyModel) -> int:
    """Regions run in one forward; layers whose blocks are compiled on their own may share one."""
    with torch.no_grad():
        _called(optimized, tiny, tiny.inputs)  # compiles, and so compares layers with their own code
        with mock.patch.object(op, "run_forward", wraps=op.run_forward) as run_forward:
            _called(optimized, tiny, tiny.inputs)
    return int(run_forward.call_count)


def _num_expert_layers(module: torch.nn.Module) -> int:
    """Outermost modules whose own class says that they hold experts."""
    return sum(1 if names_experts(child) else _num_expert_layers(child) for child in module.children()) or (
        1 if names_experts(module) else 0
    )


def _spread_weights(module: torch.nn.Module) -> None:
    """Weights large enough that every gradient is well above rounding, routing far from ties."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1 and parameter.is_floating_point() and parameter.numel() > 1:
                deviation = float(parameter.float().std())
                if 0 < deviation < 0.1 or deviation == 0:
                    parameter.copy_(torch.randn_like(parameter) * 0.12)


def _step(module: torch.nn.Module, tiny: TinyModel) -> dict[str, torch.Tensor]:
    """Outputs and gradients of one forward and backward, by name; the same random numbers each time."""
    torch.manual_seed(1)
    module.zero_grad()
    leaves = {
        name: value.detach().clone().requires_grad_() if value.is_floating_point() else value
        for name, value in tiny.inputs.items()
    }
    output = _called(module, tiny, leaves)
    tensors = {name: value.detach() for name, value in _outputs(output, tiny).items()}
    _loss(output, tiny).backward()
    tensors |= {f"d {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    tensors |= {f"d {name}": p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}
    return tensors


def _called(module: torch.nn.Module, tiny: TinyModel, inputs: Mapping[str, torch.Tensor]) -> Any:
    return module(*inputs.values()) if isinstance(tiny, LayerModel) else module(**inputs)


def _copied(module: torch.nn.Module) -> torch.nn.Module:
    """A deep copy that shares process groups, which cannot be copied."""
    values = [value for child in module.modules() for value in vars(child).values()]
    return copy.deepcopy(module, {id(value): value for value in values if isinstance(value, ProcessGroup)})


def _errors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """By name; a gradient of zeros stands for one that is not there (experts without tokens, which a loop skips)."""
    both = {**found, **expected}
    missing = {name: math.inf if both[name].any() else 0.0 for name in found.keys() ^ expected.keys()}
    return missing | {name: _relative_error(found[name], expected[name]) for name in found.keys() & expected.keys()}


def _relative_error(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    exact = reference.detach().double()
    return float((tensor.detach().double() - exact).norm() / exact.norm().clamp_min(_LEAST_NORM))


def _outputs(output: Any, tiny: TinyModel) -> dict[str, torch.Tensor]:
    """What is compared, by name: the main output, and of a layer all that it returns in floating point."""
    if not isinstance(tiny, LayerModel):
        return {"output": _main_output(output)}
    returned = _floating(output)
    return {"output" if not place else f"output {place}": value for place, value in enumerate(returned)}


def _floating(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    return [value for part in output for value in _floating(part)] if isinstance(output, (list, tuple)) else []


def _main_output(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    for name in ("logits", "last_hidden_state", "feature_maps"):
        value = getattr(output, name, None)
        if value is not None:
            return value if isinstance(value, torch.Tensor) else value[-1]
    return output[0]


def _loss(output: Any, tiny: TinyModel) -> torch.Tensor:
    if tiny.has_loss:
        return output.loss
    parts = [value for value in _outputs(output, tiny).values() if value.requires_grad]
    return torch.stack([_weighted(value.float()) for value in parts]).sum()


def _weighted(output: torch.Tensor) -> torch.Tensor:
    """A scalar in which every number has a weight of its own; what is one number, 1."""
    first = -1 if output.numel() > 1 else 1
    return (output * torch.linspace(first, 1, output.numel()).view(output.shape)).sum()


def _peak_ratio(optimized: torch.nn.Module, tiny: TinyModel) -> float:
    """Against the same captured graphs without our rewriting: what capturing itself does is not ours."""
    captured = _copied(tiny.module)
    captured.compile(backend="eager")
    return _peak(optimized, tiny) / max(1, _peak(captured, tiny))


def _peak(module: torch.nn.Module, tiny: TinyModel) -> int:
    """Bytes beyond what the step leaves behind (its gradients)."""
    step: Callable[[], Any] = lambda: _loss(_called(module, tiny, tiny.inputs), tiny).backward()  # noqa: E731  # one expression
    module.zero_grad(set_to_none=False)
    step()
    module.zero_grad(set_to_none=False)
    return trace_memory(step, torch.device("cpu")).peak_bytes
