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
from memfine_fx.plan.free import describe_budget, free_rows
from memfine_fx.plan.kept import KeepRows, Stretch, kept_rows, lean_of
from memfine_fx.plan.runs import Situation
from tests.plan.deep_model import TOKENS, TOP_K, DeepModel, deep_model

LENGTH = 6


def nested(place: int, row_bytes: int, seconds: float, num_layers: int, num_rows: int = 1) -> KeepRows:
    """Kept from its layer's forward on, and in backward up to where its layer comes."""
    stretches = Stretch(0, place, LENGTH, row_bytes), Stretch(1, 0, num_layers - place, row_bytes)
    return KeepRows(f"layer {place}", place, num_rows, seconds, seconds, stretches)


def with_kept(live: Live, keeps: list[KeepRows], kept: dict[str, int]) -> list[list[int]]:
    total = [list(one) for one in live]
    for keep in keeps:
        rows = kept.get(keep.site, 0)
        for stretch in keep.stretches if rows else ():
            more = stretch.of_all if rows == keep.num_rows else stretch.of_part
            for position in range(stretch.start, stretch.stop):
                total[stretch.direction][position] += stretch.row_bytes * rows + more
    return total


def fits(live: Live, keeps: list[KeepRows], kept: dict[str, int], limit: int) -> bool:
    """Whether nowhere that something is kept more is alive than the limit."""
    more = with_kept(live, keeps, kept)
    stretches = [one for keep in keeps if kept.get(keep.site) for one in keep.stretches]
    return all(max(more[one.direction][one.start : one.stop], default=0) <= limit for one in stretches)


Live = tuple[list[int], ...]
LIVES = st.tuples(*[st.lists(st.integers(0, 3000), min_size=LENGTH, max_size=LENGTH)] * 2)


@settings(max_examples=60, deadline=None)
@given(
    live=LIVES,
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=5),
    scratch=st.tuples(st.integers(-50, 50), st.integers(0, 50)),
)
def test_nothing_comes_above_the_limit_and_not_a_row_more_would_fit(
    live: Live, sizes: list[tuple[int, int]], scratch: tuple[int, int]
) -> None:
    keeps = [nested(place, size, float(gain), len(sizes), 100) for place, (size, gain) in enumerate(sizes)]
    first = replace(keeps[0].stretches[0], of_all=scratch[0], of_part=max(scratch))
    keeps[0] = replace(keeps[0], stretches=(first, *keeps[0].stretches[1:]))
    limit = max(map(max, live))

    kept = kept_rows(live, keeps, limit)

    assert fits(live, keeps, kept, limit)
    for keep in keeps:
        rows = kept.get(keep.site, 0)
        fewest = max(rows + 1, 64)  # a border is worth so many rows
        assert rows in (0, 100) or rows >= 64
        assert rows == 100 or not fits(live, keeps, kept | {keep.site: fewest}, limit)


@settings(max_examples=40, deadline=None)
@given(live=LIVES, size=st.integers(1, 900), num_layers=st.integers(1, 5))
def test_of_equal_layers_as_many_keep_as_any_choice_could(live: Live, size: int, num_layers: int) -> None:
    keeps = [nested(place, size, 1.0, num_layers) for place in range(num_layers)]
    limit = max(map(max, live))
    most = max(
        count
        for count in range(num_layers + 1)
        if any(
            fits(live, keeps, dict.fromkeys(sites, 1), limit)
            for sites in itertools.combinations([keep.site for keep in keeps], count)
        )
    )
    assert len(kept_rows(live, keeps, limit)) == most


def test_the_last_of_equal_layers_comes_first_and_more_seconds_a_byte_before_that() -> None:
    flat = ([0] * LENGTH, [0, 0, 0, 0, 0, 630])
    layers = [nested(place, 200, 1.0, 4) for place in range(4)]
    assert set(kept_rows(flat, layers, 630)) == {"layer 1", "layer 2", "layer 3"}
    dearer = [replace(layers[0], seconds_per_byte=2.0), *layers[1:]]
    assert "layer 0" in kept_rows(flat, dearer, 630)


def test_what_stands_at_the_peak_is_not_kept_however_small() -> None:
    at_the_border = ([0] * LENGTH, [640, 0, 0, 0, 0, 0])
    assert kept_rows(at_the_border, [nested(0, 1, 1.0, 1)], 640) == {}


def test_the_layer_for_which_there_is_no_room_keeps_what_is_left() -> None:
    flat = ([0] * LENGTH, [0] * LENGTH)
    layers = [nested(place, 2, 1.0, 3, num_rows=100) for place in range(3)]
    assert kept_rows(flat, layers, 350) == {"layer 2": 100, "layer 1": 75}


def run_of(model: DeepModel, num_tokens: int, kept: frozenset[tuple[str, int, int]] = frozenset()) -> RunMemory:
    return RunMemory(model.step, {str(TOKENS): num_tokens}, kept=kept)


@pytest.mark.parametrize("rows", [1, 100, 2048])
@pytest.mark.parametrize("num_tokens", [512, 4096, 16384, 65536])
def test_a_deep_models_peak_stays_whatever_rows_its_experts_get(num_tokens: int, rows: int) -> None:
    model = deep_model(12, has_room=True)
    run = run_of(model, num_tokens)

    def peak(run: RunMemory) -> int:
        found = step_peak_bytes([run], lambda site, tokens: ChunkSize(rows))
        assert found is not None
        return found

    assert peak(free_rows(model.config, run)) <= peak(lean_of(run))


def test_a_longer_sequence_keeps_less() -> None:
    model = deep_model(12, has_room=True)
    shares = []
    for tokens in (512, 4096, 65536):
        run = free_rows(model.config, run_of(model, tokens))
        shares.append(sum(run.kept_rows(site) for site in model.step.optional) / (tokens * TOP_K))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1]
    assert shares[0] >= 11


@pytest.mark.parametrize(
    ("budget", "kept", "words"),
    [
        (
            None,
            {("body/0", 0, 4096)},
            "no memory_budget: 2 of 3 regions keep what leaves the step's peak where it is",
        ),
        ("least", set(), 'memory_budget="least": regions keep nothing'),
        ("20GiB", set(), "memory_budget='20GiB' bounds the bytes of a step"),
    ],
)
def test_a_report_says_which_plan_it_is_of(budget: str | None, kept: set[tuple[str, int, int]], words: str) -> None:
    model = deep_model(3, has_room=budget is None, memory_budget=budget)
    assert describe_budget(model.config, [run_of(model, 512, frozenset(kept))]) == words


def test_a_report_says_why_nothing_is_kept() -> None:
    model = deep_model(3)
    words = describe_budget(model.config, [run_of(model, 512)])
    assert words.startswith("no memory_budget: regions keep nothing (")


def test_plans_of_runs_that_keep_other_things_are_other_plans() -> None:
    model = deep_model(2, has_room=True)
    kept = ((), (("body/0", 0, 4096),), (("body/0", 9, 4096),), (("body/1", 0, 4096),))
    assert len({Situation(run_of(model, 512, frozenset(one)), None).key for one in kept}) == 4


def test_what_48_layers_keep_is_decided_in_less_than_a_tenth_of_a_second() -> None:
    model = deep_model(48, has_room=True)
    seconds = []
    for num_tokens in (4096, 4608, 5120, 5632):
        started = time.perf_counter()
        free_rows(model.config, run_of(model, num_tokens))
        seconds.append(time.perf_counter() - started)
    assert min(seconds) <= 0.1
