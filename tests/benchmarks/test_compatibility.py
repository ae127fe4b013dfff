"""The compatibility table says what the tests said, under each torch."""

from __future__ import annotations

import json

import pytest

from benchmarks.compatibility import ROOT, Environment, FastTests, fast_tests_of, merged, outcomes_of, table

REPORT = """<testsuites><testsuite>
<testcase classname="tests.trainers.test_examples" name="test_an_example_proves_itself[peft_lora]"/>
<testcase classname="tests.trainers.test_examples" name="test_other"><failure message="x">x</failure></testcase>
<testcase classname="tests.integration.test_training_loops" name="test_third"><skipped/></testcase>
<testcase classname="tests.passes.test_find" name="test_not_listed"/>
</testsuite></testsuites>"""


def test_rows_are_outcomes_by_version() -> None:
    older = Environment("2.11.0", "Python 3.11", {"test_examples::test_other": "works"})
    lines = table({"2.13": Environment("2.13.0", "Python 3.11", outcomes_of(REPORT)), "2.11": older}).splitlines()
    assert "| an example proves itself: peft_lora | untried | works |" in lines
    assert "| other | works | **fails** |" in lines
    assert "| third | untried | not run |" in lines
    assert not any("not listed" in line for line in lines)
    assert lines.index("## Examples") < lines.index("## Plain PyTorch loops")


@pytest.mark.parametrize("is_first", [True, False])
def test_what_ran_in_one_environment_counts_where_others_skipped_it(is_first: bool) -> None:
    ran = REPORT.replace('name="test_third"><skipped/></testcase>', 'name="test_third"/>')
    reports = (ran, REPORT) if is_first else (REPORT, ran)
    assert outcomes_of(*reports)["test_training_loops::test_third"] == "works"


def test_fast_tests_are_rows_by_torch_and_python() -> None:
    newer = Environment("2.15.0", fast={"3.11.7": fast_tests_of("2.15.0+cpu", REPORT)})
    older = Environment("2.9.0", fast={"3.12.1": FastTests("2.9.0", 5, 0), "3.11.7": FastTests("2.9.0", 4, 1)})
    lines = table({"2.15": newer, "2.9": older, "2.13": Environment("2.13.0", "", outcomes_of(REPORT))}).splitlines()
    first = lines.index("| 2.9.0 | 3.11.7 | 4 | 1 | 0 | - |")
    assert lines[first + 1] == "| 2.9.0 | 3.12.1 | 5 | 0 | 0 | - |"
    assert lines[first + 2] == "| 2.15.0+cpu | 3.11.7 | 2 | 1 | 1 | test_examples::test_other |"


def test_a_fast_test_that_ran_again_counts_as_it_ran_then() -> None:
    again = """<testsuites><testsuite>
    <testcase classname="tests.trainers.test_examples" name="test_other"/>
    <testcase classname="tests.more.test_examples" name="test_other"><failure message="x">x</failure></testcase>
    </testsuite></testsuites>"""
    assert fast_tests_of("2.15.0", REPORT, again) == FastTests("2.15.0", 3, 1, ("test_examples::test_other",))


def test_the_page_is_that_of_the_kept_outcomes() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "compatibility.json").read_text(encoding="utf-8"))
    environments = {key: Environment.read(one) for key, one in kept.items()}
    assert (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8") == table(environments)


def test_a_run_replaces_the_files_that_it_ran() -> None:
    kept = {"test_matrix::a": "works", "test_matrix::gone": "works", "test_examples::b": "works"}
    assert merged(kept, {"test_matrix::a": "**fails**"}) == {"test_examples::b": "works", "test_matrix::a": "**fails**"}
