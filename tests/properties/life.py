"""Compare an optimized layer with its unmodified self over a few steps of training: everything that a step may change.

A step compares outputs, gradients, parameters after SGD, buffers, plain attributes of modules and the state of random
generators. Routing is skewed from step to step, so that experts come to have no rows, one row, or all of them.
"""

from __future__ import annotations

import copy
import math
import random
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import memfine_fx

__all__ = ["NUM_TOKENS", "Outcome", "Results", "Step", "compare", "loss_of", "plain_step", "state_of"]

Results = dict[str, Any]
Step = Callable[[Callable[[Tensor], Tensor], Tensor, int], Results]
"""Uses a model with tokens [T,H] in a step with this number; leaves gradients, and returns what else must agree."""
Steps = list[tuple[int, list[float]]]
"""Of each step the number of tokens, and what is added to the experts' scores."""
Verdict = Literal[
    "exact",
    "wrong",
    "both raise",
    "torch.compile raises too",
    "torch.compile is wrong too",
    "only ours raises",
    "only eager raises",
]
"""torch.compile runs alone, with the same inner backend, where only ours raises and where a layer that was not chunked
is wrong. It is wrong too where the same is off first, in any step: which step it is depends on earlier captures."""
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 2e-2, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""In fp32 layers have a part in bf16."""
NUM_TOKENS = (6, 1, 3, 2)
"""Of each step. One token is a graph of its own, which takes as long to compile as the others together."""
_RARE = -30.0


@dataclass(frozen=True)
class Outcome:
    """How a comparison ended.

    Args:
        verdict: see `Verdict`.
        num_chunked: layers that were chunked.
        details: what differs first, or why nothing was chunked.
    """

    verdict: Verdict
    num_chunked: int
    details: str

    @property
    def is_wrong(self) -> bool:
        return self.verdict in ("wrong", "only ours raises", "only eager raises")


def state_of(model: nn.Module) -> dict[str, Any]:
    """Parameters, buffers, attributes of modules that are plain values, and random state."""
    state: dict[str, Any] = {f"parameter {name}": value.detach() for name, value in model.named_parameters()}
    state |= {f"buffer {name}": value for name, value in model.named_buffers()}
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if _is_plain(key, value)}
        state |= {f"attribute {name}.{key}": value for key, value in own.items()}
    return state | {"torch's random state": torch.get_rng_state(), "Python's random state": hash(random.getstate())}


def _is_plain(key: str, value: Any) -> bool:
    if key.startswith("_") or key in ("training", "forward", "T_destination", "call_super_init", "dump_patches"):
        return False
    return value is None or isinstance(value, (int, float, str, list, dict, set, tuple, Tensor))


def loss_of(out: Tensor) -> Tensor:
    """A sum with weights of both signs."""
    return (out.double() * torch.linspace(-1, 1, out.numel(), dtype=torch.double).view(out.shape)).sum()


def plain_step(model: Callable[[Tensor], Tensor], x: Tensor, number: int) -> Results:
    """One forward and one backward."""
    out = model(x)
    (loss_of(out) + x.sum()).backward()  # also where no expert ran
    return {"output": out}


def _run(model: nn.Module, num_tokens: int, skew: Sequence[float], step: Step, number: int) -> Results:
    """One step of SGD: its results and the state that it leaves."""
    torch.manual_seed(num_tokens)
    random.seed(num_tokens)
    with torch.no_grad():
        model.skew.copy_(torch.tensor(skew)[: len(model.skew)])  # type: ignore[operator,arg-type]  # a buffer
    router: Any = model.router
    x = torch.randn(num_tokens, router.in_features, dtype=router.weight.dtype, requires_grad=True)
    model.zero_grad()
    results = step(model, x, number)
    results |= {"d x": x.grad} | {f"d {name}": value.grad for name, value in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    return {name: _kept(value) for name, value in (results | state_of(model)).items()}


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def compare(
    model: nn.Module,
    *,
    inner: str = "eager",
    seed: int = 0,
    step: Step = plain_step,
    num_tokens: Sequence[int] = NUM_TOKENS,
    **fields: Any,
) -> Outcome:
    """Train an optimized copy of a layer and the layer itself, and compare them after each step.

    Args:
        model: takes tokens [T,H], has a buffer `skew` [E] which it adds to its routing scores.
        inner: the inner backend.
        seed: of the routings.
        step: what is done in a step.
        num_tokens: of each step.
        **fields: further options of Config.
    """
    if inner == "inductor" and not torch._inductor.config.fallback_random:
        # Inductor's own random numbers are not eager's, with torch.compile alone as well.
        with torch._inductor.config.patch(fallback_random=True):
            return compare(model, inner=inner, seed=seed, step=step, num_tokens=num_tokens, **fields)
    torch._dynamo.reset()
    before = copy.deepcopy(model)
    num_experts = model.skew.shape[0]  # type: ignore[union-attr,operator]
    optimized = copy.deepcopy(model)
    config = memfine_fx.Config(inner_backend=inner, rows_per_chunk=3, **fields)  # type: ignore[arg-type]  # a word
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        memfine_fx.optimize(optimized, dynamic=True, config=config)
        steps = _steps(num_experts, seed, num_tokens)
        for number, routing in enumerate(steps):
            expected, eager_error = _attempted(model, *routing, step, number)
            results, error = _attempted(optimized, *routing, step, number)
            report = memfine_fx.report(optimized)
            reasons = "; ".join(region.reason or "" for region in report.regions if region.status == "refused")
            if expected is None or results is None:
                verdict: Verdict = "only eager raises" if results is not None else "both raise"
                if expected is not None:
                    raises_too = None in _results_alone(before, inner, steps, step)
                    verdict = "torch.compile raises too" if raises_too else "only ours raises"
                return Outcome(
                    verdict, report.num_chunked, f"step {number}: eager {eager_error}, ours {error} ({reasons})"
                )
            difference = _first_difference(results, expected, _tolerance(model))
            if difference:
                is_upstream = not report.num_chunked and _is_off_alone(before, inner, steps, step, difference)
                verdict = "torch.compile is wrong too" if is_upstream else "wrong"
                return Outcome(verdict, report.num_chunked, f"step {number}: {difference} ({reasons})")
    return Outcome("exact", report.num_chunked, reasons)


def _results(model: nn.Module, steps: Steps, step: Step) -> list[Results | None]:
    """Results of each step; None for a step that raises."""
    torch._dynamo.reset()
    return [_attempted(model, *routing, step, number)[0] for number, routing in enumerate(steps)]


def _results_alone(model: nn.Module, inner: str, steps: Steps, step: Step) -> list[Results | None]:
    """Results of each step of a copy under plain torch.compile with the same backend."""
    compiled = copy.deepcopy(model)
    compiled.compile(backend=inner, dynamic=True)
    return _results(compiled, steps, step)


def _is_off_alone(model: nn.Module, inner: str, steps: Steps, step: Step, difference: str) -> bool:
    """Whether plain torch.compile with the same backend is off in what is off here, experts' indices aside."""
    pairs = zip(_results_alone(model, inner, steps, step), _results(model, steps, step), strict=True)
    differences = [
        _first_difference(results, expected, _tolerance(model))
        for results, expected in pairs
        if results is not None and expected is not None
    ]
    return _without_numbers(difference) in map(_without_numbers, differences)


def _without_numbers(difference: str) -> str:
    return re.sub(r"\d+", "", difference.split(" off by ")[0])


def _steps(num_experts: int, seed: int, num_tokens: Sequence[int]) -> Steps:
    draw = random.Random(seed)
    return [(number, [_RARE * (draw.random() < 0.4) for _ in range(num_experts)]) for number in num_tokens]


def _attempted(
    model: nn.Module, num_tokens: int, skew: Sequence[float], step: Step, number: int
) -> tuple[Results | None, str]:
    try:
        return _run(model, num_tokens, skew, step, number), ""
    except Exception as error:  # NOTE: whatever a drawn layer raises, the other must raise too
        return None, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def _tolerance(model: nn.Module) -> float:
    return _TOLERANCES[model.router.weight.dtype]  # type: ignore[union-attr,index]


def _first_difference(results: Results, expected: Results, tolerance: float) -> str:
    if results.keys() != expected.keys():
        return f"names {results.keys() ^ expected.keys()}"
    for name, value in expected.items():
        error = _difference(results[name], value)
        if not error <= tolerance:
            return f"{name} off by {error:.2e}"
    return ""


def _difference(value: Any, expected: Any) -> float:
    """Relative to the largest entry; a gradient of zeros and none are the same."""
    if isinstance(value, Tensor) or isinstance(expected, Tensor):
        if value is None or expected is None:
            other = expected if value is None else value
            return 0.0 if not bool(other.any()) else math.inf
        if not isinstance(value, Tensor) or not isinstance(expected, Tensor) or value.shape != expected.shape:
            return math.inf
        ours, theirs = value.double(), expected.double()
        if not torch.equal(ours.isnan(), theirs.isnan()):
            return math.inf
        ours, theirs = ours.nan_to_num(), theirs.nan_to_num()
        return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1.0)) if ours.numel() else 0.0
    if isinstance(expected, (list, tuple)) and type(value) is type(expected) and len(value) == len(expected):
        return max((_difference(one, other) for one, other in zip(value, expected, strict=True)), default=0.0)
    if isinstance(expected, dict) and isinstance(value, dict) and value.keys() == expected.keys():
        return max((_difference(value[key], expected[key]) for key in expected), default=0.0)
    if isinstance(expected, float) and isinstance(value, float):
        return abs(value - expected) / max(1.0, abs(expected))
    return 0.0 if type(value) is type(expected) and value == expected else math.inf
