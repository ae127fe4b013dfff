"""How it is trained: parallel sizes, batch, recomputation, precision and overlap, with their rules.

`check` says which rule a strategy breaks and names the nearest value that keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from memfine_fx.errors import ConfigError
from memfine_planner.costs.architectures import Architecture
from memfine_planner.hardware.systems import System

__all__ = ["PRECISIONS", "Precision", "Recompute", "Strategy", "StrategyError", "check", "divisors"]

Recompute = Literal["none", "selective", "full", "experts"]


@dataclass(frozen=True)
class Precision:
    """Number formats of one training recipe.

    Args:
        matmul: format whose rate the linear layers run at; attention runs in 16 bits always.
        quantise_bytes: memory traffic per element to bring a linear layer's input or gradient into `matmul`,
            in both layouts that forward and weight gradient need; 0 for 16 bits.
        expert_launches: kernels launched per local expert, forward and backward, by a loop-based grouped linear.
        rate_factor: fraction of the format's rate that its scaling leaves.
    """

    name: str
    matmul: Literal["FP16", "BF16", "FP8", "FP4"]
    quantise_bytes: float = 0.0
    expert_launches: int = 6
    rate_factor: float = 1.0


PRECISIONS = {
    "FP16": Precision("FP16", "FP16"),
    "BF16": Precision("BF16", "BF16"),
    # Per-tensor current scaling reads once for the maximum, once to cast, and writes both layouts. Ten units an expert
    # as with block scales, chosen on runs outside the fit: one for every maximum and cast (30) fits them worse.
    "FP8-CS": Precision("FP8-CS", "FP8", 6.0, 10),
    "FP8-DS": Precision("FP8-DS", "FP8", 4.0, 10),
    "FP8-SC": Precision("FP8-SC", "FP8", 4.5, 10),
    # Block scales: both layouts are cast from the source, scales are rearranged for the product; experts' splits are
    # cast together. The factor is from four published pairs of FP8-MX and FP8-CS runs (held_out_runs.json).
    "FP8-MX": Precision("FP8-MX", "FP8", 6.0, 10, 0.95),
    "NVFP4": Precision("NVFP4", "FP4", 6.0, 10, 0.95),
}


class StrategyError(ConfigError):
    """A strategy that cannot run: the rule it breaks and the nearest valid choice."""

    def __init__(self, rule: str, nearest: str) -> None:
        self.rule = rule
        self.nearest = nearest
        super().__init__(f"{rule}; nearest valid: {nearest}" if nearest else rule)


@dataclass(frozen=True)
class Strategy:
    """One way to train on `gpus` GPUs; ranks are ordered TP, CP, EP, DP, PP from the nearest to the farthest.

    Args:
        gpus: all GPUs.
        tp, pp, vp, cp, ep: tensor, pipeline, interleaved chunks per pipeline rank, context, expert parallel sizes.
        zero: 0 replicates, 1 shards optimizer state over data parallel ranks, 2 gradients too, 3 weights too (FSDP).
        micro_batch, global_batch: sequences.
        seq: tokens per sequence.
        recompute: "none"; "selective" drops what is inside attention; "full" keeps a layer's input only;
            "experts" recomputes the routed experts in chunks (MemFine).
        recompute_layers: layers per model that `recompute` applies to, None for all.
        chunks: c of chunked experts over tokens (MemFine FCDA); 1 for whole layers.
        rows_per_round: R, the most received rows at once; 0 for no bound. Excludes `chunks` > 1.
        sequence_parallel: shards norms and residuals over TP.
        offload_layers: layers per model whose saved activations go to host memory.
        dispatcher: "alltoall", or "hierarchical", which sends a token once per NVLink domain and fuses the permutes.
        overlap_tp, overlap_dp, overlap_ep, overlap_pp: hide that communication behind compute where there is some.
        cuda_graphs: "none", "partial" (everything but the routed experts) or "full".
        attention: "flash" or "unfused" (scores written to memory).
        saves_expert_output: whether the experts' output is kept for the routing weight's gradient; not when the weight
            is applied before the second projection.
        grad_bytes: bytes of a gradient element in memory and in the reduction.
        optimizer_bytes: Adam's master weight and two moments.
    """

    gpus: int
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 1
    micro_batch: int = 1
    global_batch: int = 1
    seq: int = 4096
    precision: str = "BF16"
    recompute: Recompute = "none"
    recompute_layers: int | None = None
    chunks: int = 1
    rows_per_round: int = 0
    sequence_parallel: bool = True
    offload_layers: int = 0
    dispatcher: Literal["alltoall", "hierarchical"] = "alltoall"
    overlap_tp: bool = True
    overlap_dp: bool = True
    overlap_ep: bool = False
    overlap_pp: bool = True
    cuda_graphs: Literal["none", "partial", "full"] = "none"
    attention: Literal["flash", "unfused"] = "flash"
    saves_expert_output: bool = False
    grad_bytes: int = 4
    optimizer_bytes: int = 12

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def expert_dp(self) -> int:
        """Replicas of an expert shard."""
        return max(1, self.gpus // (self.pp * self.ep))

    @property
    def micro_batches(self) -> int:
        """Micro-batches per pipeline and step (gradient accumulation)."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq

    @property
    def local_tokens(self) -> int:
        """Tokens of a micro-batch on one rank, before sequence parallelism divides them again."""
        return self.micro_batch * self.seq // self.cp

    @property
    def is_sequence_parallel(self) -> bool:
        return self.sequence_parallel and self.tp > 1

    @property
    def numbers(self) -> Precision:
        return PRECISIONS[self.precision]

    def label(self) -> str:
        """The choices that differ from a plain run, in a line."""
        parts = [f"TP{self.tp}", f"PP{self.pp}"]
        parts += [f"VP{self.vp}"] if self.vp > 1 else []
        parts += [f"CP{self.cp}"] if self.cp > 1 else []
        parts += [f"EP{self.ep}"] if self.ep > 1 else []
        parts += [f"DP{self.dp}", f"ZeRO{self.zero}", f"mbs{self.micro_batch}", self.precision]
        if self.recompute != "none":
            layers = "" if self.recompute_layers is None else f"({self.recompute_layers} layers)"
            parts.append(f"recompute={self.recompute}{layers}")
        parts += [f"c={self.chunks}"] if self.chunks > 1 else []
        parts += [f"R={self.rows_per_round}"] if self.rows_per_round else []
        parts += [f"offload={self.offload_layers}"] if self.offload_layers else []
        return " ".join(parts)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def check(arch: Architecture, sys: System, strategy: Strategy) -> None:
    """Raise StrategyError naming the first rule that the strategy breaks and the nearest valid choice."""
    s = strategy
    _check_choices(s)
    for name in ("gpus", "tp", "pp", "vp", "cp", "ep", "micro_batch", "global_batch", "seq", "chunks"):
        if getattr(s, name) < 1:
            raise StrategyError(f"{name}={getattr(s, name)} must be a positive integer", f"{name}=1")
    _check_format(sys, s)
    _check_inside(arch, s)
    _check_pipeline(arch, s)
    _check_batch(arch, s)
    _check_experts(arch, s)
    for name in ("offload_layers", "recompute_layers"):
        value = getattr(s, name)
        if value is not None and not 0 <= value <= arch.layers:
            raise StrategyError(f"{name}={value} of {arch.layers} layers", f"{name}={min(max(0, value), arch.layers)}")


def _check_format(sys: System, s: Strategy) -> None:
    if s.precision not in PRECISIONS:
        raise StrategyError(f"unknown precision {s.precision!r}", ", ".join(_precisions_of(sys)))
    if s.numbers.matmul not in sys.tflops:
        raise StrategyError(f"{sys.name} has no {s.numbers.matmul} units", ", ".join(_precisions_of(sys)))
    if s.zero not in (0, 1, 2, 3):
        raise StrategyError(f"zero={s.zero} is no ZeRO stage", "zero=1")


def _check_inside(arch: Architecture, s: Strategy) -> None:
    """What tensor and context parallelism divide."""
    _divides("tp", s.tp, "attention heads", arch.heads)
    if arch.latent is None and max(s.tp, arch.kv_heads) % min(s.tp, arch.kv_heads):
        raise StrategyError(
            f"tp={s.tp} and {arch.kv_heads} key-value heads do not divide each other",
            f"tp={_nearest(s.tp, divisors(arch.kv_heads))}",
        )
    _divides("cp", s.cp, "sequence length", s.seq)
    if s.is_sequence_parallel:
        _divides("tp", s.tp, "tokens of a micro-batch", s.local_tokens)


def _check_pipeline(arch: Architecture, s: Strategy) -> None:
    if s.pp * s.vp > arch.layers + 2:
        raise StrategyError(
            f"pp*vp={s.pp}*{s.vp} makes more stages than the {arch.layers} layers (with embedding and head)",
            f"vp={max(1, arch.layers // s.pp)}" if s.pp <= arch.layers else f"pp={arch.layers}",
        )
    if s.vp > 1 and s.pp == 1:
        raise StrategyError(f"vp={s.vp} interleaves a pipeline, but pp=1", "vp=1")


def _check_batch(arch: Architecture, s: Strategy) -> None:
    """GPUs are divided into replicas, the batch among them, micro-batches into the pipeline's groups."""
    shard = s.tp * s.pp * s.cp
    if s.gpus % shard:
        raise StrategyError(
            f"tp*pp*cp={s.tp}*{s.pp}*{s.cp}={shard} does not divide gpus={s.gpus}", _nearest_shard(arch, s)
        )
    per_step = s.dp * s.micro_batch
    if s.global_batch % per_step:
        raise StrategyError(
            f"dp*micro_batch={s.dp}*{s.micro_batch}={per_step} does not divide global_batch={s.global_batch}",
            f"global_batch={max(1, round(s.global_batch / per_step)) * per_step}",
        )
    if s.vp > 1 and s.micro_batches % s.pp:
        groups = max(1, round(s.micro_batches / s.pp))
        raise StrategyError(
            f"interleaving runs micro-batches in groups of pp={s.pp}, which does not divide their number "
            f"({s.micro_batches})",
            f"global_batch={groups * s.pp * per_step}",
        )


def _nearest_shard(arch: Architecture, s: Strategy) -> str:
    """What to change so that tp*pp*cp divides the GPUs: pp if that suffices, or their number."""
    inner = s.tp * s.cp
    gpus = f"gpus={max(1, round(s.gpus / (inner * s.pp))) * inner * s.pp}"
    if s.gpus % inner:
        return gpus
    return f"pp={_nearest(s.pp, [d for d in divisors(s.gpus // inner) if d <= arch.layers])}, or {gpus}"


@cache
def choices_of() -> dict[str, tuple[str, ...]]:
    """The values of every field that has a fixed set of them."""
    hints = get_type_hints(Strategy)
    return {name: get_args(kind) for name, kind in hints.items() if get_origin(kind) is Literal}


def _check_choices(s: Strategy) -> None:
    for name, choices in choices_of().items():
        value = getattr(s, name)
        if value not in choices:
            close = get_close_matches(str(value), choices, 1, 0.0)
            raise StrategyError(f"{name}={value!r} is none of {', '.join(choices)}", f"{name}={close[0]}")


def _check_experts(arch: Architecture, s: Strategy) -> None:
    if not arch.is_moe:
        if s.ep > 1:
            raise StrategyError(f"ep={s.ep}, but {arch.name} has no experts", "ep=1")
        if s.recompute == "experts" or s.chunks > 1 or s.rows_per_round:
            raise StrategyError(f"chunked experts, but {arch.name} has no experts", "recompute=full, chunks=1")
        return
    _divides("ep", s.ep, "number of experts", arch.experts)
    if (s.gpus // s.pp) % s.ep:
        raise StrategyError(
            f"ep={s.ep} does not divide the {s.gpus // s.pp} GPUs of a pipeline stage",
            f"ep={_nearest(s.ep, [d for d in divisors(s.gpus // s.pp) if arch.experts % d == 0])}",
        )
    if (s.chunks > 1 or s.rows_per_round) and s.recompute not in ("experts", "full"):
        raise StrategyError(
            f"chunks={s.chunks}, rows_per_round={s.rows_per_round} save nothing without recomputing the experts "
            f"(recompute={s.recompute})",
            "recompute=experts",
        )
    if s.chunks > 1 and s.rows_per_round:
        raise StrategyError("chunks and rows_per_round are two ways to bound the same rows", "chunks=1")


def _precisions_of(sys: System) -> list[str]:
    return [name for name, numbers in PRECISIONS.items() if numbers.matmul in sys.tflops]


def _divides(name: str, value: int, what: str, total: int) -> None:
    if total % value:
        raise StrategyError(
            f"{name}={value} does not divide the {what} ({total})", f"{name}={_nearest(value, divisors(total))}"
        )


def _nearest(value: int, choices: list[int]) -> int:
    return min(choices, key=lambda choice: (abs(choice - value), choice)) if choices else 1


@cache
def _kinds() -> dict[str, TypeAdapter[Any]]:
    return {name: TypeAdapter(kind) for name, kind in get_type_hints(Strategy).items()}


def with_fields(strategy: Strategy, **changes: object) -> Strategy:
    """A copy with other fields; ConfigError lists the known ones for an unknown name, and says what a value is not."""
    known = {field.name for field in fields(Strategy)}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise ConfigError(f"unknown strategy field {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    kinds = _kinds()
    for name, value in changes.items():
        if name in choices_of():
            continue  # `check` names the nearest choice
        try:
            kinds[name].validate_python(value, strict=True)
        except ValidationError as error:
            raise ConfigError(f"{name}={value!r}: {error.errors()[0]['msg']}") from None
    return replace(strategy, **changes)  # type: ignore[arg-type]  # checked by name above
