"""Which devices prefill, which decode, in instances of what size, and how many: the cheapest that meets the targets.

1. every accelerator of the pool with every parallel size is an option for either phase, if the weights fit;
2. an option's capacity is the largest request rate at which its own queue keeps the target (`queueing`), no more
   than its network can move in caches. Requests are spread in proportion to capacity and at random, so instances do
   not affect each other; a scheduler that looks at queues does better;
3. pairs whose hand-over is too slow may not both be used;
4. how many of each is an integer programme: cheapest instances whose capacities cover the rate in both phases
   within the pool. HiGHS solves it by branch and bound, to the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, bisect, milp

from memfine_fx.errors import ConfigError
from memfine_planner.serving.hardware import Accelerator, architecture
from memfine_planner.serving.model import Instance, Model, decode_s, handover_s, prefill_s
from memfine_planner.serving.queueing import batch_sizes, first_token
from memfine_planner.serving.workload import Request

__all__ = ["Fleet", "Option", "decode_options", "make_fleet", "prefill_options", "solve"]

_RATE_TOLERANCE = 1e-3
_WAITS_AT_MOST = 0.01
_LARGEST_BATCH = 2048


@dataclass(frozen=True)
class Option:
    """A kind of instance for one phase: the requests per second that it serves within the targets, and its price."""

    instance: Instance
    capacity: float
    price: float


@dataclass(frozen=True)
class Fleet:
    """The options used with their numbers, prices per hour and devices in all."""

    prefill: tuple[tuple[Option, int], ...]
    decode: tuple[tuple[Option, int], ...]
    price: float
    devices: int


def make_fleet(request: Request, known: Mapping[str, Accelerator]) -> Fleet:
    """The cheapest fleet for a task.

    Raises:
        ConfigError: an accelerator is not known, or the pool cannot meet the targets (which phase fails is named).
    """
    missing = [name for name in request.pool if name not in known]
    if missing:
        raise ConfigError(f"pool.{missing[0]}: unknown accelerator; known: {', '.join(known)}")
    model = Model(architecture(request.model), request.number, request.cache_bytes, request.expert_alpha)
    instances = _instances(request, known, model)
    prefill, decode = prefill_options(request, model, instances), decode_options(request, model, instances)
    for phase, options, target in (("prefill", prefill, "first_token_s"), ("decode", decode, "token_s")):
        if not options:
            raise ConfigError(
                f"no instance in the pool meets targets.{target} in {phase} even when idle, or none holds the model"
            )
    length = _mean(request, lambda one: float(one.prompt))
    slow = [
        (i, j)
        for i, one in enumerate(prefill)
        for j, other in enumerate(decode)
        if handover_s(model, one.instance, other.instance, length) > request.targets.handover_s
    ]
    limits = {name: share.devices for name, share in request.pool.items()}
    fleet = solve(prefill, decode, request.rate, limits, slow)
    if fleet is None:
        raise ConfigError(
            f"the pool cannot serve rate={request.rate:g}/s within the targets; add devices, or ask for less"
        )
    return fleet


def prefill_options(request: Request, model: Model, instances: Sequence[Instance]) -> list[Option]:
    """The instances that can prefill within the target, with their capacity."""
    weights = [one.weight for one in request.lengths]
    found = []
    for on in instances:
        services = [prefill_s(model, on, one.prompt) for one in request.lengths]

        def keeps(rate: float, services: list[float] = services, stages: int = on.pp) -> bool:
            waiting = first_token(rate, services, weights, stages)
            return waiting is not None and waiting.quantile(request.targets.percentile) <= request.targets.first_token_s

        most = on.pp / float(np.average(services, weights=weights))
        found.append(Option(on, min(_largest(keeps, most), _network(request, model, on)), _price(request, on)))
    return [one for one in found if one.capacity > 0]


def decode_options(request: Request, model: Model, instances: Sequence[Instance]) -> list[Option]:
    """The instances that can decode within the target, with their capacity."""
    tokens = _mean(request, lambda one: float(one.output))
    # A request is in the batch once per output token, at a context that grows with them.
    context = _mean(request, lambda one: one.output * (one.prompt + one.output / 2)) / tokens
    found = []
    for on in instances:
        places = min(_LARGEST_BATCH, int(on.cache_tokens(model) / context))
        if places < 1:
            continue
        steps = [decode_s(model, on, num, context) for num in range(1, places + 1)]

        def keeps(rate: float, steps: list[float] = steps) -> bool:
            batch = batch_sizes(rate, tokens, steps)
            if batch is None or batch.waits > _WAITS_AT_MOST:
                return False
            return batch.step_quantile(request.targets.percentile) <= request.targets.token_s

        capacity = min(_largest(keeps, places / (tokens * steps[-1])), _network(request, model, on))
        found.append(Option(on, capacity, _price(request, on)))
    return [one for one in found if one.capacity > 0]


def solve(
    prefill: Sequence[Option],
    decode: Sequence[Option],
    rate: float,
    limits: Mapping[str, int],
    slow: Sequence[tuple[int, int]] = (),
) -> Fleet | None:
    """The cheapest numbers of instances, or None where the limits allow none.

    Args:
        limits: devices of each accelerator.
        slow: pairs of a prefill and a decode option that may not both be used.
    """
    options = [*prefill, *decode]
    num, names = len(options), np.array([one.instance.accelerator.name for one in options])
    devices = np.array([one.instance.devices for one in options])
    most = np.array([limits[name] for name in names]) // devices
    prices = np.array([one.price for one in options])
    # In units of the rate: HiGHS' tolerances are absolute.
    capacity = np.array([one.capacity for one in options]) / rate
    is_prefill = np.arange(num) < len(prefill)
    # Unknowns: the number of every option, then whether it is used at all.
    covered = np.stack([capacity * is_prefill, capacity * ~is_prefill])
    held = np.stack([devices * (names == name) for name in limits])
    apart = np.zeros((len(slow), num))
    for row, (i, j) in enumerate(slow):
        apart[row, [i, len(prefill) + j]] = 1
    found = milp(
        np.concatenate([prices / prices.max(), np.zeros(num)]),
        integrality=np.ones(2 * num),
        bounds=Bounds(0, np.concatenate([most, np.ones(num)])),
        constraints=[
            LinearConstraint(np.hstack([covered, 0 * covered]), 1, np.inf),
            LinearConstraint(np.hstack([held, 0 * held]), 0, list(limits.values())),
            LinearConstraint(np.hstack([np.eye(num), -np.diag(most)]), -np.inf, 0),
            LinearConstraint(np.hstack([0 * apart, apart]), 0, 1),
        ],
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    counts = [round(value) for value in found.x[:num]]
    used = [(one, count) for one, count in zip(options, counts, strict=True)]
    return Fleet(
        tuple((one, count) for one, count in used[: len(prefill)] if count),
        tuple((one, count) for one, count in used[len(prefill) :] if count),
        sum(one.price * count for one, count in used),
        sum(one.instance.devices * count for one, count in used),
    )


def _instances(request: Request, known: Mapping[str, Accelerator], model: Model) -> list[Instance]:
    arch = model.arch
    found: list[Instance] = []
    for name, share in request.pool.items():
        for tp in (size for size in request.sizes if arch.heads % size == 0):
            stages = (size for size in request.stages if size <= arch.layers and tp * size <= share.devices)
            found += [Instance(known[name], tp, pp) for pp in stages]
    longest = max(one.prompt + one.output for one in request.lengths)
    return [on for on in found if on.cache_tokens(model) > longest]


def _mean(request: Request, value: Callable[..., float]) -> float:
    return float(np.average([value(one) for one in request.lengths], weights=[one.weight for one in request.lengths]))


def _price(request: Request, on: Instance) -> float:
    return request.pool[on.accelerator.name].price * on.devices


def _network(request: Request, model: Model, on: Instance) -> float:
    """Requests per second whose caches the instance's network moves."""
    length = _mean(request, lambda one: float(one.prompt))
    device = on.accelerator
    return device.network_gb_per_s * 1e9 * device.link_fraction * on.devices / (length * model.cache_bytes_per_token)


def _largest(keeps: Callable[[float], bool], most: float) -> float:
    """The largest rate that keeps the target, 0 if hardly any does."""
    least = most * _RATE_TOLERANCE
    if not keeps(least):
        return 0.0
    found = float(bisect(lambda rate: 1.0 if keeps(rate) else -1.0, least, most, xtol=least, rtol=_RATE_TOLERANCE))
    return found if keeps(found) else found - least
