"""The table of formats: made from its rows, every format with a cell in every family, and one cell as it is today."""

from __future__ import annotations

import re

import pytest

from benchmarks.formats import FAMILIES, FORMATS, LIST, LISTED, PAGE, check, page_of, stored


def test_the_page_is_made_from_the_rows() -> None:
    written, made = PAGE.read_text(encoding="utf-8"), page_of(stored())
    first = re.compile(r"Written by .*?; toy")
    assert first.sub("", written) == first.sub("", made)


def test_rows_are_of_known_formats_and_exact() -> None:
    for cell in stored():
        assert cell.family in FAMILIES if cell.format in FORMATS else cell.format in LISTED and cell.family == LIST
        assert cell.error < 1e-5 and bool(cell.why) == (cell.state != "local")
        assert cell.bf16 is None or cell.bf16 < 1.25


@pytest.mark.filterwarnings("ignore")
def test_bytes_with_a_scale_a_row_are_local_in_qwen3() -> None:
    cell = check("int8, a scale a row", "qwen3_moe", in_bf16=False)
    assert cell.state == "local" and cell.error < 1e-5, cell
