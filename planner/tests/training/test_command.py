"""`memfine plan training` from the shell."""

import json
from pathlib import Path

import pytest

from memfine_fx.cli import main
from tests.pages import read_page

FITS = "--model llama3_8b --gpus 8 --tp 1 --pp 1 --zero 3 --recompute full"
FIXED = "plan training --model qwen3_30b_a3b --gpus 16 --tp 1 --pp 2 --ep 8 --global-batch 64".split()


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
    page = tmp_path / "plan.html"
    assert main(["plan", "training", "--model", "llama3_8b", "--gpus", "8", "--html", str(page)]) == 0
    assert "Pareto front" in capsys.readouterr().out
    written = page.read_text()
    for title in ("Speed against headroom", "Where a step goes", "Memory by pipeline rank", "Where the time of a run"):
        assert f"<h3>{title}" in written
    assert written.count("<svg") == written.count("<h3>") - 2  # the two launch lines have a heading but no figure


def test_page_needs_nothing_from_elsewhere_and_fits_a_phone(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert main([*FIXED, "--html", str(page)]) == 0
    written = page.read_text()
    assert '<meta name="viewport" content="width=device-width,initial-scale=1">' in written
    text = read_page(written).text
    assert "tokens/s/GPU" in text and "GB, balanced routing" in text and "% of the wall-clock" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model llama3_8b --gpus 8 --system Q1", "unknown system 'Q1'; known: A100-80GB, H100"),
        ("--model nope --gpus 8", "unknown model 'nope'; built in"),
        ("--model llama3_8b --gpus 8 --tp 3", "tp=3 does not divide the attention heads (32); nearest valid: tp=2"),
        ("--model llama3_8b", "needs --model and --gpus"),
        ("--model llama3_8b --gpus 8 --percentile 0", "must be in (0, 100]"),
        ("--model llama3_8b --gpus 0", "gpus=0 must be a positive integer"),
        ("--model llama3_8b --gpus 8 --set colour=red", "unknown field 'colour'; known: recompute_layers"),
        ("--model llama3_8b --gpus 8 --set overlap_tp=maybe", "overlap_tp is true or false"),
        ("--model llama3_8b --gpus 8 --set attention=slow", "is none of flash, unfused; nearest valid: attention=f"),
        ("--runs nowhere.json", "cannot read the runs file nowhere.json"),
        (f"{FITS} --html /dev/null/plan.html", "cannot write the page /dev/null/plan.html: "),
        (f"{FITS} --figures /dev/null", "cannot write the figure /dev/null/where_a_step_goes.svg: "),
    ],
)
def test_bad_input_is_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "training", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["", "--quiet", "--json"])
def test_a_search_is_shown_while_it_lasts(
    flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFINE_QUIET", "0")
    assert main(f"plan training --model mixtral_8x7b --gpus 16 --micro-batch 1 {flag}".split()) == 0
    assert ("comparing strategies of mixtral_8x7b on 16 GPUs" in capsys.readouterr().err) == (not flag)


def test_strategy_that_cannot_fit_names_what_fills_it_and_the_nearest_that_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = "plan training --model llama3_70b --gpus 64 --seq 8192 --tp 4 --pp 2 --micro-batch 4"
    assert main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert "where a step goes" in printed.out
    assert "GB usable, with balanced routing (kept activations" in printed.err
    nearest = printed.err.split("nearest valid: ")[1].strip()
    changed = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in _pairs(nearest))
    assert main(f"{arguments} {changed}".split()) == 0


def _pairs(text: str) -> list[list[str]]:
    return [pair.split("=") for pair in text.split(", ")]


@pytest.mark.parametrize("layer", ["base", "optimised"])
def test_layers_of_the_cost_model_are_asked_separately(layer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FIXED, "--recompute", "selective", "--cost", layer, "--layers"]) == 0
    text = capsys.readouterr().out
    assert f"{layer}: " in text and "each term alone" in text and "failures" not in text


def test_figures_are_written_as_files(tmp_path: Path) -> None:
    assert main([*FIXED, "--set", "overlap_dp=false", "--figures", str(tmp_path / "drawn")]) == 0
    assert len(list((tmp_path / "drawn").glob("*.svg"))) == 6


def test_timeline_of_an_interleaved_pipeline_shows_whole_groups(tmp_path: Path) -> None:
    arguments = "plan training --model llama3_70b --gpus 64 --tp 1 --pp 8 --vp 5 --recompute full --figures"
    assert main([*arguments.split(), str(tmp_path)]) == 0
    assert (tmp_path / "pipeline_timeline.svg").stat().st_size > 1000


def test_plan_without_progress_or_without_failures_is_still_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    never = "plan training --model gpt_oss_120b --gpus 64 --system B200 --tp 1 --pp 1 --ep 8 --micro-batch 8"
    assert main(never.split()) == 2
    printed = capsys.readouterr()
    assert "the job fails before it can save: no progress" in printed.out and "nearest valid" in printed.err
    assert main([*FIXED, "--recompute", "full", "--failure-rate", "0", "--routing", "balanced", "--json"]) == 0
    loaded = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert loaded["faults"]["best"]["mtbf"] is None
