"""The solver against trying every plan, and on shapes of which the answer is known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfine_fx.plan.solve import Alternative, Choice, Item, Span, StepPlan, StepProblem, solve


def every_plan(problem: StepProblem) -> Iterator[StepPlan]:
    """Every plan that fits, by trying all."""
    for alternative in problem.alternatives:
        items = alternative.items()
        options: list[list[tuple[int, int] | None]] = [
            [
                None,
                *(
                    (number, units)
                    for number, choice in enumerate(item.choices)
                    for units in range(choice.least_units, choice.num_units + 1)
                ),
            ]
            for item in items
        ]
        for chosen in itertools.product(*options):
            saved = {item.name: one for item, one in zip(items, chosen, strict=True) if one is not None}
            if fits(problem, alternative, saved):
                peak = max(live_bytes(alternative, saved))
                yield StepPlan(alternative.key, alternative.seconds - spared(items, saved), peak, saved)


def spared(items: Sequence[Item], saved: dict[str, tuple[int, int]]) -> float:
    total = 0.0
    for item in items:
        if item.name in saved:
            number, units = saved[item.name]
            total += item.choices[number].seconds * units / item.choices[number].num_units
    return total


def live_bytes(
    alternative: Alternative, saved: dict[str, tuple[int, int]], touched: set[int] | None = None
) -> list[int]:
    """Live bytes at each position; positions where something is saved go into `touched`."""
    live = list(alternative.live_bytes())
    for item in alternative.items():
        if item.name in saved:
            number, units = saved[item.name]
            choice = item.choices[number]
            for span in choice.spans:
                beside = span.whole_bytes if units == choice.num_units else span.part_bytes
                for position in range(span.start, min(span.stop, len(live))):
                    live[position] += units * span.unit_bytes + beside
                    if touched is not None:
                        touched.add(position)
    return live


def fits(problem: StepProblem, alternative: Alternative, saved: dict[str, tuple[int, int]]) -> bool:
    touched: set[int] = set()
    live = live_bytes(alternative, saved, touched)
    limit = problem.available_bytes if problem.saved_bytes is None else problem.saved_bytes
    is_within = max(alternative.live_bytes()) <= problem.available_bytes
    return is_within and all(live[position] <= limit for position in touched)


def random_problem(seed: int) -> StepProblem:
    draw = random.Random(seed)
    length = draw.randint(1, 8)
    is_nested = draw.random() < 0.5
    alternatives = []
    for key in range(draw.randint(1, 3)):
        live = [draw.randint(0, 60) for _ in range(length)]
        items = []
        for number in range(draw.randint(0, 5)):
            choices = []
            for _ in range(draw.randint(1, 2)):
                start, stop = sorted(draw.sample(range(length + 1), 2))
                if is_nested:
                    start = min(number, length - 1)
                    stop = max(start + 1, length - number)
                units = draw.choice([1, 1, 2, 3])
                # Saving everything may spare scratch, but never more than what it takes.
                whole = draw.choice([0, 0, 3, -2])
                span = Span(start, stop, draw.randint(0, 20), whole, draw.choice([0, 0, 4]))
                choices.append(Choice(float(draw.randint(-2, 12)), (span,), units, draw.randint(1, units)))
            items.append(Item(f"item {number}", tuple(choices)))
        alternatives.append(Alternative(key, float(draw.randint(0, 9)), lambda own=live: own, lambda own=items: own))
    alternatives.sort(key=lambda one: one.seconds)
    available = draw.randint(20, 120)
    return StepProblem(alternatives, available, draw.choice([None, available - draw.randint(0, 20)]))


@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_small_problems_are_solved_as_by_trying_every_plan(first: int) -> None:
    for seed in range(first, first + 100):
        problem = random_problem(seed)
        plans = list(every_plan(problem))
        found = solve(problem)
        assert (found is None) == (not plans), seed
        if found is not None:
            assert found.seconds == pytest.approx(min(plan.seconds for plan in plans)), seed
            alternative = next(one for one in problem.alternatives if one.key == found.key)
            assert fits(problem, alternative, dict(found.saved)), seed
            assert found.peak_bytes == max(live_bytes(alternative, dict(found.saved))), seed


def layers(num_layers: int, seconds: Sequence[float], num_bytes: int, units: int = 1) -> list[Item]:
    """Items that are saved from the layer's forward to its backward, in a timeline of a forward and its mirror."""
    spans = [(Span(place, 2 * num_layers - place, num_bytes),) for place in range(num_layers)]
    return [Item(f"layer {place}", (Choice(seconds[place], span, units),)) for place, span in enumerate(spans)]


def one_way(live: Sequence[int], items: Sequence[Item], available: int) -> StepProblem:
    return StepProblem([Alternative("only", 0.0, lambda: live, lambda: items)], available)


@pytest.mark.parametrize("num_layers", [4, 96])
def test_of_equal_layers_the_last_ones_are_saved(num_layers: int) -> None:
    plan = solve(one_way([0] * 2 * num_layers, layers(num_layers, [1.0] * num_layers, 10), 25))
    assert plan is not None and set(plan.saved) == {f"layer {num_layers - 1}", f"layer {num_layers - 2}"}


@pytest.mark.parametrize("num_layers", [4, 96])
def test_a_layer_for_whose_rows_there_is_no_room_saves_as_many_as_fit(num_layers: int) -> None:
    plan = solve(one_way([0] * 2 * num_layers, layers(num_layers, [1.0] * num_layers, 2, units=100), 350))
    assert plan is not None
    assert plan.saved == {f"layer {num_layers - 1}": (0, 100), f"layer {num_layers - 2}": (0, 75)}
    assert plan.seconds == pytest.approx(-1.75)


def test_two_small_items_are_better_than_the_one_that_spares_most_per_byte() -> None:
    items = layers(3, [10.0, 8.0, 8.0], 0)
    sizes = [6, 5, 5]
    items = [
        Item(item.name, (Choice(item.choices[0].seconds, (Span(0, 6, size),)),))
        for item, size in zip(items, sizes, strict=True)
    ]
    plan = solve(one_way([0] * 6, items, 10))
    assert plan is not None and set(plan.saved) == {"layer 1", "layer 2"}


def test_the_fastest_of_monotone_alternatives_that_fits_is_found_by_few_questions() -> None:
    asked = []

    def live(rows: int) -> list[int]:
        asked.append(rows)
        return [10 * rows]

    alternatives = [Alternative(rows, -float(rows), lambda rows=rows: live(rows)) for rows in range(4096, 0, -1)]
    plan = solve(StepProblem(alternatives, 7777, is_monotone=True))
    assert plan is not None and plan.key == 777
    assert len(asked) <= 14
    assert solve(StepProblem(alternatives, 9, is_monotone=True)) is None


def test_what_costs_time_is_not_saved() -> None:
    plan = solve(one_way([0] * 4, layers(2, [-1.0, 0.0], 0), 100))
    assert plan == StepPlan("only", 0.0, 0, {})


@settings(max_examples=60, deadline=None)
@given(
    live=st.lists(st.integers(0, 3000), min_size=12, max_size=12),
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=5),
    scratch=st.tuples(st.integers(-50, 50), st.integers(0, 50)),
)
def test_of_many_units_not_one_more_would_fit(
    live: list[int], sizes: list[tuple[int, int]], scratch: tuple[int, int]
) -> None:
    items = []
    for place, (size, gain) in enumerate(sizes):
        whole, part = (scratch[0], max(scratch)) if place == 0 else (0, 0)
        spans = (Span(place, 6, size, whole, part), Span(6, 6 + len(sizes) - place, size))
        items.append(Item(f"item {place}", (Choice(float(gain), spans, 100, 64),)))
    problem = one_way(live, items, max(live))
    plan = solve(problem)
    assert plan is not None
    saved = dict(plan.saved)
    assert fits(problem, problem.alternatives[0], saved)
    for item in items:
        units = saved.get(item.name, (0, 0))[1]
        assert units == 0 or 64 <= units <= 100
        more = saved | {item.name: (0, max(units + 1, 64))}
        assert units == 100 or not fits(problem, problem.alternatives[0], more)
