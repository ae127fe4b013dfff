"""What a run tells of itself: imbalance, scalars, logs, dumps, trace records and profiler ranges."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import memfine_fx
from memfine_fx.errors import ConfigError
from memfine_fx.models import MixtralConfig, MixtralMoE
from memfine_fx.runtime.loads import LoadHistory
from tests.integration.comparison import optimized_copy

NUM_EXPERTS, TOP_K = 4, 2


def layer() -> MixtralMoE:
    return MixtralMoE(
        MixtralConfig(hidden=16, expert_width=24, num_experts=NUM_EXPERTS, top_k=TOP_K, spelling="gathered")
    )


def test_imbalance_is_the_fullest_expert_over_the_mean() -> None:
    history = LoadHistory()
    assert history.summary() is None
    history.note(torch.tensor([0, 0, 0, 0, 0]))
    assert history.summary() is None
    for offsets in ([0, 2, 4, 6, 8], [0, 8, 8, 8, 8], [0, 4, 6, 7, 8]):
        history.note(torch.tensor(offsets))
    summary = history.summary()
    assert summary is not None
    assert (summary.latest, summary.p50, summary.p95, summary.largest) == (2.0, 2.0, 4.0, 4.0)
    assert summary.num_calls == 3


def test_scalars_say_what_the_report_says() -> None:
    optimized = optimized_copy(layer(), rows_per_chunk=5)
    for _ in range(3):
        optimized(torch.randn(11, 16)).sum().backward()
    named = memfine_fx.scalars(optimized)
    (region,) = memfine_fx.report(optimized).regions
    assert region.imbalance is not None
    assert region.imbalance.num_calls == 3
    assert 1.0 <= region.imbalance.p50 <= region.imbalance.p95 <= region.imbalance.largest <= NUM_EXPERTS
    prefix = f"memfine/{region.where.module or region.where.source}"
    assert named[f"{prefix}/chunks"] == region.num_chunks > TOP_K * 11 / 5
    assert named[f"{prefix}/largest_chunk_rows"] == region.largest_chunk <= 5
    assert named[f"{prefix}/imbalance_max"] == region.imbalance.largest
    assert "imbalance p50" in str(region)
    json.loads(memfine_fx.report(optimized).to_json())


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11 says so at every start
def test_profiles_name_layers_and_chunks() -> None:
    optimized = optimized_copy(layer(), rows_per_chunk=5)
    tokens = torch.randn(11, 16)
    optimized(tokens).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        optimized(tokens).sum().backward()
    names = [event.name for event in profiler.events()]
    num_chunks = memfine_fx.report(optimized).regions[0].num_chunks
    for stage in ("forward", "backward"):
        ranges = [name for name in names if f" {stage} chunk " in name]
        assert len(ranges) == num_chunks
        assert sum(int(name.split(", ")[1].split()[0]) for name in ranges) == 11 * TOP_K
        assert any(name.endswith(f" {stage}") for name in names)


def test_logs_name_regions_and_plans(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memfine_fx")
    optimized_copy(layer(), rows_per_chunk=5)(torch.randn(11, 16))
    said = {record.name: record.getMessage() for record in caplog.records}
    assert "chunked" in said["memfine_fx.passes"]
    assert "T=11: 5 rows a chunk" in said["memfine_fx.plans"]


def test_an_unknown_log_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFINE_LOGS", "passes,grphs")
    with pytest.raises(ConfigError, match=r"MEMFINE_LOGS names 'grphs'; known: passes, plans, all"):
        memfine_fx.optimize(layer())


SCRIPT = """
import torch, memfine_fx
from memfine_fx.models import MixtralConfig, MixtralMoE
layer = MixtralMoE(MixtralConfig(hidden=16, expert_width=24, num_experts=4, top_k=2, spelling="gathered"))
memfine_fx.optimize(layer, inner_backend="eager")
for _ in range(3):
    layer(torch.randn(11, 16)).sum().backward()
"""


def test_environment_variables_give_logs_dumps_and_trace_records(tmp_path: Path) -> None:
    settings = {"MEMFINE_LOGS": "all", "MEMFINE_DUMP": str(tmp_path / "dump"), "TORCH_TRACE": str(tmp_path / "trace")}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **settings},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr.count("[memfine_fx.passes] graph 1: chunked") == 1
    assert ran.stderr.count("[memfine_fx.plans]") == 1
    captured, rewritten = (
        (tmp_path / "dump" / f"graph_001_{state}.py").read_text() for state in ("captured", "rewritten")
    )
    assert "memfine.experts" not in captured
    assert "memfine.experts" in rewritten
    records = "".join(path.read_text() for path in (tmp_path / "trace").iterdir())
    assert '"name": "memfine_regions"' in records
    assert '"name": "memfine_graph"' in records
