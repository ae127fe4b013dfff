"""The cluster suite prints itself and writes JSON."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main


def test_cluster_suite_prints_every_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.json"
    assert main(["run", "--suite", "cluster", "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert "runs outside the fit" in text and "faults: 16384 GPUs" in text
    assert "one history by another" in text
    written = json.loads(path.read_text())
    assert len(written["fitted"]) == 22
    assert {row["fitted"] for row in written["histories"] if row["within"]} == {"llama3", "b200_504"}
