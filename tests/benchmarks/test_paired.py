"""Peers in turn: ratios come from steps of one round."""

import json

import pytest

from benchmarks import paired


def test_a_line_holds_every_step_and_the_ratios_to_the_first_peer(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    options = ["--suite", "memory", "--quick", "--peers", "eager", "--rounds", "3"]
    assert paired.main(options) == 0
    line = json.loads(capsys.readouterr().out)
    assert len(line["seconds"]["eager"]) == 3 and min(line["seconds"]["eager"]) > 0
    assert line["median_ratio_to_eager"] == {"eager": 1.0}
    assert line["median_seconds"]["eager"] == sorted(line["seconds"]["eager"])[1]
