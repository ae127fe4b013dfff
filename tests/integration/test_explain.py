"""explain and report: every region with its place, sizes, plan or reason; text and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import memfine_fx
from memfine_fx.cli import main
from memfine_fx.demo.tiny import tiny_causal_lm
from memfine_fx.errors import MemfineError, Reason
from memfine_fx.plan import front
from memfine_fx.plan.cost import DeviceRates
from memfine_fx.records import Where


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 64, (2, 16))
    return {"input_ids": ids, "labels": ids}


def test_explain_lists_each_region_with_place_sizes_and_plan_and_leaves_the_model_uncompiled() -> None:
    model = tiny_causal_lm("qwen3_moe")
    report = memfine_fx.explain(model, **tokens())
    assert model._compiled_call_impl is None
    assert [region.status for region in report.regions] == ["chunked", "chunked"]
    first = report.regions[0]
    assert first.where.module.endswith("layers.0.mlp.experts")
    assert "moe.py:" in first.where.source
    assert first.family == "grouped"
    assert first.dims is not None
    assert (first.dims.hidden, first.dims.num_experts, first.dims.top_k, first.dims.expert_width) == (32, 4, 2, 24)
    assert first.plan is not None and first.plan.predicted_bytes > 0
    assert "T=32 H=32 E=4 K=2 F=24" in str(report)
    document = json.loads(report.to_json())
    assert document["regions"][0]["plan"]["axis"] == "rows"
    assert document["regions"][0]["where"]["module"] == first.where.module


def test_explain_measures_no_more_than_it_predicts_for_the_regions_and_the_rest() -> None:
    report = memfine_fx.explain(
        tiny_causal_lm("qwen3_moe"), measure=True, config=memfine_fx.Config(inner_backend="eager"), **tokens()
    )
    assert report.measured_bytes is not None and report.measured_bytes > 0
    assert report.regions[0].num_chunks > 0


@pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")
def test_a_loop_that_breaks_the_graph_is_explained() -> None:
    config = memfine_fx.Config(captures_loops=False)
    report = memfine_fx.explain(tiny_causal_lm("qwen3_moe", experts_implementation="eager"), config=config, **tokens())
    assert report.num_chunked == 0
    assert any("graph" in region.reason or "not raised" in region.reason for region in report.regions)


def test_the_shell_plans_a_layer_within_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "plan --tokens 4096 --hidden 256 --width 128 --experts 8 --top-k 2 --budget 20MB".split()
    assert main(arguments) == 0
    assert "predicted peak of the layer" in capsys.readouterr().out


PLAN = "plan --tokens 4096 --hidden 64 --width 32 --experts 8 --top-k 2 --dtype float32".split()


def test_the_shell_plans_as_json_with_other_rows_beside(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--rows", "512", "--sweep", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["plan"]["rows_per_chunk"] == 512
    assert shown["plan"]["predicted_bytes"] == sum(shown["terms"].values())
    rows = [point["rows"] for point in shown["sweep"]]
    peaks = [point["peak_bytes"] for point in shown["sweep"]]
    assert rows == [64, 128, 256, 512, 1024, 2048, 4096, 8192]
    assert peaks == sorted(peaks) and shown["plan"]["predicted_bytes"] in peaks
    (fixed,) = [point for point in shown["sweep"] if point["rows"] == 512]
    assert (fixed["chunks_balanced"], fixed["chunks_skewed"]) == (16, 16)


def test_the_shell_shows_and_draws_the_plans_that_none_beats(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rates = DeviceRates(((32, 1e9), (2048, 2e9)), copy_bytes=1e10, launch_seconds=1e-6)
    monkeypatch.setattr(front, "device_rates", lambda device_type, dtype: rates)
    assert main([*PLAN, "--plot", str(tmp_path / "front.svg"), "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["front"]
    assert [point["peak_bytes"] for point in points] == sorted(point["peak_bytes"] for point in points)
    seconds = [point["seconds"] for point in points]
    assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) == len(seconds)
    assert (points[0]["policy"], points[-1]["policy"]) == ("nothing", "projections")
    assert "forward and backward, s" in (tmp_path / "front.svg").read_text(encoding="utf-8")
    assert main([*PLAN, "--plot", str(tmp_path / "front.svg"), "--measured", str(tmp_path / "none.jsonl")]) == 2
    assert "holds no benchmark rows" in capsys.readouterr().err


def test_the_shell_plans_by_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--paper"]) == 0
    assert "MemFine's table" in capsys.readouterr().out


def test_the_shell_names_sizes_that_are_no_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--top-k", "9"]) == 2
    assert "--top-k 9 exceeds --experts 8" in capsys.readouterr().err


@pytest.mark.slow
def test_the_shell_draws_a_measured_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["explain", "hf:mixtral", "--plot", str(tmp_path / "step.svg")]) == 0
    assert "measured peak" in capsys.readouterr().out
    assert "chunked region, backward" in (tmp_path / "step.svg").read_text(encoding="utf-8")


def test_the_shell_names_a_bad_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "nowhere.py:make"]) == 2
    assert "neither hf:MODEL_TYPE nor" in capsys.readouterr().err


def test_the_string_backend_has_a_report_too() -> None:
    model = tiny_causal_lm("qwen3_moe")
    compiled = torch.compile(model, backend="memfine", options={"inner_backend": "eager", "rows_per_chunk": 7})
    compiled(**tokens()).loss.backward()
    report = memfine_fx.report(model)
    assert report.num_chunked == 2
    assert report.regions[0].plan is not None and report.regions[0].plan.rows_per_chunk == 7


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_hint_of_its_own(reason: Reason) -> None:
    region = memfine_fx.RegionReport("refused", Where(), "what was seen", hint=reason.hint)
    assert len(reason.hint.split()) > 3 and f"hint: {reason.hint}" in str(region)
    assert Reason.__members__[reason.name].name == reason.name, "two reasons share one hint"


def test_a_choice_without_experts_is_a_line_with_its_source() -> None:
    class Sampler(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(9, 4)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.table((hidden @ self.table.weight.t()).topk(2, dim=-1).indices).sum(1)

    report = memfine_fx.explain(Sampler(), torch.randn(3, 4))
    (region,) = report.regions
    assert region.reason == "topk: no expert matmul depends on it"
    assert "test_explain.py:" in region.where.source
    assert "hint: nothing to do" in str(report)


def test_the_shell_explains_a_transformers_model_and_draws_a_region(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["explain", "hf:qwen3_moe", "--picture", str(tmp_path / "region.svg")]) == 0
    assert "2 of 2 regions chunked" in capsys.readouterr().out
    picture = ElementTree.parse(tmp_path / "region.svg")
    boxes = [box.get("fill") for box in picture.iter("{http://www.w3.org/2000/svg}rect")]
    assert {fill for fill in boxes if boxes.count(fill) > 1} >= {"#c7b9f5", "#a9d3f5", "#f7c98b", "#aee3b5"}
    assert any("grouped_mm" in text for text in picture.getroot().itertext())


def test_a_picture_that_is_not_there_is_an_error() -> None:
    report = memfine_fx.explain(torch.nn.Linear(4, 4), torch.randn(3, 4))
    with pytest.raises(MemfineError, match="there is no picture 0: 0 regions"):
        report.picture()


@pytest.mark.parametrize("inputs", ["(torch.randn(3, 4),)", "torch.randn(3, 4)", "{'input': torch.randn(3, 4)}"])
def test_the_shell_explains_a_factory(inputs: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = f"import torch\ndef make():\n    return torch.nn.Linear(4, 4), {inputs}\n"
    (tmp_path / "made.py").write_text(source, encoding="utf-8")
    assert main(["explain", f"{tmp_path}/made.py:make"]) == 0
    assert "no routing decision" in capsys.readouterr().out


def test_the_shell_names_inputs_that_are_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(4, 4), 3\n")
    assert main(["explain", f"{tmp_path}/made.py:make"]) == 2
    assert "returned int as inputs" in capsys.readouterr().err
