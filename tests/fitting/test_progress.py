"""The command `memfine fit`: what it writes while it works, and how it names options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memfine_fx.cli import main
from memfine_fx.fitting.analysis import StepTotal
from memfine_fx.fitting.report import FitReport
from memfine_fx.fitting.setup import Setup
from tests.fitting.test_fit import config_of


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--max-length", "0"], "argument --seq/--max-length: '0' must be a positive int"),
        (["--batch", "-1"], "argument --batch/--per-device-train-batch-size: '-1' must be a positive int"),
    ],
)
def test_a_wrong_option_is_named_as_it_was_written(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as status:
        main(["fit", "qwen3_moe", *given])
    assert status.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--memory", "eightyGB"], "memfine: --memory 'eightyGB' is not understood; expected bytes, such as 80GiB"),
        (["--memory", "0.5"], "memfine: --memory '0.5' is not understood"),
        (["--memory", "least"], "memfine: --memory 'least' is not understood"),
        (["--budget", "much"], "memfine: --budget 'much' is not understood"),
    ],
)
def test_bytes_that_are_none_are_named_as_they_were_written(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "qwen3_moe", "--quiet", *given]) == 2
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.campaign
def test_stages_go_to_stderr_and_nothing_of_other_packages(tmp_path: Path) -> None:
    config_of(num_hidden_layers=1).save_pretrained(tmp_path)
    environment = dict(os.environ, MEMFINE_CACHE=str(tmp_path / "cache"), MEMFINE_QUIET="0")
    environment.pop("KINETO_LOG_LEVEL", None)
    command = [sys.executable, "-m", "memfine_fx.cli", "fit", str(tmp_path), "--seq", "64", "--device", "cpu"]
    shown, quiet = (
        subprocess.run([*command, *more], capture_output=True, text=True, check=True, timeout=600, env=environment)
        for more in ([], ["--json"])
    )
    assert all(line.startswith("[") and " s] " in line for line in shown.stderr.splitlines()), shown.stderr
    stages_in_order = ["loading torch", "model built", "recording a step", "graph captured", "searching"]
    places = [shown.stderr.index(stage) for stage in stages_in_order]
    assert places == sorted(places)
    assert "smallest budget" in shown.stdout
    assert quiet.stderr == "" and json.loads(quiet.stdout)["least"]


@pytest.mark.parametrize(
    ("memory", "least", "most", "budget"),
    [
        (None, (5 << 20) + 1, (5 << 20) + 1, '"6MiB"'),
        (None, 5 << 20, 7 << 20, '"7MiB"'),
        ((6 << 20) + 9, 5 << 20, 9 << 20, '"6MiB"'),
        ((6 << 20) + 9, (6 << 20) + 3, 9 << 20, str((6 << 20) + 9)),
    ],
)
def test_the_line_to_paste_is_never_below_the_smallest_budget(
    memory: int | None, least: int, most: int, budget: str
) -> None:
    smallest, largest = (StepTotal("backward", (("gradients", num_bytes),)) for num_bytes in (least, most))
    report = FitReport("model", Setup(), memory, None, smallest, largest, 1, 1, (), (), (), "", "")
    assert report.line == f"memfine_fx.optimize(model, memory_budget={budget}, dynamic=True)"
