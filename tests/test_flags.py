"""Flags of `memfine`: each says its default and an example, and errors name it as it was typed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from memfine_fx.cli import main
from memfine_fx.flags import as_typed, parser_of


def _subparsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    names = ("demo", "explain", "fit", "verify", "plan")
    yield from _subparsers(parser_of(dict.fromkeys(names, lambda options: 0), "0"))


def _flags_without(words: tuple[str, ...], parser: argparse.ArgumentParser) -> list[str]:
    flags = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    assert flags
    return [
        action.option_strings[0]
        for action in flags
        if any(word not in (action.help or "") for word in words[: 1 if action.nargs == 0 else None])
    ]


@pytest.mark.parametrize(("name", "parser"), list(_commands()))
def test_every_flag_has_a_default_and_an_example(name: str, parser: argparse.ArgumentParser) -> None:
    assert _flags_without(("(default: ", "e.g. --"), parser) == []
    assert "None" not in parser.format_help()


def test_help_shows_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "tokens of each sequence (default: 4096; e.g. --seq 8192)" in shown
    assert "(default: bf16; e.g. --dtype fp32)" in shown and "(default: off)" in shown


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["fit", "qwen3_moe", "--memory", "80GiB", "--gpu", "h100"], "--memory 80GiB and --gpu h100: give one of them"),
        (["fit", "qwen3_moe", "--gpu", "abacus"], "--gpu abacus is unknown; known: t4"),
        (["explain", "hf:qwen3_moe", "--budget", "eightyGB"], "--budget 'eightyGB' is not understood"),
        (["plan", "--budget", "eightyGB"], "--budget 'eightyGB' is not understood"),
        (["plan", "--experts", "4", "--top-k", "8"], "--top-k 8 exceeds --experts 4"),
        (["plan", "--budget", "1MB"], "--budget 1MB (977 KiB) cannot be met: the smallest budget that fits is"),
    ],
)
def test_errors_name_flags_as_they_were_typed(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*given, "--quiet"]) == 2
    assert (shown := capsys.readouterr().err).startswith(f"memfine: {said}")
    assert "memory_budget" not in shown


def test_the_budget_that_plan_names_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "--tokens", "512", "--quiet", "--budget"]
    assert main([*given, "1MB"]) == 2
    typed = capsys.readouterr().err.partition('Raise --budget to "')[2].partition('"')[0]
    assert typed.endswith("iB") and main([*given, typed]) == 0


def test_a_bad_field_of_a_config_is_named_as_it_stands_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"axis": "columns"}', encoding="utf-8")
    assert main(["explain", "hf:qwen3_moe", "--config", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"memfine: --config {file}: axis='columns' is unknown; expected one of")


def test_the_environment_is_named_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMFINE_OPTIONS", "axis=columns")
    assert main(["verify", "hf:qwen3_moe"]) == 2
    assert capsys.readouterr().err.startswith("memfine: MEMFINE_OPTIONS='axis=columns': axis='columns' is unknown")


def test_what_no_flag_gave_keeps_its_name() -> None:
    options = argparse.Namespace(budget=None, seq=4, checkpointing=True)
    for message, typed in (
        ("memory_budget='x' is unknown", "memory_budget='x' is unknown"),
        ("max_seq=4 and seq=4: no", "max_seq=4 and --seq 4: no"),
        ("checkpointing=True: X offers none", "--checkpointing: X offers none"),
    ):
        assert as_typed(message, options) == typed
