"""`memfine plan PLANNER`: the table of planners, and the spelling of before."""

import argparse
from importlib import import_module

import pytest

from memfine_fx.cli import main
from memfine_fx.planning.command import FORMER_NAMES, PLANNERS

RUN = "--model llama3_8b --gpus 8 --tp 1 --pp 1 --cost base".split()


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_of_the_table_adds_a_parser_of_its_name(name: str) -> None:
    module = import_module(PLANNERS[name].module)
    parser = module.add_parser(argparse.ArgumentParser(prog="memfine plan").add_subparsers())
    assert parser.prog == f"memfine plan {name}"
    assert callable(module.run)


@pytest.mark.parametrize("former", FORMER_NAMES)
def test_former_name_still_runs_and_says_what_it_is_called_now(former: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", FORMER_NAMES[former], *RUN]) == 0
    today = capsys.readouterr()
    assert main(["plan", former, *RUN]) == 0
    printed = capsys.readouterr()
    assert printed.out == today.out
    assert today.err == ""
    assert printed.err == f"memfine: plan {former} is called plan {FORMER_NAMES[former]} now\n"


def test_help_of_the_layer_planner_names_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    assert all(f"memfine plan {name}" in " ".join(text.split()) for name in PLANNERS)


def test_former_module_warns_and_holds_what_the_new_one_does() -> None:
    with pytest.warns(DeprecationWarning, match="memfine_fx.cluster is memfine_fx.planning.training now"):
        former = import_module("memfine_fx.cluster")
    today = import_module("memfine_fx.planning.training")
    assert {name: getattr(former, name) for name in former.__all__} == {
        name: getattr(today, name) for name in today.__all__
    }
