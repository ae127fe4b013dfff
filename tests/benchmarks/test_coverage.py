"""The coverage table: complete, as stored, and in its cheap form as it is today."""

from __future__ import annotations

import re

import pytest

from benchmarks.coverage.__main__ import PAGE, page_of, rows_of, stored_multimodal_rows, stored_rows
from benchmarks.coverage.check import (
    check_experts_function,
    check_family,
    check_multimodal,
    check_replay,
    check_spelling,
)
from benchmarks.coverage.families import moe_families
from benchmarks.coverage.multimodal import MULTIMODAL
from benchmarks.coverage.rows import EXPERTS_FUNCTION, NO_FUNCTION, ROUTING_REPLAY, CoverageRow
from benchmarks.coverage.spellings import SPELLINGS

pytestmark = pytest.mark.own_code

FAMILIES = {family.name: family for family in moe_families()}
CHEAP = ("olmoe", "qwen3_vl_moe", "list of experts, zeros", *list(SPELLINGS)[::13])
"""What is checked in every run; tests/integration/test_spellings.py checks the layers of the other spellings too."""


def checked(name: str) -> CoverageRow:
    return check_spelling(name) if name in SPELLINGS else check_family(FAMILIES[name])


def assert_no_worse(name: str) -> None:
    """As many regions as the table says, still exact; where the table has more, it is out of date or we lost one."""
    row, stored = checked(name), stored_rows()[name]
    assert row.failure == ""
    assert row.is_exact, f"{row.worst_name}: {row.worst_error}"
    assert (row.num_layers, row.num_raised) == (stored.num_layers, stored.num_raised), row.reasons
    assert row.uncompared == stored.uncompared


def test_every_installed_family_and_every_spelling_has_a_row() -> None:
    assert len(FAMILIES) > 60
    assert stored_rows().keys() == FAMILIES.keys() | SPELLINGS.keys()


def test_a_family_that_could_not_be_built_says_why() -> None:
    assert all(row.built or row.failure for row in stored_rows().values())


def test_the_page_is_made_from_the_rows() -> None:
    rows = stored_rows()
    names = [*SPELLINGS, *FAMILIES]
    written, made = PAGE.read_text(encoding="utf-8"), page_of([rows[name] for name in names])
    if versions_in(written) != versions_in(made):
        pytest.skip(f"the page is of {versions_in(written)}")
    assert written == made


def versions_in(page: str) -> str:
    found = re.search(r"transformers [\d.]+, torch [\d.]+", page)
    assert found is not None
    return found[0]


@pytest.mark.parametrize("name", CHEAP)
@pytest.mark.filterwarnings("ignore")
def test_a_cheap_part_of_the_table_holds(name: str) -> None:
    assert_no_worse(name)


def test_every_family_has_a_row_of_its_experts_function() -> None:
    rows = {row.name: row for row in rows_of(EXPERTS_FUNCTION)}
    assert rows.keys() == FAMILIES.keys()
    assert sum(row.is_whole for row in rows.values()) >= 60
    assert all(row.is_whole or row.failure == NO_FUNCTION for row in rows.values())


@pytest.mark.parametrize("name", ["mixtral", "nemotron_h", "openai_privacy_filter", "dbrx"])
def test_a_cheap_part_of_the_experts_functions_holds(name: str) -> None:
    assert_function_no_worse(name)


@pytest.mark.slow
def test_every_experts_function_of_the_table_holds() -> None:
    for name in FAMILIES:
        assert_function_no_worse(name)


def assert_function_no_worse(name: str) -> None:
    row, stored = check_experts_function(FAMILIES[name]), {row.name: row for row in rows_of(EXPERTS_FUNCTION)}[name]
    assert (row.is_whole, row.failure, row.num_raised) == (stored.is_whole, stored.failure, stored.num_raised), name


def test_every_family_but_a_few_replays_a_routing() -> None:
    rows = {row.name: row for row in rows_of(ROUTING_REPLAY)}
    assert rows.keys() == FAMILIES.keys()
    assert sum(row.is_whole for row in rows.values()) >= 65


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_a_cheap_part_of_the_replays_holds(name: str) -> None:
    assert check_replay(FAMILIES[name]).is_whole


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAMILIES)[::3])
@pytest.mark.filterwarnings("ignore")
def test_every_third_family_of_the_table_holds(name: str) -> None:
    assert_no_worse(name)


@pytest.mark.campaign
@pytest.mark.parametrize("name", [*list(FAMILIES)[1::3], *list(FAMILIES)[2::3]])
@pytest.mark.filterwarnings("ignore")
def test_the_other_families_of_the_table_hold(name: str) -> None:
    assert_no_worse(name)


@pytest.mark.campaign
@pytest.mark.parametrize("name", MULTIMODAL)
@pytest.mark.filterwarnings("ignore")
def test_deep_models_with_images_are_chunked_in_every_layer(name: str) -> None:
    row, stored = check_multimodal(name), stored_multimodal_rows().get(name)
    assert row.failure == ""
    assert row.is_exact, f"{row.worst_name}: {row.worst_error}"
    assert row.num_raised == row.num_layers >= 13, row.reasons
    assert stored is None or row.num_graphs <= stored.num_graphs
