"""`memfine plan PLANNER`: the table of planners."""

import argparse
from importlib import import_module

import pytest

from memfine_fx.cli import main
from memfine_fx.planning.command import PLANNERS


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_of_the_table_adds_a_parser_of_its_name(name: str) -> None:
    module = import_module(PLANNERS[name].module)
    parser = module.add_parser(argparse.ArgumentParser(prog="memfine plan").add_subparsers())
    assert parser.prog == f"memfine plan {name}"
    assert callable(module.run)


def test_help_of_the_layer_planner_names_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    assert all(f"memfine plan {name}" in " ".join(text.split()) for name in PLANNERS)
