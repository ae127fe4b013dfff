"""Factors around a plan: how they are read, what changes, what the local search finds, where bottlenecks take over."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from memfine_fx.cli import main
from memfine_fx.errors import ConfigError
from memfine_planner.costs.model_configs import architecture
from memfine_planner.hardware.systems import system
from memfine_planner.training.faults import FaultModel
from memfine_planner.training.routing import Routing
from memfine_planner.training.search import quick_best
from memfine_planner.training.sweep import changed, parse_factor, study, sweep
from memfine_planner.training.sweep_report import study_text
from memfine_planner.training.tuner import Request, tune

DENSE = Request(
    architecture("llama3_8b"), system("H100"), 64, 512, 4096, "BF16", Routing("balanced"), FaultModel(spares=4)
)
MOE = replace(DENSE, arch=architecture("qwen3_30b_a3b"), routing=Routing("table"))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("gpus=64:1024", (64, 128, 256, 512, 1024)),
        ("seq=4096:65536:3", (4096, 16384, 65536)),
        ("ep=8,1,64", (1, 8, 64)),
        ("bandwidth=12.5:100", (12.5, 25, 50, 100)),
        ("chunks=4", (4,)),
    ],
)
def test_factor_is_read_as_its_values(text: str, values: tuple[float, ...]) -> None:
    assert parse_factor(text)[1] == pytest.approx(values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=1:2", "unknown factor 'speed'; known: gpus, seq"),
        ("gpus=lots", "expected gpus=LOW:HIGH"),
        ("gpus=1.5,2", "values of gpus are positive integers"),
        ("mtbf=0:5", "values of mtbf are positive numbers"),
        ("ep=64:1", "low before high"),
        ("ep=1:2:3:4", "low before high"),
        ("bandwidth=1:2:2.5", "low before high"),
    ],
)
def test_bad_factor_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_factor(text)


def test_changed_request_keeps_what_the_factor_does_not_say() -> None:
    more = changed(DENSE, "gpus", 256)
    assert (more.gpus, more.global_batch, more.faults.spares) == (256, 2048, 16)
    longer = changed(DENSE, "seq", 16384)
    assert longer.seq * longer.global_batch == DENSE.seq * DENSE.global_batch
    assert changed(DENSE, "bandwidth", 100).system.network_gb_per_s == 100
    assert changed(DENSE, "flops", 2).system.tflops["BF16"] == 2 * DENSE.system.tflops["BF16"]
    assert 1 / changed(DENSE, "mtbf", 9000).faults.rate_per_gpu_hour == pytest.approx(9000)
    assert changed(changed(MOE, "ep", 8), "ep", 16).fixed == (("ep", 16),)


_SEARCHED = [
    pytest.param(DENSE, id="dense"),
    pytest.param(replace(DENSE, arch=architecture("llama3_70b")), id="70B"),
    pytest.param(MOE, id="MoE", marks=pytest.mark.slow),
    pytest.param(replace(MOE, routing=Routing("balanced")), id="balanced MoE", marks=pytest.mark.slow),
    pytest.param(
        changed(replace(MOE, arch=architecture("deepseek_v3"), gpus=1024, global_batch=8192), "bandwidth", 25.0),
        id="slow network",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("request_", _SEARCHED)
def test_local_search_comes_within_three_per_cent_of_the_full_one(request_: Request) -> None:
    found = quick_best(request_)
    assert found is not None
    assert found.useful_tokens_per_s >= 0.97 * tune(request_).best.useful_tokens_per_s


def test_search_says_when_nothing_fits() -> None:
    assert quick_best(replace(DENSE, arch=architecture("llama3_405b"), gpus=8, global_batch=64)) is None


def test_fixed_chunks_are_kept_by_the_search() -> None:
    for chunks in (1, 4):
        found = quick_best(changed(replace(MOE, fixed=(("recompute", "experts"), ("ep", 8))), "chunks", chunks))
        assert found is not None
        assert (found.strategy.chunks, found.strategy.rows_per_round) == (chunks, 0)


def test_factors_move_the_speed_the_way_they_must() -> None:
    swept = sweep(DENSE, [("bandwidth", (5.0, 50.0)), ("mtbf", (50.0, 50_000.0)), ("gpus", (64.0,))])
    for factor in swept[:2]:
        slow, fast = (point.speed for point in factor.points)
        assert slow < fast
        assert factor.gain[0] == pytest.approx(slow / factor.base.speed)
    same = swept[2]
    assert same.points[0].speed == pytest.approx(same.base.speed)
    for point in swept[0].points:
        assert sum(share for _, share in point.shares) == pytest.approx(1)


def test_bottleneck_is_named_where_it_takes_over() -> None:
    (swept,) = sweep(DENSE, [("mtbf", (50.0, 500.0, 50_000.0))])
    assert swept.takeovers[0] == (50.0, "failures")
    assert swept.takeovers[-1][1] != "failures"


def test_elasticities_are_of_the_right_sign_and_size() -> None:
    found = {entry.factor: entry.value for entry in study(DENSE, [("gpus", (64.0,))]).elasticities}
    assert 0.5 < found["flops"] <= 1
    assert found["restart time"] < 0 < found["mtbf"] < 0.1
    assert abs(sum(found[name] for name in ("flops", "hbm", "nvlink", "bandwidth")) - 1) < 0.15
    assert "memory" not in found


def test_study_takes_seconds() -> None:
    start = time.process_time()
    study(DENSE, [parse_factor(text) for text in ("gpus=64:4096", "seq=4096:32768", "bandwidth=12.5:100", "tp=1:8")])
    assert time.process_time() - start < 20


def test_where_nothing_fits_the_table_says_so() -> None:
    text = study_text(study(replace(DENSE, arch=architecture("llama3_70b")), [("gpus", (1.0, 64.0))]))
    assert "no strategy that is valid fits" in text and "largest loss" in text


PLAN = "plan training --model llama3_8b --gpus 64 --tp 2 --pp 1 --recompute selective".split()


def test_command_prints_writes_and_draws_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    sweeps = ["--sweep", "gpus=64,128", "mtbf=5000:20000", "--html", str(page)]
    assert main([*PLAN, *sweeps]) == 0
    text = capsys.readouterr().out
    assert "gpus (GPUs)" in text and "elasticities" in text
    written = page.read_text()
    for title in (
        "How far each factor moves the speed",
        "Elasticities",
        "Speed over gpus",
        "Where time goes over mtbf",
    ):
        assert f"<h3>{title}</h3><svg" in written
    assert main([*PLAN, "--sweep", "gpus=64,128", "--json"]) == 0
    study_ = json.loads(capsys.readouterr().out)["study"]
    assert [point["value"] for point in study_["sweeps"][0]["points"]] == [64, 128]
