"""The figures of planner/docs/training.md and the table, on a model small enough for a test."""

import pytest

from benchmarks.cluster_figures import Question, answered, asked, table, takeovers
from memfine_planner.training.sweep import Study

SMALL = Question("llama3_8b", 8, "BF16", ("gpus=8:16", "mtbf=100,20000"))


@pytest.fixture(scope="module")
def found() -> Study:
    return answered(SMALL)


def test_question_is_what_the_command_would_ask() -> None:
    request = asked(SMALL)
    assert (request.global_batch, request.seq, request.routing.kind, request.faults.spares) == (64, 4096, "balanced", 1)


def test_table_has_a_row_a_factor_and_a_column_a_model(found: Study) -> None:
    lines = table([(SMALL, found), (SMALL, found)]).splitlines()
    assert lines[0] == "| factor | llama3_8b, 8 GPUs | llama3_8b, 8 GPUs |"
    speeds = {line.split(" | ")[0].strip("| "): line.split(" | ")[1] for line in lines[2:]}
    assert speeds["mtbf"].endswith("1.00 (100 to 20,000)")
    assert float(speeds["elasticity of flops"]) > 0.5


def test_losses_are_named_where_they_take_over(found: Study) -> None:
    assert "mtbf (h between interruptions of a GPU): failures from 100; " in takeovers(SMALL, found)
