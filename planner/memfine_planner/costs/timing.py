"""Seconds of one layer: a roofline with saturation for each piece of work, then what overlap hides.

`layer_terms` is the base cost: every term alone, nothing hidden. `LayerTime` adds what the optimisations change:
recomputation, communication hidden behind compute, and the host that cannot launch fast enough.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from memfine_planner.costs.architectures import Architecture, LayerKind
from memfine_planner.costs.calibration import Calibration
from memfine_planner.costs.collectives import all_gather, all_reduce, all_to_all
from memfine_planner.costs.strategy import Strategy
from memfine_planner.costs.work import Part, Work, head_work, launches, layer_work
from memfine_planner.hardware.links import Group
from memfine_planner.hardware.systems import System

__all__ = ["LayerTime", "Term", "gemm_seconds", "head_time", "layer_time"]

_ATTENTION_BACKWARD = 2.5
_ATTENTION_BACKWARD_RATE = 0.85


@dataclass(frozen=True)
class Term:
    """One line of the breakdown, per layer and micro-batch.

    Args:
        kind: "compute", "memory" or the group whose links it uses ("tp", "cp", "ep").
        forward_s, backward_s, recompute_s: seconds, nothing hidden.
        flops: forward FLOPs of it.
    """

    name: str
    part: Part
    kind: str
    forward_s: float
    backward_s: float
    recompute_s: float
    flops: float


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and micro-batch.

    Args:
        terms: every piece of work alone.
        forward_s, backward_s: what the pipeline sees, recomputation in backward, overlap and host included.
        exposed: communication that nothing hides, by group, forward and backward together.
        host_s: time the host needs to launch it.
        host_exposed_s: what the host adds because the device waits for launches.
    """

    terms: tuple[Term, ...]
    forward_s: float
    backward_s: float
    exposed: tuple[tuple[str, float], ...]
    host_s: float
    host_exposed_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


def gemm_seconds(
    m: float, n: float, k: float, count: int, number: str, sys: System, cal: Calibration, factor: float = 1.0
) -> float:
    """Seconds of `count` products [m,k] x [k,n]: the slower of arithmetic, with saturation, and memory.

    Args:
        factor: fraction of the rate that the format's scaling leaves.
    """
    if m <= 0:
        return 0.0
    rate = sys.rate(number) * sys.sustained_factor * factor
    half = cal.gemm_half_size * rate / 1e15
    saturation = m / (m + half) * (n / (n + half)) * (k / (k + half))
    element = {"FP16": 2.0, "BF16": 2.0, "FP8": 1.0, "FP4": 0.5}[number]
    moved = element * (m * k + k * n) + 2.0 * m * n
    arithmetic = 2.0 * m * n * k / (rate * cal.gemm(sys.generation, number) * saturation)
    return count * max(arithmetic, moved / (sys.memory_gb_per_s * 1e9 * cal.memory))


def layer_time(
    arch: Architecture, kind: LayerKind, s: Strategy, sys: System, cal: Calibration, rows: float | None = None
) -> LayerTime:
    """Time of one layer; `rows` received by the rank's experts, None for balanced routing."""
    # Of the pipeline only the overlapped exchange's schedule is felt by a layer, by the chunks that it is cut into.
    chunks = s.pp * s.vp if s.overlap_ep else 0
    return _layer_time(arch, kind, _layer_fields(s), sys, cal, rows, chunks)


def head_time(arch: Architecture, s: Strategy, sys: System, cal: Calibration) -> LayerTime:
    """Time of final norm, logits and loss."""
    terms = tuple(_term(work, s, sys, cal) for work in head_work(arch, s))
    return _combine(terms, s, cal, host_s=0.0)


def _layer_fields(s: Strategy) -> Strategy:
    """The strategy with what a layer does not depend on set to fixed values, so that layers are shared."""
    return replace(
        s, gpus=s.tp * s.cp * s.ep, pp=1, vp=1, zero=1, global_batch=1, recompute_layers=None, offload_layers=0
    )


@lru_cache(maxsize=20_000)
def _layer_time(
    arch: Architecture,
    kind: LayerKind,
    s: Strategy,
    sys: System,
    cal: Calibration,
    rows: float | None,
    pipeline_chunks: int,
) -> LayerTime:
    terms = tuple(_term(work, s, sys, cal) for work in layer_work(arch, kind, s, sys, rows))
    return _combine(terms, s, cal, _host_seconds(arch, kind, s, sys, cal, rows, pipeline_chunks))


def _host_seconds(
    arch: Architecture,
    kind: LayerKind,
    s: Strategy,
    sys: System,
    cal: Calibration,
    rows: float | None,
    pipeline_chunks: int,
) -> float:
    count = launches(arch, kind, s, rows)
    captured = {"none": 1.0, "partial": 0.25, "full": 0.05}[s.cuda_graphs]
    ragged = 0.05 if s.cuda_graphs == "full" else 1.0
    launch = (captured * count.fixed + ragged * count.ragged) * cal.launch_us
    experts = ragged * count.experts * cal.expert_us
    again = {"none": 1.0, "selective": 1.05, "experts": 1.2, "full": 1.33}[s.recompute]
    schedule = cal.chunk_us * pipeline_chunks / arch.layers
    return (launch + experts + schedule) * (cal.grace_launch if sys.cpu == "grace" else 1.0) * again * 1e-6


def _term(work: Work, s: Strategy, sys: System, cal: Calibration) -> Term:
    again = _is_recomputed(work, s)
    if work.kind == "gemm":
        number = s.numbers.matmul if work.low_precision else _wide(s)
        factor = s.numbers.rate_factor if work.low_precision else 1.0
        forward = gemm_seconds(work.m, work.n, work.k, work.count, number, sys, cal, factor)
        backward = gemm_seconds(work.m, work.k, work.n, work.count, number, sys, cal, factor)
        backward += gemm_seconds(work.k, work.n, work.m, work.count, number, sys, cal, factor)
        flops = 2.0 * work.m * work.n * work.k * work.count
        return Term(work.name, work.part, "compute", forward, backward, forward if again else 0.0, flops)
    if work.kind == "attention":
        # Exponentials per score do not depend on the head's width, so narrow heads reach less of the rate.
        rate = sys.rate(_wide(s)) * sys.attention_factor * cal.attention * 1.5 * work.k / (work.k + 64)
        forward = work.flops / rate
        backward = work.flops * _ATTENTION_BACKWARD / (rate * _ATTENTION_BACKWARD_RATE)
        return Term(work.name, work.part, "compute", forward, backward, forward if again else 0.0, work.flops)
    if work.kind == "memory":
        forward = work.num_bytes / (sys.memory_gb_per_s * 1e9 * cal.memory)
        return Term(work.name, work.part, "memory", forward, forward * work.backward, forward if again else 0.0, 0.0)
    seconds = _collective_seconds(work, s, sys, cal)
    backward = seconds * (2.0 if work.collective == "ring" else 1.0)
    return Term(work.name, work.part, work.group, seconds, backward, seconds if again else 0.0, 0.0)


def _wide(s: Strategy) -> str:
    return "FP16" if s.precision == "FP16" else "BF16"


def _is_recomputed(work: Work, s: Strategy) -> bool:
    order = {"none": 0, "selective": 1, "experts": 2, "full": 3}
    if s.recompute == "selective" and s.attention == "unfused":
        return work.recompute == "selective" and work.part == "attention"
    if s.recompute == "experts":
        return work.part == "experts" and order[work.recompute] <= order["experts"]
    return order[work.recompute] <= order[s.recompute]


def _collective_seconds(work: Work, s: Strategy, sys: System, cal: Calibration) -> float:
    if work.group == "ep":
        is_fused = s.dispatcher == "hierarchical"
        return all_to_all(work.num_bytes, work.remote, Group(s.ep), sys, cal, work.count, is_fused=is_fused)
    group = Group(s.tp) if work.group == "tp" else Group(s.cp, s.tp)
    if work.collective == "ring":
        bandwidth = sys.nvlink_gb_per_s * cal.nvlink
        if group.size * group.stride > sys.nvlink_domain:
            bandwidth = sys.network_gb_per_s * cal.network
        return work.num_bytes / (bandwidth * 1e9) + (s.cp - 1) * cal.nvlink_latency_us * 1e-6
    if work.collective == "all_reduce":
        return all_reduce(work.num_bytes, group, sys, cal)
    return all_gather(work.num_bytes, group, sys, cal)


def exposed_seconds(communication: float, compute: float, overlap: float) -> float:
    """Communication left after hiding it behind `compute`: a fraction of either never overlaps."""
    return max(communication - overlap * compute, (1 - overlap) * communication)


def _combine(terms: tuple[Term, ...], s: Strategy, cal: Calibration, host_s: float) -> LayerTime:
    exposed: dict[str, float] = {}
    phases = []
    for phase in ("forward_s", "backward_s", "recompute_s"):
        compute = sum(getattr(t, phase) for t in terms if t.kind in ("compute", "memory"))
        attention = sum(getattr(t, phase) for t in terms if t.part == "attention" and t.kind == "compute")
        seconds = compute
        for group, overlapped, behind in (
            ("tp", s.overlap_tp, compute),
            ("cp", True, attention),
            ("ep", s.overlap_ep, compute),
        ):
            communication = sum(getattr(t, phase) for t in terms if t.kind == group)
            left = exposed_seconds(communication, behind, cal.overlap) if overlapped else communication
            exposed[group] = exposed.get(group, 0.0) + left
            seconds += left
        phases.append(seconds)
    forward, backward, recompute = phases
    device = forward + backward + recompute
    total = (device**4 + host_s**4) ** 0.25
    stretch = total / device if device else 1.0
    return LayerTime(
        terms=terms,
        forward_s=forward * stretch,
        backward_s=(backward + recompute) * stretch,
        exposed=tuple(sorted(exposed.items())),
        host_s=host_s,
        host_exposed_s=total - device,
    )
