"""Spans cut from a trace's marks, what was live in them, and the picture drawn of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import memfine_fx
from memfine_fx.errors import ConfigError, MemfineError
from memfine_fx.memory.measure import mark, span, trace_memory
from memfine_fx.memory.timeline import Prediction, Span, Timeline, spans_of, timeline_of
from memfine_fx.models import MixtralConfig, MixtralMoE
from memfine_fx.report.figure import timeline_chart
from memfine_fx.report.reports import Report

KIB = 1024


def traced_step() -> None:
    held = torch.empty(KIB, dtype=torch.uint8)
    with span("forward a/0"):
        torch.empty(4 * KIB, dtype=torch.uint8)
    mark("loss")
    with span("backward a/0"):
        torch.empty(2 * KIB, dtype=torch.uint8)
    del held


def test_spans_know_what_was_live_in_them() -> None:
    timeline = timeline_of(trace_memory(traced_step, torch.device("cpu")), {"a/0": "layers.0.mlp"})
    forward, backward = timeline.spans
    assert (forward.name, backward.name) == ("forward layers.0.mlp", "backward layers.0.mlp")
    assert forward.begin_us <= forward.end_us <= backward.begin_us <= backward.end_us
    assert timeline.peak_bytes(forward) == 5 * KIB
    assert timeline.peak_bytes(backward) == 3 * KIB
    assert timeline.peak_bytes() == 5 * KIB


def test_a_span_without_events_holds_what_was_live_before() -> None:
    timeline = Timeline((0.0, 9.0), (7, 0), (Span("forward x", 2.0, 3.0),))
    assert timeline.peak_bytes(timeline.spans[0]) == 7


def test_spans_of_unknown_regions_are_left_out() -> None:
    assert timeline_of(trace_memory(traced_step, torch.device("cpu")), {}).spans == ()


def test_spans_that_never_ended_are_left_out() -> None:
    marks = [("begin/a", 1.0), ("begin/b", 2.0), ("other", 2.5), ("end/b", 3.0)]
    assert spans_of(marks) == (Span("b", 2.0, 3.0),)


def explained() -> Report:
    torch.manual_seed(0)
    layer = MixtralMoE(MixtralConfig(16, 32, 4, 2, spelling="gathered"))
    config = memfine_fx.Config(inner_backend="aot_eager")
    return memfine_fx.explain(layer, torch.randn(12, 16, requires_grad=True), measure=True, config=config)


def test_a_measured_report_draws_its_step(tmp_path: Path) -> None:
    report = explained()
    assert report.timeline is not None
    assert [one.name.split(" ")[0] for one in report.timeline.spans] == ["forward", "backward"]
    assert report.timeline.peak_bytes() == report.measured_bytes
    report.plot(tmp_path / "step.svg")
    assert "measured, peak" in (tmp_path / "step.svg").read_text(encoding="utf-8")
    assert "timeline" not in report.to_json()
    with pytest.raises(ConfigError, match=r"name the file \S*step.svg, not \S*step.png"):
        report.plot(tmp_path / "step.png")


def test_the_picture_names_what_was_measured_and_predicted() -> None:
    spans = (Span("forward layers.0.mlp", 1e3, 2e3), Span("backward layers.0.mlp", 3e3, 4e3))
    predictions = (Prediction(None, 4 * 2**20), Prediction("forward layers.0.mlp", 3 * 2**20))
    drawn = timeline_chart(Timeline((0.0, 1.5e3, 5e3), (0, 3 * 2**20, 0), spans, predictions)).svg()
    for text in (
        "measured, peak 3.00 MiB",
        "predicted for the step, 4.00 MiB",
        "predicted for a region",
        "chunked region, forward",
        "chunked region, backward",
        "layers.0.mlp",
    ):
        assert text in drawn


def test_a_report_without_a_measured_step_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(MemfineError, match=r"explain\(model, ..., measure=True\) makes one"):
        Report((), 0).plot(tmp_path / "step.png")
