"""What regions keep for free: the step's peak stays where it was, whatever the routing, and the last layer first."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfine_fx.memory.region_bytes import ChunkSize
from memfine_fx.memory.step import RunMemory, step_peak_bytes
from memfine_fx.plan.free import FreeKeep, Stretch, describe_budget, dropped_sites, kept_for_free
from memfine_fx.plan.runs import Situation
from tests.plan.deep_model import TOKENS, DeepModel, deep_model

LENGTH = 6


def nested(place: int, num_bytes: int, seconds: float, num_layers: int) -> FreeKeep:
    """Kept from its layer's forward on, and in backward up to where its layer comes."""
    stretches = Stretch(0, place, LENGTH, num_bytes), Stretch(1, 0, num_layers - place, num_bytes)
    return FreeKeep(f"layer {place}", place, seconds, stretches)


def with_kept(live: tuple[list[int], ...], keeps: list[FreeKeep], kept: frozenset[str]) -> list[list[int]]:
    total = [list(one) for one in live]
    for keep in keeps:
        for stretch in keep.stretches if keep.site in kept else ():
            for position in range(stretch.start, stretch.stop):
                total[stretch.direction][position] += stretch.num_bytes
    return total


@settings(max_examples=60, deadline=None)
@given(
    live=st.tuples(*[st.lists(st.integers(0, 300), min_size=LENGTH, max_size=LENGTH)] * 2),
    sizes=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 3)), min_size=1, max_size=5),
)
def test_nothing_comes_above_the_peak_and_nothing_more_would_fit(
    live: tuple[list[int], ...], sizes: list[tuple[int, int]]
) -> None:
    keeps = [nested(place, size, float(gain), len(sizes)) for place, (size, gain) in enumerate(sizes)]
    limit = max(map(max, live))

    kept = kept_for_free(live, keeps, limit)

    assert max(map(max, with_kept(live, keeps, kept))) <= limit
    left = limit - limit // 64
    for keep in keeps:
        if keep.site not in kept:
            more = with_kept(live, keeps, kept | {keep.site})
            assert any(max(more[one.direction][one.start : one.stop], default=0) > left for one in keep.stretches)


@settings(max_examples=40, deadline=None)
@given(
    live=st.tuples(*[st.lists(st.integers(0, 300), min_size=LENGTH, max_size=LENGTH)] * 2),
    size=st.integers(1, 90),
    num_layers=st.integers(1, 5),
)
def test_of_equal_layers_as_many_keep_as_any_choice_could(
    live: tuple[list[int], ...], size: int, num_layers: int
) -> None:
    keeps = [nested(place, size, 1.0, num_layers) for place in range(num_layers)]
    limit = max(map(max, live))
    left = limit - limit // 64

    def fits(sites: tuple[str, ...]) -> bool:
        more = with_kept(live, keeps, frozenset(sites))
        stretches = [one for keep in keeps if keep.site in sites for one in keep.stretches]
        return all(max(more[one.direction][one.start : one.stop], default=0) <= left for one in stretches)

    most = max(
        count
        for count in range(num_layers + 1)
        if any(map(fits, itertools.combinations([keep.site for keep in keeps], count)))
    )
    assert len(kept_for_free(live, keeps, limit)) == most


def test_the_last_of_equal_layers_comes_first_and_more_seconds_a_byte_before_that() -> None:
    flat = ([0] * LENGTH, [0, 0, 0, 0, 0, 640])
    layers = [nested(place, 200, 1.0, 4) for place in range(4)]
    assert kept_for_free(flat, layers, 640) == {"layer 1", "layer 2", "layer 3"}
    dearer = [replace(layers[0], seconds_per_byte=2.0), *layers[1:]]
    assert "layer 0" in kept_for_free(flat, dearer, 640)


def test_what_stands_at_the_peak_is_not_kept_however_small() -> None:
    at_the_border = ([0] * LENGTH, [640, 0, 0, 0, 0, 0])
    assert kept_for_free(at_the_border, [nested(0, 1, 1.0, 1)], 640) == frozenset()


def run_of(model: DeepModel, num_tokens: int, drops: frozenset[str] = frozenset()) -> RunMemory:
    return RunMemory(model.step, {str(TOKENS): num_tokens}, drops=drops)


@pytest.mark.parametrize("rows", [1, 100, 2048])
@pytest.mark.parametrize("num_tokens", [512, 4096, 16384, 65536])
def test_a_deep_models_peak_stays_whatever_rows_its_experts_get(num_tokens: int, rows: int) -> None:
    model = deep_model(12, has_room=True)
    everything = frozenset(model.step.optional)
    dropped = dropped_sites(model.config, run_of(model, num_tokens))

    def peak(drops: frozenset[str]) -> int:
        found = step_peak_bytes([run_of(model, num_tokens, drops)], lambda site, tokens: ChunkSize(rows))
        assert found is not None
        return found

    assert peak(dropped) <= peak(everything)


def test_a_longer_sequence_keeps_less() -> None:
    model = deep_model(12, has_room=True)
    kept = [12 - len(dropped_sites(model.config, run_of(model, tokens))) for tokens in (512, 4096, 65536)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[-1]
    assert kept[0] >= 11


@pytest.mark.parametrize(
    ("budget", "drops", "words"),
    [
        ("free", {"body/0"}, 'memory_budget="free": 2 of 3 regions keep what leaves the step\'s peak where it is'),
        (None, set(), "no memory_budget: regions keep nothing"),
        ("20GiB", set(), "memory_budget='20GiB' bounds the bytes of a step"),
    ],
)
def test_a_report_says_which_plan_it_is_of(budget: str | None, drops: set[str], words: str) -> None:
    model = deep_model(3, has_room=budget == "free", memory_budget=budget)
    assert describe_budget(model.config, [run_of(model, 512, frozenset(drops))]) == words


def test_a_report_says_why_nothing_is_kept() -> None:
    model = deep_model(3, memory_budget="free")
    words = describe_budget(model.config, [run_of(model, 512)])
    assert words.startswith('memory_budget="free", but regions keep nothing: ')


def test_plans_of_runs_that_keep_other_things_are_other_plans() -> None:
    model = deep_model(2, has_room=True)
    keys = {Situation(run_of(model, 512, frozenset(drops)), None).key for drops in ((), ("body/0",), ("body/1",))}
    assert len(keys) == 3


def test_what_48_layers_keep_is_decided_in_less_than_a_tenth_of_a_second() -> None:
    model = deep_model(48, has_room=True)
    seconds = []
    for num_tokens in (4096, 4608, 5120, 5632):
        started = time.perf_counter()
        dropped_sites(model.config, run_of(model, num_tokens))
        seconds.append(time.perf_counter() - started)
    assert min(seconds) <= 0.1
