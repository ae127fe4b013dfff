"""Seconds of one training step: stages, pipeline bubble, data parallel traffic, optimizer.

Layers on one another, as asked by `model`:
    "base"       every term alone, nothing hidden, no recomputation tricks beyond the strategy's
    "optimised"  overlap, host limits, offload (the default)
Faults are a third layer on top (`faults`), which needs only the step time and the checkpoint's size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from memfine_planner.costs.architectures import Architecture
from memfine_planner.costs.calibration import Calibration, fitted
from memfine_planner.costs.collectives import all_gather, point_to_point
from memfine_planner.costs.strategy import Strategy, check
from memfine_planner.costs.timing import LayerTime, exposed_seconds, head_time, layer_time
from memfine_planner.hardware.links import Group
from memfine_planner.hardware.systems import System
from memfine_planner.training.stages import Stage, stages

__all__ = ["StageTime", "StepTime", "step_time"]


@dataclass(frozen=True)
class StageTime:
    """One pipeline rank, per micro-batch: seconds, and where they go."""

    rank: int
    forward_s: float
    backward_s: float
    parts: tuple[tuple[str, float], ...]

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class StepTime:
    """One step.

    Args:
        seconds: all of it.
        terms: (name, seconds) that add up to `seconds`: the slowest stage's parts over all micro-batches, the
            pipeline bubble, exposed data parallel traffic, the optimizer.
        stages: per pipeline rank.
        layers: (kind, time) of each kind of layer.
    """

    arch: Architecture
    system: System
    strategy: Strategy
    seconds: float
    terms: tuple[tuple[str, float], ...]
    stages: tuple[StageTime, ...]
    layers: tuple[tuple[str, LayerTime], ...]

    @property
    def tokens_per_s(self) -> float:
        return self.strategy.tokens_per_step / self.seconds

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.strategy.gpus

    @property
    def model_tflops_per_gpu(self) -> float:
        return self.tokens_per_s_per_gpu * self.arch.model_flops(self.strategy.seq) / 1e12

    @property
    def utilisation(self) -> float:
        """Model FLOPs over the dense rate of the recipe's format (MFU)."""
        return self.model_tflops_per_gpu * 1e12 / self.system.rate(self.strategy.numbers.matmul)


def step_time(
    arch: Architecture,
    sys: System,
    strategy: Strategy,
    calibration: Calibration | None = None,
    *,
    model: Literal["base", "optimised"] = "optimised",
    rows: float | None = None,
) -> StepTime:
    """Predict a step.

    Args:
        rows: rows that the slowest rank's experts receive per layer, None for balanced routing.

    Raises:
        StrategyError: the strategy breaks a rule.
    """
    check(arch, sys, strategy)
    cal = calibration or fitted()
    s = strategy
    if model == "base":
        s = replace(s, overlap_tp=False, overlap_dp=False, overlap_ep=False, overlap_pp=False, cuda_graphs="full")
    held = stages(arch, s.pp, s.vp)
    times = tuple(_stage_time(arch, stage, s, sys, cal, rows) for stage in held)
    slowest = max(times, key=lambda time: time.total_s)
    work = s.micro_batches * slowest.total_s
    bubble = sum(time.total_s for time in times if time is not slowest) / s.vp
    terms = {name: seconds * s.micro_batches for name, seconds in slowest.parts}
    terms["pipeline bubble"] = bubble
    sends = _pipeline_sends(arch, s, sys, cal)
    terms["pipeline sends"] = sends
    terms |= _data_parallel(arch, held, times, s, sys, cal)
    terms["optimizer"] = _optimizer_seconds(arch, held, s, sys, cal)
    seconds = work + sum(terms[name] for name in terms if name not in dict(slowest.parts))
    kinds = {_kind_name(kind): layer_time(arch, kind, s, sys, cal, rows) for kind in arch.kind_counts}
    return StepTime(arch, sys, strategy, seconds, tuple(terms.items()), times, tuple(kinds.items()))


def _kind_name(kind: object) -> str:
    is_moe, window = getattr(kind, "is_moe", False), getattr(kind, "window", 0)
    return ("MoE" if is_moe else "dense") + (f", window {window}" if window else "")


def _stage_time(
    arch: Architecture, stage: Stage, s: Strategy, sys: System, cal: Calibration, rows: float | None
) -> StageTime:
    plain = replace(s, recompute="none", chunks=1, rows_per_round=0)
    share = 1.0 if s.recompute_layers is None else s.recompute_layers / arch.layers
    forward = backward = 0.0
    parts: dict[str, float] = {}
    for kind, count in stage.kinds:
        for variant, weight in ((s, share), (plain, 1 - share)):
            if weight <= 0:
                continue
            layer = layer_time(arch, kind, variant, sys, cal, rows)
            forward += count * weight * layer.forward_s
            backward += count * weight * layer.backward_s
            _add_parts(parts, layer, count * weight)
    if s.zero == 3:
        extra_f, extra_b = _sharded_weights(arch, stage, forward, backward, s, sys, cal)
        forward, backward = forward + extra_f, backward + extra_b
        parts["FSDP gathers"] = extra_f + extra_b
    if s.offload_layers:
        extra = _offload_seconds(arch, stage, forward, s, sys, cal)
        forward, backward = forward + extra, backward + extra
        parts["offload"] = 2 * extra
    if stage.has_head:
        head = head_time(arch, s, sys, cal)
        forward, backward = forward + head.forward_s, backward + head.backward_s
        parts["head and loss"] = head.total_s
    return StageTime(stage.rank, forward, backward, tuple(parts.items()))


_PART_NAMES = {
    ("attention", "compute"): "attention compute",
    ("ffn", "compute"): "dense FFN compute",
    ("experts", "compute"): "expert compute",
    ("router", "compute"): "router",
}


def _add_parts(parts: dict[str, float], layer: LayerTime, weight: float) -> None:
    for term in layer.terms:
        if term.kind not in ("compute", "memory"):
            continue
        name = _PART_NAMES.get((term.part, term.kind), "memory-bound kernels")
        parts[name] = parts.get(name, 0.0) + weight * (term.forward_s + term.backward_s)
        if term.recompute_s:
            parts["recomputation"] = parts.get("recomputation", 0.0) + weight * term.recompute_s
    for group, seconds in layer.exposed:
        if seconds:
            name = f"exposed {group.upper()} communication"
            parts[name] = parts.get(name, 0.0) + weight * seconds
    parts["waiting for the host"] = parts.get("waiting for the host", 0.0) + weight * layer.host_exposed_s


def local_params(arch: Architecture, stage: Stage, s: Strategy) -> tuple[float, float]:
    """Weights of a stage on one rank before ZeRO: (replicated over DP, routed experts)."""
    dense = sum(count * arch.dense_params(kind) for kind, count in stage.kinds) / s.tp
    if stage.has_embedding:
        dense += arch.embedding_params / s.tp
    if stage.has_head and not (arch.tied and stage.has_embedding):
        dense += arch.embedding_params / s.tp
    experts = stage.num_moe * arch.experts / s.ep * arch.expert_params
    return dense, experts


def _groups(s: Strategy) -> tuple[Group, Group]:
    return Group(s.dp * s.cp, s.tp), Group(s.expert_dp, s.ep)


def _sharded_weights(
    arch: Architecture, stage: Stage, forward: float, backward: float, s: Strategy, sys: System, cal: Calibration
) -> tuple[float, float]:
    """Exposed weight gathers (forward and backward) and gradient scatters of ZeRO-3, per micro-batch."""
    dense, experts = local_params(arch, stage, s)
    dense_group, expert_group = _groups(s)
    gather = all_gather(2.0 * dense, dense_group, sys, cal) + all_gather(2.0 * experts, expert_group, sys, cal)
    # Both happen per layer, so latency is paid per layer.
    latency = max(0, stage.num_layers - 1) * cal.network_latency_us * 1e-6
    scatter = gather * s.grad_bytes / 2.0
    if not s.overlap_dp:
        return gather + latency, gather + scatter + latency
    return (
        exposed_seconds(gather + latency, forward, cal.overlap),
        exposed_seconds(gather + scatter + latency, backward, cal.overlap),
    )


def _offload_seconds(
    arch: Architecture, stage: Stage, forward: float, s: Strategy, sys: System, cal: Calibration
) -> float:
    """Exposed copies of saved activations to the host, per micro-batch and direction."""
    from memfine_planner.training.activations import layer_activation_bytes

    share = s.offload_layers / arch.layers
    saved = sum(count * share * layer_activation_bytes(arch, kind, s).total for kind, count in stage.kinds)
    copying = saved / (sys.host_link_gb_per_s * 1e9 * cal.network)
    return exposed_seconds(copying, forward, cal.overlap)


def _pipeline_sends(arch: Architecture, s: Strategy, sys: System, cal: Calibration) -> float:
    if s.pp == 1:
        return 0.0
    tokens = s.local_tokens / s.tp
    one = point_to_point(2.0 * tokens * arch.hidden, s.gpus // s.pp, sys, cal)
    ramp = 2 * (s.pp - 1) * one
    if s.overlap_pp and s.vp > 1:
        return ramp + (1 - cal.overlap) * 2 * s.vp * s.micro_batches * one
    return ramp + 2 * s.vp * s.micro_batches * one


def _data_parallel(
    arch: Architecture,
    held: tuple[Stage, ...],
    times: tuple[StageTime, ...],
    s: Strategy,
    sys: System,
    cal: Calibration,
) -> dict[str, float]:
    """Exposed gradient reduction and weight gather of the slowest stage, once per step."""
    if s.zero == 3:
        return {}
    dense_group, expert_group = _groups(s)
    reduces, gathers = [], []
    for stage, time in zip(held, times, strict=True):
        dense, experts = local_params(arch, stage, s)
        scatter = all_gather(s.grad_bytes * dense, dense_group, sys, cal)
        scatter += all_gather(s.grad_bytes * experts, expert_group, sys, cal)
        gather = all_gather(2.0 * dense, dense_group, sys, cal) + all_gather(2.0 * experts, expert_group, sys, cal)
        if s.zero == 0:
            scatter, gather = 2 * scatter, 0.0
        reduces.append(exposed_seconds(scatter, time.backward_s, cal.overlap) if s.overlap_dp else scatter)
        gathers.append(exposed_seconds(gather, time.forward_s, cal.overlap) if s.overlap_dp else gather)
    return {"gradient reduction": max(reduces), "weight gather": max(gathers)}


def _optimizer_seconds(
    arch: Architecture, held: tuple[Stage, ...], s: Strategy, sys: System, cal: Calibration
) -> float:
    """Adam reads gradient, master weight and moments, writes them and the working weight."""
    most = 0.0
    for stage in held:
        dense, experts = local_params(arch, stage, s)
        sharded = s.zero >= 1
        owned = dense / (s.dp * s.cp if sharded else 1) + experts / (s.expert_dp if sharded else 1)
        most = max(most, owned * (s.grad_bytes + 2 * s.optimizer_bytes + 2))
    return most / (sys.memory_gb_per_s * 1e9 * cal.memory)
