"""Layers as their packages ship them: none is wrong, and those that are said to be chunked are."""

from __future__ import annotations

from collections import defaultdict

import pytest

from benchmarks.coverage.__main__ import stored_package_rows
from benchmarks.coverage.check import check_package
from benchmarks.coverage.packages import PACKAGED
from benchmarks.coverage.rows import NOT_INSTALLED
from benchmarks.coverage.table import coverage_page

pytestmark = pytest.mark.own_code

CHEAP = "nllb_moe, capacity 8"


def assert_as_expected(name: str) -> None:
    """Exact, and chunked where the entry says so, no more and no less."""
    row = check_package(PACKAGED[name])
    if row.failure == NOT_INSTALLED:
        pytest.skip(f"{row.package} is not installed")
    if row.failure.startswith("does not run here"):
        assert not PACKAGED[name].is_chunked, row.failure
        pytest.skip(row.failure)
    assert row.failure == ""
    assert row.is_exact, f"{row.worst_name}: {row.worst_error}"
    assert row.is_whole == PACKAGED[name].is_chunked, row.reasons


def test_every_layer_has_a_row() -> None:
    assert stored_package_rows().keys() == PACKAGED.keys()


def test_ten_packages_ran_and_no_layer_is_wrong() -> None:
    ran = [row for row in stored_package_rows().values() if not row.failure]
    assert len({row.package for row in ran}) >= 10
    assert all(row.is_exact for row in ran)


def test_rows_say_what_the_entries_expect() -> None:
    for name, row in stored_package_rows().items():
        assert row.is_whole == PACKAGED[name].is_chunked, name


def test_a_package_that_is_not_installed_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = PACKAGED[CHEAP]
    monkeypatch.setattr(type(entry), "installed", None)
    row = check_package(entry)
    assert row.failure == NOT_INSTALLED and row.version == entry.version
    assert f"| {NOT_INSTALLED} |" in coverage_page([], [row], [], [], "", defaultdict(list))


@pytest.mark.filterwarnings("ignore")
def test_a_layer_of_transformers_is_as_expected() -> None:
    assert_as_expected(CHEAP)


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGED)
@pytest.mark.filterwarnings("ignore")
def test_the_layers_of_installed_packages_are_as_expected(name: str) -> None:
    assert_as_expected(name)
