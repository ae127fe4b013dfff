"""What the formulas say that a launch loads and stores, against what its programs touch in the interpreter."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from tests.kernels.cases import Sizes, adapters, expert_index, in_kernels, parameters, small_tiles

pytestmark = [
    *in_kernels,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="counts elements in the interpreter"),
]
SIZES = Sizes(tokens=9, top_k=2, experts=4, hidden=20, width=24)
Touched = dict[tuple[int, str], tuple[int, int]]


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, Touched]]]:
    """Of each launch from here on, by storage and kind: elements that programs touched, and different ones."""
    from triton.runtime.interpreter import InterpreterBuilder

    from memfine_fx.kernels.launches import Launch

    found: list[tuple[Any, Touched]] = []
    places: dict[str, list[Any]] = {"load": [], "store": [], "atomic": []}

    def noting(name: str, kind: str, at: int, mask_at: int) -> None:
        original = getattr(InterpreterBuilder, name)

        def noted(self: Any, *arguments: Any) -> Any:
            pointers, mask = arguments[at].data, arguments[mask_at].data
            places[kind].append(pointers[mask.astype(bool)].ravel())
            return original(self, *arguments)

        monkeypatch.setattr(InterpreterBuilder, name, noted)

    noting("create_masked_load", "load", 0, 1)
    noting("create_masked_store", "store", 0, 2)
    noting("create_atomic_rmw", "atomic", 1, 3)
    run = Launch.run

    def counted(self: Any) -> None:
        for one in places.values():
            one.clear()
        run(self)
        found.append((self, _by_storage(self, places)))

    monkeypatch.setattr(Launch, "run", counted)
    yield found


def _by_storage(launch: Any, places: dict[str, list[Any]]) -> Touched:
    storages = {_storage(tensor) for tensor in launch.arguments.values() if isinstance(tensor, torch.Tensor)}
    result: Touched = {}
    for kind, parts in places.items():
        addresses = numpy.concatenate(parts) if parts else numpy.zeros(0, dtype=numpy.uint64)
        for begin, size in storages:
            inside = addresses[(addresses >= begin) & (addresses < begin + size)]
            if inside.size:
                result[begin, kind] = (inside.size, numpy.unique(inside).size)
    return result


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _said(launch: Any, load: Any) -> Touched:
    from memfine_fx.kernels.counting import accesses_of

    totals: dict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0])
    for access in accesses_of(launch, load):
        total = totals[_storage(launch.arguments[access.argument])[0], access.kind]
        total[0] += access.elements
        total[1] += access.distinct
    return {key: (total[0], total[1]) for key, total in totals.items() if total[0]}


def _load(routing: Any, window: Any) -> Any:
    from memfine_fx.kernels.traffic import Load

    offsets = routing.offsets.tolist()
    ranges = routing.ranges(window)
    last = min(window.last, offsets[-1])
    tokens = {row // routing.top_k for row in routing.order[window.first : last].tolist()}
    spans = list(itertools.pairwise(offsets))
    return Load(
        tuple(stop - start for start, stop in ranges),
        len(tokens),
        has_first_token=0 in tokens,
        num_empty=sum(begin == end for begin, end in spans),
        is_continued=any(begin < window.first < end for begin, end in spans),
        is_cut=any(begin < window.last < end for begin, end in spans),
    )


@pytest.mark.parametrize(
    "options",
    (
        {},
        {"saves_products": True, "is_deterministic": True},
        {"adds": True},
        {"layout": "interleaved_in_out", "activation": "clamped", "has_bias": True},
        {"layout": "single", "activation": "relu2", "has_bias": True, "has_weight": False},
        {"ranks": (3, 18)},
        {"layout": "apart", "ranks": (3, None)},
        {"layout": "interleaved_in_out", "activation": "clamped", "ranks": (5, 3)},
    ),
    ids=str,
)
@pytest.mark.parametrize(("pattern", "rows"), (("random", 7), ("dropped", 18), ("two_experts", 5)))
def test_formulas_count_what_programs_touch(
    options: dict[str, Any], pattern: str, rows: int, touched: list[tuple[Any, Touched]]
) -> None:
    from memfine_fx.kernels.layer import LayerOptions, run_backward, run_forward
    from memfine_fx.kernels.sorting import reference_sort
    from memfine_fx.kernels.windows import Window

    options = dict(options)
    weight = torch.rand(SIZES.tokens * SIZES.top_k) if options.pop("has_weight", True) else None
    adds, ranks = options.pop("adds", False), options.pop("ranks", None)
    chosen = LayerOptions(rows, tiles=small_tiles(), **options)
    params = parameters(chosen.layout, SIZES, has_bias=chosen.has_bias)
    if ranks is not None:
        forms, factors = adapters(chosen.layout, SIZES, ranks)
        chosen, params = replace(chosen, adapters=forms), [*params, *factors]
    params = [param.detach() for param in params]
    routing, hidden = (
        reference_sort(expert_index(pattern, SIZES), SIZES.experts),
        torch.randn(SIZES.tokens, SIZES.hidden),
    )
    out, saved = run_forward(hidden, weight, routing, params, chosen)
    onto = [torch.zeros_like(param) for param in params] if adds else []
    run_backward(out, hidden, weight, routing, params, saved, chosen, [True] * (2 + len(params)), onto)
    assert len(touched) > 5
    for launch, found in touched:
        first, last = launch.arguments["first_row"], launch.arguments["last_row"]
        load = _load(routing, Window(first // rows, first, last))
        if load.num_rows or launch.name == "weight_gradient_kernel":
            assert _said(launch, load) == found, launch.name


def test_the_sort_touches_no_more_than_is_said(touched: list[tuple[Any, Touched]]) -> None:
    from memfine_fx.kernels.sorting import sort_assignments
    from memfine_fx.kernels.windows import Window

    routing = sort_assignments(expert_index("random", Sizes(tokens=150)), 5)
    load = _load(routing, Window(0, 0, 300))
    assert len(touched) == 4
    for launch, found in touched:
        said = _said(launch, load)
        assert found.keys() == said.keys()
        assert all(one <= other for key in found for one, other in zip(found[key], said[key], strict=True)), launch.name
