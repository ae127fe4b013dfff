"""The compatibility table says what the tests said."""

from __future__ import annotations

from benchmarks.compatibility import table

REPORT = """<testsuites><testsuite>
<testcase classname="tests.trainers.test_examples" name="test_an_example_proves_itself[peft_lora]"/>
<testcase classname="tests.trainers.test_examples" name="test_other"><failure message="x">x</failure></testcase>
<testcase classname="tests.integration.test_training_loops" name="test_third"><skipped/></testcase>
<testcase classname="tests.passes.test_find" name="test_not_listed"/>
</testsuite></testsuites>"""


def test_rows_are_outcomes() -> None:
    lines = table(REPORT).splitlines()
    assert "| an example proves itself: peft_lora | works |" in lines
    assert "| other | **fails** |" in lines
    assert "| third | not run |" in lines
    assert not any("not listed" in line for line in lines)
    assert lines.index("## Examples") < lines.index("## Plain PyTorch loops")
