"""`memfine plan NAME`: planners that entry points name, from the command line of the compiler."""

import argparse
from importlib.metadata import entry_points

import pytest

from memfine_fx import cli, flags

PLANNERS = {entry.name: entry for entry in entry_points(group="memfine_fx.planners")}


def test_the_command_line_names_the_planners_of_the_package() -> None:
    assert PLANNERS.keys() == flags.PLANNERS.keys()


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_adds_a_parser_of_its_name(name: str) -> None:
    module = PLANNERS[name].load()
    parser = module.add_parser(argparse.ArgumentParser(prog="memfine plan").add_subparsers())
    assert parser.prog == f"memfine plan {name}"
    assert callable(module.run)


@pytest.mark.parametrize("name", PLANNERS)
def test_every_flag_of_a_planner_has_a_default_and_an_example(name: str) -> None:
    parser = PLANNERS[name].load().add_parser(argparse.ArgumentParser(prog="memfine plan").add_subparsers())
    for action in parser._actions:
        if action.dest != "help":
            wanted = (
                ["e.g. --"] if action.required else ["(default: "] if action.nargs == 0 else ["(default: ", "e.g. --"]
            )
            assert all(word in (action.help or "") for word in wanted), action.option_strings
    assert "default: None" not in parser.format_help()


def test_a_planner_runs_and_its_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "plan training --model llama3_8b --gpus 8 --tp 1 --pp 1 --cost base".split()
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out
    arguments[3] = "unknown"
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.startswith("memfine: ")


def test_help_of_the_layer_planner_names_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    text = capsys.readouterr().out
    assert all(f"memfine plan {name}" in " ".join(text.split()) for name in PLANNERS)


def test_a_planner_that_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda **_: ())
    assert cli.main(["plan", "serving"]) == 2
    assert capsys.readouterr().err == (
        "memfine: plan serving needs the package memfine-planner (in a checkout: pip install ./planner)\n"
    )
