"""The demo's pieces on made-up results, and the whole of it at small sizes."""

import json
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path

import pytest

from memfine_fx.demo import runner
from memfine_fx.demo.runner import memory_chart, stretch_time
from memfine_fx.demo.training import MODES, DemoSizes, ModeResult

MIB = 2**20


def made_up_result(mode: str, peak_mib: int = 8) -> ModeResult:
    return ModeResult(
        mode=mode,
        losses=(5.5, 4.0, 3.5),
        step_seconds=(30.0, 1.0, 2.0),
        peak_bytes=peak_mib * MIB,
        resting_bytes=0,
        times_us=(0.0, 10.0, 30.0, 50.0),
        live_bytes=(MIB, peak_mib * MIB, 2 * MIB, 0),
        backward_begins_us=10.0,
    )


def test_a_result_survives_json() -> None:
    result = made_up_result("compile")

    assert ModeResult.from_json(json.dumps(asdict(result))) == result


def test_the_first_step_counts_as_compile_time_only() -> None:
    result = made_up_result("compile")

    assert result.median_step_seconds == 1.5
    assert result.compile_seconds == 28.5


def test_forward_and_backward_are_stretched_to_the_same_width() -> None:
    assert stretch_time(made_up_result("memfine")) == [0.0, 1.0, 1.5, 2.0]


def test_the_chart_names_every_way_with_its_peak() -> None:
    drawn = memory_chart([made_up_result(mode, peak) for mode, peak in zip(MODES, (8, 4, 2), strict=True)]).svg()

    assert "torch.compile: peak 8 MiB" in drawn and "memfine_fx.optimize: peak 2 MiB" in drawn
    assert "optimizer state, MiB" in drawn and "backward begins" in drawn


def test_the_largest_difference_is_relative_to_the_first_mode() -> None:
    results = [made_up_result("compile"), replace(made_up_result("memfine"), losses=(5.5, 4.0, 3.57))]

    assert runner.largest_relative_difference(results) == pytest.approx(0.02)


def test_the_table_has_a_column_per_mode_and_a_row_per_step() -> None:
    lines = runner.format_table([made_up_result("compile"), made_up_result("memfine", 2)]).splitlines()

    assert lines[0].split() == ["compile", "memfine"]
    assert lines[2].split() == ["peak", "activations", "(MiB)", "8.0", "2.0"]
    assert lines[-1].split() == ["loss,", "step", "3", "3.500000", "3.500000"]


def test_the_text_is_plain_ascii_of_some_kilobytes() -> None:
    text = files("memfine_fx.demo").joinpath("text.txt").read_bytes()

    assert 8_000 < len(text) < 12_000
    assert max(text) < 128


@pytest.mark.parametrize(("memfine_loss", "status", "verdict"), [(3.5, 0, "PASS"), (3.6, 1, "FAIL")])
def test_the_verdict_follows_the_losses(
    memfine_loss: float,
    status: int,
    verdict: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")

    def train(mode: str, sizes: DemoSizes, steps: int, scratch: Path) -> ModeResult:
        last = memfine_loss if mode == "memfine" else 3.5
        return replace(made_up_result(mode), losses=(5.5, 4.0, last))

    monkeypatch.setattr(runner, "_train_one_mode", train)

    assert runner.run_demo(steps=3, out=str(tmp_path)) == status

    assert f"{verdict}: losses differ by at most" in capsys.readouterr().out
    assert json.loads((tmp_path / "memfine_demo.json").read_text())["verdict"] == verdict
    assert (tmp_path / "memfine_demo.svg").exists()


def test_a_mode_that_fails_is_shown_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")

    def train(mode: str, sizes: DemoSizes, steps: int, scratch: Path) -> ModeResult:
        if mode == "memfine":
            raise runner.DemoFailed("mode 'memfine' ended with exit status 1:\nout of luck")
        return made_up_result(mode)

    monkeypatch.setattr(runner, "_train_one_mode", train)

    assert runner.run_demo(steps=3, out=str(tmp_path)) == 1

    said = capsys.readouterr()
    assert "out of luck" in said.err
    assert "FAIL: not every mode finished" in said.out


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "find_spec", lambda name: None)

    assert runner.run_demo() == 2

    assert "pip install 'memfine-fx[hf]'" in capsys.readouterr().err


def test_one_step_is_refused_because_it_only_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.run_demo(steps=1) == 2
    assert "steps is 1" in capsys.readouterr().err


@pytest.mark.slow
def test_the_quick_demo_passes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    assert runner.run_demo(steps=3, out=str(tmp_path), quick=True) == 0

    document = json.loads((tmp_path / "memfine_demo.json").read_text())
    assert [mode["mode"] for mode in document["modes"]] == list(MODES)
    assert all(mode["peak_bytes"] > 0 for mode in document["modes"])
