"""Whatever is done with a layer in a step, results are those of the unmodified layer, or both raise.

Each case trains a layer for four steps in one of the ways of `uses`, with 6, 1, 3 and 2 tokens, and compares it as
`life` does. A tenth of the cases runs with Inductor.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.properties.life import compare, plain_step
from tests.properties.uses import BUILDS, LAYERS, USES, layer_of
from tests.properties.written import load

pytestmark = pytest.mark.usefixtures("float64_by_default")
CASES = [*USES, *BUILDS]
FEW = (
    "copied when saved",
    "backward of two losses",
    "another number of choices",
    "no tokens first",
    "stopped in backward",
    "parameters written before backward",
)
"""The other cases are slow tests."""
RAISING = (
    "backward again after it was freed",
    "second derivative",
    "input written before backward",
    "parameters written before backward",
)
"""Eager code raises, or torch.compile does."""
NOT_CHUNKED = ("wrong size", "expert hooked", "with other parameters")
OF_OTHER_DTYPES = ("in autocast", "dtype changed", "float32", "bfloat16", "float16")
OF_DEFAULT_DTYPE = ("sorted back", "scatter add")
"""Layers that make a tensor of the default dtype, so that their own code raises in another."""


def check(spelling: str, case: str, folder: Path, inner: str = "aot_eager") -> None:
    if spelling in OF_DEFAULT_DTYPE and case in OF_OTHER_DTYPES:
        pytest.skip("the layer's own code does not run so")
    torch.manual_seed(1)
    model = load(layer_of(spelling), folder)()
    if case == "in autocast":
        model = model.float()
    outcome = compare(
        BUILDS.get(case, lambda built: built)(model), inner=inner, seed=3, step=USES.get(case, plain_step)
    )
    assert not outcome.is_wrong, outcome
    if case in RAISING:
        assert outcome.verdict != "exact", outcome
    else:
        assert outcome.verdict in ("exact", "torch.compile raises too"), outcome
        assert outcome.num_chunked or case in NOT_CHUNKED, outcome


@pytest.mark.parametrize("case", FEW)
def test_a_loop_is_exact(case: str, tmp_path: Path) -> None:
    check("where", case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "case"), [*enumerate(CASES)])
def test_one_layer_for_each_case_is_exact(place: int, case: str, tmp_path: Path) -> None:
    check(LAYERS[place % len(LAYERS)], case, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("spelling", LAYERS)
@pytest.mark.parametrize("case", CASES)
def test_every_layer_is_exact(case: str, spelling: str, tmp_path: Path) -> None:
    check(spelling, case, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize(("place", "case"), [*enumerate(CASES)])
def test_layers_are_exact_with_inductor(place: int, case: str, tmp_path: Path) -> None:
    check(LAYERS[-1 - place % len(LAYERS)], case, tmp_path, "inductor")
