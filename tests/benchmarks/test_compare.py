"""The regression guard: what counts as worse."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.compare import Tolerances, compare_rows
from benchmarks.records import Row
from tests.benchmarks.rows import EAGER, row_of


@pytest.mark.parametrize(
    ("new", "worse"),
    [
        (row_of("eager"), []),
        (row_of("eager", peak_mib=8.1), []),
        (row_of("eager", peak_mib=8.4), ["peak bytes"]),
        (row_of("eager", seconds=0.23), ["step seconds"]),
        (row_of("eager", peak_mib=1, seconds=0.01), []),
        (Row(EAGER, 0, error="RuntimeError: no"), ["peak bytes"]),
    ],
)
def test_worse_is_beyond_the_tolerance(new: Row, worse: list[str]) -> None:
    changes = compare_rows([row_of("eager")], [new], Tolerances(0.02, 0.10))

    assert [change.figure for change in changes if change.is_worse] == worse


def test_a_changed_compiler_meets_its_old_row() -> None:
    changes = compare_rows([row_of("memfine", source="old")], [row_of("memfine", source="new")], Tolerances())

    assert not any(change.is_worse for change in changes)


def test_every_point_of_a_sweep_is_compared() -> None:
    def sweep(*peaks: float) -> Row:
        row = row_of("memfine", workload="sweep", points=("T=1", "T=2"))
        assert row.measurement is not None
        return replace(row, measurement=replace(row.measurement, series={"peak_bytes": peaks}))

    changes = compare_rows([sweep(10, 20)], [sweep(10, 25)], Tolerances(seconds=None))

    assert [change.figure for change in changes if change.is_worse] == ["peak bytes at 1"]


def test_the_command_exits_with_one_where_something_is_worse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    old.write_text(row_of("eager").to_json() + "\n")
    new.write_text(row_of("eager", peak_mib=9, seconds=9).to_json() + "\n")

    assert main(["compare", str(old), str(old)]) == 0
    assert main(["compare", str(old), str(new)]) == 1
    assert main(["compare", "--bytes-only", "--bytes-tolerance", "0.2", str(old), str(new)]) == 0
    assert "WORSE" in capsys.readouterr().out
