"""Predicted against measured peaks of whole steps, budgets kept or not: ``workload`` "prediction:MODEL".

MODEL is a transformers model type; its sizes come from the job. `Job.points` are budgets in order: "free" is none, a
number is that share of the bytes predicted without one, and "least" asks for far too little. Where a budget is
infeasible, the smallest one that the error names is taken instead, which must then work.

For each point the model is compiled anew, a step warms it up, and two are measured with the allocator's events: one
as it is, and one with routers set to zero, so that all tokens go to the same experts, as no step before did.
"""

import dataclasses
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import memfine_fx
from benchmarks.machine import matmul_rate
from benchmarks.measuring import is_cache_empty
from benchmarks.records import Job, Measurement
from memfine_fx.demo.tiny import tiny_model
from memfine_fx.errors import BudgetInfeasible
from memfine_fx.memory.measure import trace_memory

NO_BUDGET = "free"
LEAST = "least"
_TOO_LITTLE = 1 << 20


@dataclass(frozen=True)
class Point:
    """One budget's bytes, of whole steps: parameters and what else is there before them included.

    Args:
        budget: 0 without one.
        minimum: smallest feasible one, where an error named it; else 0.
    """

    budget: int
    minimum: int
    predicted: int
    measured: int
    skewed_predicted: int
    skewed_measured: int
    seconds: float


def measure_predictions(job: Job) -> Measurement:
    """Every point's figures in `series`, under the names of `Point`'s fields."""
    cold = is_cache_empty()
    device = torch.device(job.device)
    points: list[Point] = []
    for name in job.points:
        if name == NO_BUDGET:
            points.append(_point(job, device, 0))
            continue
        wanted = _TOO_LITTLE if name == LEAST else int(float(name) * points[0].predicted)
        try:
            points.append(_point(job, device, wanted))
        except BudgetInfeasible as error:
            smallest = _point(job, device, error.minimum_bytes)
            points.append(dataclasses.replace(smallest, minimum=error.minimum_bytes))
    fields = [field.name for field in dataclasses.fields(Point)]
    series = {name: tuple(float(getattr(point, name)) for point in points) for name in fields}
    return Measurement(
        step_seconds=tuple(point.seconds for point in points),
        compile_seconds=0.0,
        cold=cold,
        peak_bytes=points[-1].measured,
        accumulating_peak_bytes=None,
        resting_bytes=0,
        allocated_bytes=None,
        reserved_bytes=None,
        value=0.0,
        gradient_norm=1.0,
        gradient_checksum=0.0,
        gradient_error=None,
        matmul_flops_per_second=matmul_rate(getattr(torch, job.dtype), device),
        graphs=0,
        recompilations=None,
        series=series,
    )


def _point(job: Job, device: torch.device, budget: int) -> Point:
    torch._dynamo.reset()
    model, inputs = build_predicted(job, device)
    memfine_fx.optimize(model, memory_budget=budget or None, dynamic=True)

    def step() -> None:
        model(**inputs).loss.backward()

    step()
    predicted, measured, seconds = _traced(model, step, device)
    with torch.no_grad():
        for router in routers_of(model):
            router.zero_()
    skewed_predicted, skewed_measured, _ = _traced(model, step, device)
    return Point(budget, 0, predicted, measured, skewed_predicted, skewed_measured, seconds)


def _traced(model: torch.nn.Module, step: Any, device: torch.device) -> tuple[int, int, float]:
    """(predicted, measured) bytes of a step that makes its gradients, and its seconds while traced."""
    model.zero_grad(set_to_none=True)
    trace = trace_memory(step, device)
    report = memfine_fx.report(model)
    assert report.step is not None and report.predicted_peak_bytes is not None, "a compiled step has a prediction"
    static = report.step.static_bytes - dict(report.step.static)["gradients before the step"]
    predicted = static + report.step.peak.num_bytes
    return predicted, static + trace.peak_bytes, statistics.fmean([trace.times_us[-1] / 1e6])


def routers_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The weights that choose experts."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("gate.weight", "router.weight", "router.layer.weight", "gate.wg.weight")):
            yield parameter


def build_predicted(job: Job, device: torch.device) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model of a job and its inputs."""
    torch.manual_seed(job.seed)
    sizes = job.sizes
    made = tiny_model(
        job.workload.partition(":")[2],
        batch=sizes.batch,
        length=sizes.sequence,
        experts_implementation="grouped_mm",
        **_fields(job),
    )
    model: Any = made.module.to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, job.dtype))
    return model, {name: value.to(device) for name, value in made.inputs.items()}


def _fields(job: Job) -> dict[str, Any]:
    """The job's sizes under the names that transformers' configs use; each takes those it knows."""
    sizes, model = job.sizes, job.workload.partition(":")[2]
    fields = {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.width,
        "moe_intermediate_size": sizes.width,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": 2 * sizes.sequence,
        "num_experts": sizes.experts,
        "num_local_experts": sizes.experts,
    }
    if model == "deepseek_v3":  # heads have parts of their own sizes there and each its own key, experts another name
        del fields["head_dim"]
        fields |= {"num_key_value_heads": sizes.heads}
        fields |= {"n_routed_experts": sizes.experts, "kv_lora_rank": 64, "q_lora_rank": 64, "v_head_dim": 64}
    return fields
