"""`memfine plan cluster` from the shell."""

import json
from pathlib import Path

import pytest

from memfine_fx.cli import main

FIXED = "plan cluster --model qwen3_30b_a3b --gpus 16 --tp 1 --pp 2 --ep 8 --global-batch 64".split()


def test_fixed_strategy_is_evaluated_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FIXED) == 0
    text = capsys.readouterr().out
    assert "TP1 PP2 EP8 DP8" in text and "tokens/s/GPU" in text
    assert "Pareto" not in text


def test_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FIXED, "--json"]) == 0
    loaded = json.loads(capsys.readouterr().out)
    assert loaded["strategy"]["pp"] == 2
    assert sum(loaded["terms_s"].values()) == pytest.approx(loaded["seconds_per_step_under_routing"])


def test_free_sizes_are_searched_and_the_page_has_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "plan.html"
    assert main(["plan", "cluster", "--model", "llama3_8b", "--gpus", "8", "--html", str(page)]) == 0
    assert "Pareto front" in capsys.readouterr().out
    assert page.read_text().count("<svg") == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model llama3_8b --gpus 8 --system Q1", "unknown system 'Q1'; known: A100-80GB, H100"),
        ("--model nope --gpus 8", "unknown model 'nope'; built in"),
        ("--model llama3_8b --gpus 8 --tp 3", "tp=3 does not divide the attention heads (32); nearest valid: tp=2"),
        ("--model llama3_8b", "needs --model and --gpus"),
        ("--model llama3_8b --gpus 8 --percentile 0", "must be in (0, 100]"),
        ("--runs nowhere.json", "cannot read the runs file nowhere.json"),
    ],
)
def test_bad_input_is_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "cluster", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
