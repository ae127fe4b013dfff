"""The serving model against arithmetic done by hand, and its monotonicity."""

import numpy as np
import pytest

from memfine_planner.serving.hardware import accelerators, architecture
from memfine_planner.serving.model import Instance, Model, decode_s, handover_s, num_hit, prefill_s

KNOWN = accelerators()
DENSE = Model(architecture("llama3_70b"))
MOE = Model(architecture("qwen3_30b_a3b"))
LATENT = Model(architecture("deepseek_v3"), "FP8", 1.0)


def test_cache_of_a_token_is_what_the_heads_hold() -> None:
    assert DENSE.cache_bytes_per_token == 80 * 2 * 8 * 128 * 2
    assert LATENT.cache_bytes_per_token == 61 * (512 + 64)


def test_weights_that_do_not_fit_leave_no_room_for_a_cache() -> None:
    assert Instance(KNOWN["H100"], 1).cache_tokens(DENSE) < 0
    held = Instance(KNOWN["H100"], 4).cache_tokens(DENSE) * DENSE.cache_bytes_per_token
    assert held == pytest.approx(0.9 * 4 * 79.6 * 2**30 - DENSE.weight_bytes)


def test_heads_fewer_than_devices_are_kept_more_than_once() -> None:
    assert Instance(KNOWN["H100"], 16).cache_copies(DENSE) == 2
    assert Instance(KNOWN["H100"], 8).cache_copies(LATENT) == 8
    assert Instance(KNOWN["H100"], 8, replicated_attention=True).cache_copies(LATENT) == 1


def test_long_prefill_is_bound_by_arithmetic_and_lone_decode_by_reading_weights() -> None:
    on = Instance(KNOWN["H200"], 2)
    arithmetic = 2 * DENSE.arch.active_params * 4096 / 2 / KNOWN["H200"].flops_per_s("BF16")
    assert 1.0 < prefill_s(DENSE, on, 4096) / arithmetic < 1.5
    reading = DENSE.weight_bytes / 2 / KNOWN["H200"].memory_bytes_per_s
    assert 0.95 < decode_s(DENSE, on, 1, 100) / reading < 1.3


def test_experts_hit_grow_from_one_tokens_to_all() -> None:
    assert num_hit(128, 8, 0.0, 1) == pytest.approx(8)
    assert num_hit(128, 8, 0.0, 10_000) == pytest.approx(128)
    assert num_hit(128, 8, 1.0, 32) < num_hit(128, 8, 0.0, 32)


def test_experts_hit_are_those_of_a_simulation() -> None:
    generator = np.random.default_rng(0)
    hit = [len(np.unique(np.concatenate([generator.permutation(64)[:6] for _ in range(20)]))) for _ in range(400)]
    assert num_hit(64, 6, 0.0, 20) == pytest.approx(np.mean(hit), rel=0.01)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_more_never_takes_less(name: str) -> None:
    on = Instance(KNOWN[name], 4)
    steps = [decode_s(MOE, on, batch, 1000) for batch in (1, 4, 16, 64, 256)]
    assert steps == sorted(steps)
    assert decode_s(MOE, on, 16, 1000) < decode_s(MOE, on, 16, 8000)
    assert prefill_s(MOE, on, 512) < prefill_s(MOE, on, 1024) < prefill_s(MOE, Instance(KNOWN[name], 2), 1024)


def test_handover_costs_more_between_vendors_and_layouts() -> None:
    source = Instance(KNOWN["H100"], 4)
    same = handover_s(DENSE, source, source, 4096)
    assert same == pytest.approx(4096 * DENSE.cache_bytes_per_token / (4 * 50e9 * KNOWN["H100"].link_fraction))
    assert same < handover_s(DENSE, source, Instance(KNOWN["H100"], 8), 4096)
    other = handover_s(DENSE, source, Instance(KNOWN["MI300X"], 4), 4096)
    assert other > same
    assert handover_s(DENSE, source, Instance(KNOWN["MI300X"], 4), 4096, target_cache_bytes=1.0) < other
