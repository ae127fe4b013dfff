"""The command `memfine fit`: what it writes while it works, and how it names options."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from memfine_fx.cli import main
from memfine_fx.fitting.analysis import StepTotal
from memfine_fx.fitting.progress import shown_stages, silenced_packages, stages
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


def test_help_shows_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for said in ("tokens of each sequence (default: 4096)", "of parameters (default: bf16)", "(default: cuda)"):
        assert said in shown
    assert "(default: None)" not in shown and "(default: False)" not in shown


def test_the_first_line_comes_before_torch(tmp_path: Path) -> None:
    source = """
import sys
from memfine_fx.cli import main
class Watched:
    def write(self, text):
        if "loading torch" in text:
            print(sorted({"torch", "transformers", "sympy"} & set(sys.modules)))
    def flush(self):
        pass
sys.stderr = Watched()
main(["fit", sys.argv[1], "--memory", "80GiB"])
"""
    command = [sys.executable, "-c", source, str(tmp_path / "no.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines()[0] == "[]"


@pytest.mark.campaign
def test_stages_go_to_stderr_and_nothing_of_other_packages(tmp_path: Path) -> None:
    config_of(num_hidden_layers=1).save_pretrained(tmp_path)
    environment = dict(os.environ, MEMFINE_CACHE=str(tmp_path / "cache"))
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


def test_stages_are_logged_and_only_shown_where_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    stages.info("not shown")
    with shown_stages():
        stages.info("shown %d", 1)
    stages.info("not shown")
    assert "not" not in (shown := capsys.readouterr().err) and shown.endswith(" s] shown 1\n")
    assert not stages.handlers


def test_other_packages_are_silent_and_ours_are_not() -> None:
    pytest.importorskip("transformers")
    level, before = logging.getLogger("transformers").level, dict(os.environ)
    with warnings.catch_warnings(record=True) as caught, silenced_packages():
        warnings.warn("of another package", UserWarning, stacklevel=1)
        warnings.warn("memfine_fx found nothing to chunk", UserWarning, stacklevel=1)
        assert not logging.getLogger("transformers.models").isEnabledFor(logging.WARNING)
        assert logging.getLogger("torch").isEnabledFor(logging.ERROR)
    assert [str(warning.message) for warning in caught] == ["memfine_fx found nothing to chunk"]
    assert logging.getLogger("transformers").level == level and dict(os.environ) == before


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
    assert report.line == f"memfine_fx.optimize(model, memory_budget={budget})"
