"""README agrees with the committed rows; the report is one page with everything in it."""

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.readme import BLOCKS, PAGES, ROOT, filled
from benchmarks.records import UNAVAILABLE, Row
from tests.benchmarks.rows import EAGER, row_of


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_what_the_committed_rows_say(name: str) -> None:
    text = (ROOT / name).read_text()

    assert filled(text) == text, "run: python -m benchmarks readme"


def test_every_table_stands_in_the_documentation() -> None:
    text = "".join((ROOT / name).read_text() for name in PAGES)

    assert all(f"<!-- benchmarks: {name} -->" in text for name in BLOCKS)


def test_a_changed_figure_in_readme_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    (tmp_path / "README.md").write_text(text.replace("| **memfine** | 0", "| **memfine** | 1", 1))
    monkeypatch.setattr("benchmarks.__main__.ROOT", tmp_path)
    monkeypatch.setattr("benchmarks.__main__.PAGES", ("README.md",))

    assert main(["readme", "--check"]) == 1
    assert main(["readme"]) == 0
    assert main(["readme", "--check"]) == 0


def test_the_report_holds_tables_figures_and_failures(tmp_path: Path) -> None:
    rows = [
        row_of("eager"),
        row_of("memfine", peak_mib=1, seconds=0.1),
        Row(EAGER.__class__(**{**vars(EAGER), "peer": "liger-tiled"}), 0, error=UNAVAILABLE + "triton not installed"),
    ]
    file, page = tmp_path / "rows.jsonl", tmp_path / "page.html"
    file.write_text("\n".join(row.to_json() for row in rows))

    assert main(["report", str(file), "--out", str(page)]) == 0

    text = page.read_text()
    assert '<td>memfine</td><td class="number">1.0</td>' in text
    assert "liger-tiled: unavailable: triton not installed" in text
    assert text.count("<svg") == 3  # Pareto, bars, memory over the step
    assert "http" not in text  # nothing is loaded from elsewhere
