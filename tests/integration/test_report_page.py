"""A report as HTML: well-formed, whole in itself, and with all that the text says of layers, refusals and bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

import memfine_fx
from memfine_fx.report.reports import notebook, page
from memfine_fx.units import readable_bytes
from tests.integration.test_first_step import HIDDEN, Noisy, layer, model
from tests.pages import read_page


def explained() -> memfine_fx.Report:
    config = memfine_fx.Config(inner_backend="aot_eager", rows_per_chunk=5)
    return memfine_fx.explain(model(layer(), Noisy()), torch.randn(9, HIDDEN), config=config, measure=True)


def test_layers_refusals_bytes_and_the_measured_step_are_on_the_page(tmp_path: Path) -> None:
    report = explained()
    report.to_html(tmp_path / "report.html")
    found = read_page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert f"{report.num_chunked} of {len(report.regions)} regions chunked" in found.text
    assert report.num_chunked and report.num_chunked < len(report.regions)
    for region in report.regions:
        assert region.where.module in found.text and Path(region.where.source).name in found.text
        assert (region.plan.reason if region.plan else region.reason) in found.text
    refused = next(region for region in report.regions if region.status == "refused")
    assert f"hint: {refused.hint}" in found.text
    assert report.step is not None and all(name in found.text for name, size in report.step.peak.terms if size > 0)
    assert {"svg", "path", "rect"} <= set(found.tags) and "script" not in found.tags


def test_the_step_has_axes_with_units_and_a_legend_in_light_and_dark() -> None:
    report = explained()
    text = read_page(page(report)).text
    assert "time in the step, ms (while traced)" in text and "live memory beyond the start of the step, MiB" in text
    assert f"measured, peak {readable_bytes(report.measured_bytes or 0)}" in text
    assert "chunked region, forward" in text and "chunked region, backward" in text


def test_what_a_model_is_called_is_no_markup() -> None:
    report = explained()
    named = dataclasses.replace(report.regions[0].where, module="<i>&layer")
    changed = dataclasses.replace(report, regions=(dataclasses.replace(report.regions[0], where=named),))
    found = read_page(page(changed))
    assert "<i>&layer" in found.text and "i" not in found.tags
    assert str(named) in found.titles


def test_a_notebook_shows_a_report_before_anything_has_run() -> None:
    optimized = memfine_fx.optimize(model(layer()))
    report = memfine_fx.report(optimized)
    assert report._repr_html_() == notebook(report)
    assert "nothing has run yet" in read_page(notebook(report)).text
