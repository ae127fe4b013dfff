"""The fleet of the integer programme against trying everything, and what moves it."""

from itertools import product

import numpy as np
import pytest

from memfine_fx.errors import ConfigError
from memfine_planner.serving.choice import Option, make_fleet, solve
from memfine_planner.serving.hardware import accelerators
from memfine_planner.serving.model import Instance
from memfine_planner.serving.workload import Request

KNOWN = accelerators()
TASK = {
    "model": "llama3_8b",
    "rate": 20.0,
    "lengths": [{"prompt": 512, "output": 128}, {"prompt": 2048, "output": 256}],
    "targets": {"first_token_s": 0.4, "token_s": 0.04},
    "pool": {"H100": {"devices": 16, "price": 3.0}},
}


def random_task(seed: int) -> tuple[list[Option], list[Option], float, dict[str, int], list[tuple[int, int]]]:
    generator = np.random.default_rng(seed)
    names = list(generator.choice(["H100", "MI300X", "Gaudi-3", "Ascend-910B"], 2, replace=False))
    limits = {name: int(generator.integers(3, 9)) for name in names}
    prices = dict(zip(names, generator.uniform(1, 4, 2), strict=True))

    def options() -> list[Option]:
        made = []
        for name, tp in product(names, (1, 2)):
            capacity = float(generator.uniform(0.5, 2.0) * tp ** generator.uniform(0.8, 1.2))
            made.append(Option(Instance(KNOWN[name], tp), capacity, prices[name] * tp))
        return made

    prefill, decode = options(), options()
    slow = [(i, j) for i in range(4) for j in range(4) if generator.random() < 0.25]
    return prefill, decode, float(generator.uniform(1, 6)), limits, slow


def tried(
    prefill: list[Option], decode: list[Option], rate: float, limits: dict[str, int], slow: list[tuple[int, int]]
) -> float:
    """The cheapest of all numbers of instances."""
    options = [*prefill, *decode]
    ranges = [range(limits[one.instance.accelerator.name] // one.instance.devices + 1) for one in options]
    counts = np.stack(np.meshgrid(*ranges, indexing="ij"), -1).reshape(-1, len(options))
    capacity = np.array([one.capacity for one in options])
    fits = (counts[:, :4] @ capacity[:4] >= rate) & (counts[:, 4:] @ capacity[4:] >= rate)
    for name, limit in limits.items():
        devices = [one.instance.devices * (one.instance.accelerator.name == name) for one in options]
        fits &= counts @ np.array(devices) <= limit
    for i, j in slow:
        fits &= (counts[:, i] == 0) | (counts[:, 4 + j] == 0)
    prices = counts @ np.array([one.price for one in options])
    return float(prices[fits].min()) if fits.any() else np.inf


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))])
def test_fleet_is_the_cheapest_of_all(seed: int) -> None:
    task = random_task(seed)
    fleet = solve(*task)
    best = tried(*task)
    assert (np.inf if fleet is None else fleet.price) == pytest.approx(best)


def test_large_pools_are_solved_to_the_bound() -> None:
    prefill, decode, _, _, slow = random_task(3)
    limits = dict.fromkeys({one.instance.accelerator.name for one in prefill}, 2_000)
    fleet = solve(prefill, decode, 1_000.0, limits, slow)
    assert fleet is not None
    assert sum(one.capacity * count for one, count in fleet.prefill) >= 1_000
    assert sum(one.capacity * count for one, count in fleet.decode) >= 1_000


def test_tighter_targets_cost_no_less() -> None:
    loose = make_fleet(Request(**TASK), KNOWN)
    tight = make_fleet(Request(**{**TASK, "targets": {"first_token_s": 0.2, "token_s": 0.015}}), KNOWN)
    assert loose.price <= tight.price


def test_strong_arithmetic_prefills_and_strong_memory_decodes() -> None:
    pool = {"Gaudi-3": {"devices": 32, "price": 2.0}, "H200": {"devices": 32, "price": 3.0}}
    lengths = [{"prompt": 4096, "output": 512}]
    fleet = make_fleet(Request(**{**TASK, "pool": pool, "lengths": lengths, "rate": 30.0}), KNOWN)
    assert {one.instance.accelerator.name for one, _ in fleet.prefill} == {"Gaudi-3"}


def test_moe_needs_more_when_routing_is_even_than_when_few_experts_are_hit() -> None:
    task = {**TASK, "model": "qwen3_30b_a3b", "rate": 1.0, "targets": {"first_token_s": 1.0, "token_s": 0.02}}
    even, skewed = (make_fleet(Request(**{**task, "expert_alpha": alpha}), KNOWN) for alpha in (0.0, 1.2))
    assert skewed.price <= even.price


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pool": {"H1000": {"devices": 8}}}, "pool.H1000: unknown accelerator; known: A100-80GB"),
        ({"targets": {"first_token_s": 1e-4, "token_s": 0.04}}, "no instance in the pool meets targets.first_token_s"),
        ({"rate": 1e5}, "the pool cannot serve rate=100000/s within the targets; add devices"),
    ],
)
def test_what_cannot_be_met_is_named(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_fleet(Request(**{**TASK, **changed}), KNOWN)
    assert message in str(error.value)
