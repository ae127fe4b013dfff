"""Layers drawn as source text, with guards, effects and edited routing, are exact or refused over four steps of SGD.

The numbers name the draws: `python -m tests.properties.written loop 17` prints one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.properties.life import compare
from tests.properties.written import Kind, load, written_layer

pytestmark = pytest.mark.usefixtures("float64_by_default")
FEW = [("loop", 8, 16), ("dense", 0, 6), ("dense", 987, 988)]
"""Dense layer 987 scatters to negative ids, which eager code refuses."""
SLOW = [("loop", first, first + 20) for first in range(0, 120, 20)]
SLOW += [("dense", first, first + 20) for first in range(0, 60, 20)]
CAMPAIGN = [("loop", first, first + 50) for first in range(0, 2000, 50)]
CAMPAIGN += [("dense", first, first + 50) for first in range(0, 1000, 50)]


def check(kind: Kind, numbers: range, folder: Path, inner: str = "eager") -> int:
    """Train each layer and its unmodified copy.

    Returns:
        How many of the layers were chunked.
    """
    wrong, num_chunked = [], 0
    for number in numbers:
        layer = written_layer(kind, number)
        torch.manual_seed(number)
        outcome = compare(load(layer, folder)(), inner=inner, seed=number)
        num_chunked += outcome.num_chunked > 0
        if outcome.is_wrong:
            wrong.append((number, outcome, layer.choices))
    assert not wrong, "\n".join(map(str, wrong))
    return num_chunked


@pytest.mark.parametrize(("kind", "first", "last"), FEW)
def test_a_few_layers_are_exact_or_refused(kind: Kind, first: int, last: int, tmp_path: Path) -> None:
    assert check(kind, range(first, last), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first", "last"), SLOW)
def test_many_layers_are_exact_or_refused(kind: Kind, first: int, last: int, tmp_path: Path) -> None:
    check(kind, range(first, last), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), [("loop", 12), ("loop", 600), ("dense", 3), ("dense", 7)])
def test_layers_are_exact_with_inductor(kind: Kind, number: int, tmp_path: Path) -> None:
    assert check(kind, range(number, number + 1), tmp_path, "inductor")


@pytest.mark.campaign
@pytest.mark.parametrize(("kind", "first", "last"), CAMPAIGN)
def test_three_thousand_layers_are_exact_or_refused(kind: Kind, first: int, last: int, tmp_path: Path) -> None:
    check(kind, range(first, last), tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize(("kind", "first", "last"), CAMPAIGN)
def test_a_tenth_of_them_is_exact_with_inductor(kind: Kind, first: int, last: int, tmp_path: Path) -> None:
    check(kind, range(first, last, 10), tmp_path, "inductor")
