"""Measurements: one command for all, and what each says on small sizes."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measures
from benchmarks.__main__ import main
from benchmarks.measures import Dtype, _add_option, decision, knee, paired


@pytest.mark.parametrize("name", measures.questions())
def test_every_measurement_asks_a_question_and_lists_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert measures.questions()[name].removesuffix(" On paper.").endswith("?")
    with pytest.raises(SystemExit, match="0"):
        main(["measure", name, "--help"])
    assert measures.questions()[name] in capsys.readouterr().out


@pytest.mark.parametrize("kind", [Dtype, Dtype | None])
def test_an_option_of_a_few_words_takes_these_alone(kind: Any) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    _add_option(parser, "dtype", kind, None)
    assert parser.parse_args(["--dtype", "bfloat16"]).dtype == "bfloat16" and parser.parse_args([]).dtype is None
    with pytest.raises(argparse.ArgumentError):
        parser.parse_args(["--dtype", "float16"])


def test_a_knee_has_a_time_for_every_chunk_size_of_its_tokens_and_its_row_is_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measures, "RESULTS", tmp_path)
    options = ["--tokens", "64", "--hidden", "16", "--vocab", "64", "--dtype", "bfloat16", "--rounds", "2", "--keep"]
    assert main(["measure", "head_knee", *options]) == 0
    row = json.loads((tmp_path / "head_knee.jsonl").read_text())
    assert row["rows"] == [32, 64] and min(row["median_seconds"]) > 0  # none larger than all tokens
    assert (row["tokens"], row["dtype"]) == (64, "bfloat16")
    assert capsys.readouterr().out.count("median ") == 2


@pytest.mark.slow
def test_a_layer_s_knee_has_a_time_for_every_chunk_size() -> None:
    row = knee.measure(tokens=64, hidden=16, width=16, experts=4, top_k=2, rounds=1).row
    assert row is not None and len(row["median_seconds"]) == len(knee.ROWS)


@pytest.mark.slow
def test_a_decision_takes_some_of_a_step_in_every_mode() -> None:
    row = decision.measure(tokens=96, hidden=16, width=16, experts=4, top_k=2, steps=2).row
    assert row is not None and len(row["shares"]) == 2 * len(decision.MODES)
    assert all(0 < share < 1 for share in row["shares"].values())


def test_time_within_watched_calls_counts_once() -> None:
    class Owner:
        def outer(self) -> None:
            self.inner()

        def inner(self) -> None:
            sum(range(10_000))

    clock = decision.Clock()
    with clock.watching(Owner, "outer"), clock.watching(Owner, "inner"):
        Owner().outer()
    once = clock.seconds
    Owner().inner()
    assert 0 < once == clock.seconds


def test_a_row_of_peers_in_turn_holds_every_step_and_the_ratios_to_the_first_peer() -> None:
    pytest.importorskip("transformers")
    row = paired.measure(suite="memory", peers="eager", quick=True, rounds=3, sizes="sequence=512,top_k=1").row
    assert row is not None and row["sizes"] == "T=512 H=64 F=128 E=8 K=1"
    assert len(row["seconds"]["eager"]) == 3 and min(row["seconds"]["eager"]) > 0
    assert row["median_ratio_to_eager"] == {"eager": 1.0}
    assert row["median_seconds"]["eager"] == sorted(row["seconds"]["eager"])[1]
