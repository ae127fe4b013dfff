"""What is said on stderr while something takes long: when, by whom, and how it is silenced."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import memfine_fx
from memfine_fx import progress
from memfine_fx.cli import main
from memfine_fx.errors import ConfigError
from memfine_fx.progress import shown_stages, silenced_packages, stage, stages, working
from tests.test_cli import FACTORY


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def speaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speak in a test too, and at once."""
    monkeypatch.setenv("MEMFINE_QUIET", "0")
    monkeypatch.setattr(progress, "_PATIENCE", 0.01)


def made() -> tuple[torch.nn.Module, torch.Tensor]:
    scope: dict[str, Any] = {}
    exec(FACTORY, scope)
    layer, inputs = scope["make"]()
    return layer, inputs


def slow() -> None:
    threading.Event().wait(0.2)


@pytest.mark.usefixtures("speaking")
def test_the_first_call_says_what_it_compiles_and_how_long_that_took(capsys: pytest.CaptureFixture[str]) -> None:
    layer, inputs = made()
    model = torch.nn.Sequential(layer)
    optimized = memfine_fx.optimize(model, inner_backend="aot_eager")
    assert capsys.readouterr().err == ""
    optimized(inputs)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "memfine_fx: compiling 1 MoE layer (Sequential); later steps reuse it"
    assert last.startswith("memfine_fx: compiled in ") and last.endswith(" s: 1 of 1 MoE layers chunked")
    optimized(inputs)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("speaking")
def test_a_model_compiled_by_the_backends_name_says_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    layer, inputs = made()
    torch.compile(layer, backend="memfine", options={"inner_backend": "aot_eager", "rows_per_chunk": 7})(inputs)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "memfine_fx: compiling 1 MoE layer (MixtralMoE); later steps reuse it"
    assert said[-1].endswith(" s: 1 of 1 MoE layers chunked")


@pytest.mark.parametrize(("what", "done"), [("explain", "explained"), ("verify", "verified")])
@pytest.mark.usefixtures("speaking")
def test_explain_and_verify_say_what_they_do(what: str, done: str, capsys: pytest.CaptureFixture[str]) -> None:
    layer, inputs = made()
    config = memfine_fx.Config(inner_backend="eager")
    getattr(memfine_fx, what)(layer, inputs, config=config)
    first, last = capsys.readouterr().err.splitlines()
    assert "ing MixtralMoE: " in first and last.startswith(f"memfine_fx: {done} in ")


@pytest.mark.usefixtures("speaking")
def test_what_is_done_within_a_second_is_not_spoken_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 1.0)
    with working("compiling", "compiled"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("speaking")
def test_a_work_within_another_is_a_stage_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with working("compiling", "compiled"), working("comparing", "compared"):
        threading.Event().wait(0.8)
    shown = terminal.getvalue()
    assert "\r\x1b[K  still comparing (1 s)\r" in shown and "compared" not in shown
    assert (
        shown.index("memfine_fx: compiling\n")
        < shown.index("  still comparing")
        < shown.index("memfine_fx: compiled in ")
    )
    assert shown.endswith("\r\x1b[K")


@pytest.mark.usefixtures("speaking")
def test_a_work_that_fails_leaves_the_last_word_to_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no"), working("compiling", "compiled"):
        slow()
        raise ValueError("no")
    assert capsys.readouterr().err == "memfine_fx: compiling\n"
    assert not stages.handlers and stages.propagate


@pytest.mark.parametrize(
    ("variables", "is_heard"),
    [
        ({}, False),  # pytest runs
        ({"MEMFINE_QUIET": "0"}, True),
        ({"MEMFINE_QUIET": "1"}, False),
        ({"PYTEST_CURRENT_TEST": ""}, True),
        ({"PYTEST_CURRENT_TEST": "", "RANK": "0"}, True),
        ({"PYTEST_CURRENT_TEST": "", "RANK": "3"}, False),
    ],
)
def test_other_ranks_and_tests_are_silent(
    variables: dict[str, str], is_heard: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.01)
    for name, value in variables.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with working("compiling", "compiled"):
        slow()
    assert bool(capsys.readouterr().err) == is_heard


def test_a_malformed_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFINE_QUIET", "yes")
    with pytest.raises(ConfigError, match="MEMFINE_QUIET='yes' is unknown; expected 0 or 1"):
        working("compiling", "compiled").__enter__()


@pytest.mark.usefixtures("speaking")
def test_a_program_that_logs_it_itself_does_not_see_it_twice(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "memfine_fx"), working("compiling", "compiled"):
        slow()
    first, last = (record.getMessage() for record in caplog.records)
    assert first == "compiling" and last.startswith("compiled in 0.")
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("speaking")
def test_stages_of_a_command_are_lines_with_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    stages.info("not shown")
    with shown_stages(), stage("not a line"):
        stages.info("shown %d", 1)
    stages.info("not shown")
    assert "not" not in (shown := capsys.readouterr().err) and shown.endswith(" s] shown 1\n")
    assert not stages.handlers


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("explain", []),
        ("explain", ["--json"]),
        ("verify", []),
        ("plan", []),
        ("plan", ["--json"]),
        ("plan", ["--quiet"]),
    ],
)
def test_a_command_shows_its_stages_and_nothing_of_other_packages(
    command: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFINE_QUIET", "0")
    monkeypatch.setattr(progress, "_PATIENCE", 0.01)
    (tmp_path / "model.py").write_text(f"import warnings\nwarnings.warn('noise')\n{FACTORY}", encoding="utf-8")
    given = ["--tokens", "64"] if command == "plan" else [f"{tmp_path}/model.py:make"]
    assert main([command, *given, *more]) == 0
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if not (line.startswith("[") and " s] " in line)] == []
    assert ("loading torch" in said[0]) if not more else not said


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
    environment = dict(os.environ, MEMFINE_QUIET="0")
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment)
    assert done.stdout.splitlines()[0] == "[]"


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


@pytest.mark.parametrize("passes", [True, False])
def test_a_work_is_shown_where_no_handler_writes_its_records(
    passes: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Axolotl's handler writes records of its own alone."""
    monkeypatch.setenv("MEMFINE_QUIET", "0")
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(progress.stages, "propagate", False)
    handler = logging.StreamHandler(io.StringIO())
    handler.addFilter(lambda record: passes)
    level = progress.stages.level
    progress.stages.addHandler(handler)
    progress.stages.setLevel(logging.INFO)
    try:
        with progress.working("compiling a model", "compiled"):
            time.sleep(0.2)
    finally:
        progress.stages.removeHandler(handler)
        progress.stages.setLevel(level)
    assert ("compiled in" in handler.stream.getvalue()) == passes
    assert ("compiled in" in capsys.readouterr().err) == (not passes)
