"""From logs of interruptions to rates, gaps, times, correlation, and what a plan makes of them."""

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from memfine_fx.cli import main
from memfine_fx.errors import ConfigError
from memfine_planner.training.faults import (
    CheckpointCost,
    FaultModel,
    best_interval,
    fewest_spares,
    goodput,
    simulate,
)
from memfine_planner.training.history import published_histories, read_history
from memfine_planner.training.reliability import (
    Reliability,
    assess,
    fault_model,
    fit_gaps,
    poisson_bounds,
    predicted_count,
)
from memfine_planner.training.reliability_report import held_out, reliability_text

START = datetime(2026, 1, 1, tzinfo=UTC)
COST = CheckpointCost(1e12, 5.0, 120.0, 30.0)
Row = tuple[float, str, str, float, str]


def write(path: Path, rows: Sequence[Row], extra: str = "", values: Sequence[str] = ()) -> Path:
    """A CSV log of (hour, node, component, downtime, cause), with more columns if wanted."""
    lines = ["time,node,component,downtime,cause" + extra]
    for index, (hour, *cells) in enumerate(rows):
        more = f",{values[index]}" if values else ""
        lines.append(",".join(str(cell) for cell in ((START + timedelta(hours=hour)).isoformat(), *cells)) + more)
    path.write_text("\n".join(lines) + "\n")
    return path


def log(tmp_path: Path, rows: Sequence[Row], nodes: int = 100, days: float = 10, **more: object) -> Reliability:
    path = write(tmp_path / "log.csv", rows, **more)  # type: ignore[arg-type]
    return assess(read_history(str(path), nodes=nodes, days=days))


def test_exact_bounds_are_the_tabulated_ones() -> None:
    # Garwood's table.
    for count, low, high in ((0, 0.0, 3.689), (1, 0.0253, 5.572), (10, 4.795, 18.39), (100, 81.36, 121.6)):
        assert poisson_bounds(count) == pytest.approx((low, high), rel=1e-3)
    assert poisson_bounds(5000)[0] == pytest.approx(5000 - 1.96 * math.sqrt(5000), rel=1e-3)


def test_predicted_count_covers_what_a_cluster_of_the_same_rate_counts() -> None:
    generator = np.random.default_rng(0)
    hits = []
    for _ in range(1500):
        seen, other = generator.poisson(12), generator.poisson(30)
        low, high = predicted_count(int(seen), 1000.0, 2500.0)
        hits.append(low <= other <= high)
    assert 0.93 < np.mean(hits) < 0.98


@pytest.mark.parametrize("shape", [0.5, 0.7, 1.5])
def test_weibull_gaps_are_recognised_with_their_shape(shape: float) -> None:
    gaps = 3600 * np.random.default_rng(1).weibull(shape, 400)
    found = fit_gaps(list(gaps))
    assert found is not None and found.kind == "Weibull"
    assert found.shape == pytest.approx(shape, rel=0.1)


def test_exponential_gaps_are_taken_for_weibull_in_one_of_twenty_logs() -> None:
    generator = np.random.default_rng(2)
    kinds = [fit_gaps(list(generator.exponential(3600, 60))) for _ in range(300)]
    share = sum(found is not None and found.kind == "Weibull" for found in kinds) / len(kinds)
    assert 0.02 < share < 0.09


def test_gap_that_the_end_cuts_is_counted_as_censored() -> None:
    gaps = [100.0] * 20
    assert fit_gaps(gaps[:7]) is None
    whole, cut = fit_gaps(gaps), fit_gaps(gaps, censored=2000.0)
    assert whole is not None and cut is not None
    assert cut.mean == pytest.approx(200.0) and cut.weibull_shape < whole.weibull_shape


def test_rates_are_per_component_and_node_hour(tmp_path: Path) -> None:
    rows: list[Row] = [(10.0 * i, f"n{i}", "gpu", 600, "ECC") for i in range(12)]
    rows += [(200.0 + i, f"m{i}", "network", 60, "link") for i in range(3)]
    found = log(tmp_path, rows)
    assert found.total is not None and found.total.per_node_hour == pytest.approx(15 / (100 * 240))
    assert [(rate.component, rate.count) for rate in found.components] == [("gpu", 12), ("network", 3)]
    low, high = poisson_bounds(12)
    assert (found.components[0].low, found.components[0].high) == pytest.approx((low / 24_000, high / 24_000))


def test_times_are_means_by_cause_of_what_the_log_has(tmp_path: Path) -> None:
    rows: list[Row] = [(10, "a", "gpu", 600, "ECC"), (30, "b", "gpu", 1000, "ECC"), (60, "c", "network", 60, "link")]
    found = log(tmp_path, rows, extra=",detection,restart,repair", values=["100,500,7200", "200,800,0", "20,40,"])
    ecc, link = found.times
    assert (ecc.cause, ecc.downtime, ecc.detection, ecc.restart, ecc.repair) == ("ECC", 800, 150, 650, 7200)
    assert (link.downtime, link.repair) == (60, None)
    model = fault_model(found, FaultModel())
    assert model.detection == pytest.approx((100 + 200 + 20) / 3) and model.restart == pytest.approx(1340 / 3)
    # A repair of 0 seconds and an empty cell both say that the node stayed.
    assert (model.needs_node, model.repair) == (pytest.approx(1 / 3), 7200)


def test_log_without_the_split_counts_all_of_the_downtime(tmp_path: Path) -> None:
    model = fault_model(log(tmp_path, [(1, "a", "gpu", 600, "ECC"), (9, "b", "gpu", 800, "ECC")]), FaultModel())
    assert (model.detection, model.restart, model.needs_node) == (0.0, 700.0, FaultModel().needs_node)


@pytest.mark.parametrize(
    ("column", "values", "parts"), [("detection", "100", (100, 500)), ("restart", "400", (200, 400))]
)
def test_part_of_the_downtime_that_a_log_lacks_is_the_rest_of_it(
    column: str, values: str, parts: tuple[float, float], tmp_path: Path
) -> None:
    found = log(tmp_path, [(1, "a", "gpu", 600, "ECC")] * 2, extra=f",{column}", values=[values] * 2)
    model = fault_model(found, FaultModel())
    assert (model.detection, model.restart) == parts


def test_parts_that_exceed_the_downtime_are_named_with_their_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log\.csv:2: row: .*detection and restart add up to 700 s of a .* 600 s"):
        log(tmp_path, [(1, "a", "gpu", 600, "ECC")], extra=",detection,restart", values=["200,500"])


def test_events_of_one_cause_at_once_are_one_incident_that_takes_several_nodes(tmp_path: Path) -> None:
    rows: list[Row] = [(50, f"r1n{i}", "power", 3600, "feed") for i in range(4)]
    rows += [(50, "x", "gpu", 600, "ECC"), (80, "y", "gpu", 600, "ECC"), (80.05, "y", "gpu", 600, "lost")]
    repairs = ["7200,r1"] * 4 + ["3600,r2", "3600,r3", "3600,r3"]
    found = log(tmp_path, rows, extra=",repair,rack", values=repairs)
    assert found.incidents == 3
    assert log(tmp_path, rows).batches == ((1, pytest.approx(2 / 3)), (4, pytest.approx(1 / 3)))
    assert found.batches == ((1, pytest.approx(2 / 3)), (4, pytest.approx(1 / 3)))
    rack = next(repeat for repeat in found.repeats if repeat.what == "rack")
    assert rack.seen == 6 and rack.expected == pytest.approx(15 / 3)


def test_node_that_fails_again_and_again_is_seen(tmp_path: Path) -> None:
    rows: list[Row] = [(8.0 * i, "bad" if i % 2 else f"n{i}", "gpu", 600, f"cause {i}") for i in range(20)]
    (repeat,) = log(tmp_path, rows).repeats
    assert (repeat.what, repeat.seen) == ("node", 45)
    assert repeat.expected == pytest.approx(1.9) and repeat.chance < 1e-6


@pytest.mark.parametrize("shape", [0.6, 1.4])
@pytest.mark.parametrize("factor", [0.4, 1, 4])
def test_goodput_of_weibull_gaps_agrees_with_the_simulation(shape: float, factor: float) -> None:
    faults = FaultModel(shape=shape, spares=64, crashes_per_hour=0.05)
    interval = factor * best_interval(COST, faults, 16384).interval
    found = goodput(interval, COST, faults, 16384)
    assert found.fraction == pytest.approx(simulate(interval, COST, faults, 16384, days=3000, seed=3), rel=0.02)
    parts = found.fraction + found.saving + found.lost_work + found.down + found.waiting
    assert parts == pytest.approx(1)


def test_shape_of_one_is_the_exponential_model() -> None:
    nearly = goodput(400, COST, FaultModel(shape=1.0001, spares=9), 8192)
    exactly = goodput(400, COST, FaultModel(spares=9), 8192)
    assert nearly.fraction == pytest.approx(exactly.fraction, rel=2e-3)
    assert nearly.down == pytest.approx(exactly.down, rel=5e-3)


def test_failures_that_take_several_nodes_wait_as_the_simulation_waits() -> None:
    faults = FaultModel(spares=8, batches=((1, 0.7), (6, 0.3)))
    found = goodput(400, COST, faults, 8192)
    assert found.fraction == pytest.approx(simulate(400, COST, faults, 8192, days=8000, seed=4), rel=0.02)
    assert found.waiting > 3 * goodput(400, COST, FaultModel(spares=8), 8192).waiting


def test_fewest_spares_are_enough_and_one_less_is_not() -> None:
    spares = fewest_spares(COST, FaultModel(), 4096)
    waiting = [best_interval(COST, FaultModel(spares=n), 4096).waiting for n in (spares - 1, spares)]
    assert waiting[1] <= 1e-3 < waiting[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2026-01-01,n1,gpu,soon,ECC", r"log\.csv:2: row\.downtime: Input should be a valid number.* \(got 'soon'\)"),
        ("2026-01-01,n1,gpu,-5,ECC", r"row\.downtime: Input should be greater than or equal to 0"),
        ("yesterday,n1,gpu,5,ECC", r"log\.csv:2: row\.time: Input should be a valid datetime"),
        ("2026-01-01,,gpu,5,ECC", r"row\.node: Field required"),
        ("2026-01-01,n1,gpu,5,ECC,more", r"log\.csv:2: more cells than the header has columns"),
        ("", "expected at least one event"),
    ],
)
def test_bad_line_is_named_with_its_field(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("time,node,component,downtime,cause\n" + line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_history(str(path), nodes=8, days=3)


def test_cluster_around_a_log_must_be_known_and_agree_with_it(tmp_path: Path) -> None:
    path = str(write(tmp_path / "log.csv", [(0, "a", "gpu", 1, "x"), (48, "b", "gpu", 1, "x")]))
    with pytest.raises(ConfigError, match="2 nodes failed, but how many are there"):
        read_history(path)
    with pytest.raises(ConfigError, match="more than the 1 nodes given"):
        read_history(path, nodes=1)
    with pytest.raises(ConfigError, match=r"span 2\.0 days, which is more than the 1 days given"):
        read_history(path, nodes=9, days=1)
    assert read_history(path, nodes=9).days == pytest.approx(4)
    with pytest.raises(ConfigError, match="unknown history 'nope'; known: llama3"):
        read_history("nope")
    with pytest.raises(ConfigError, match="cannot read the history"):
        read_history(str(tmp_path / "none.csv"))


def test_json_log_brings_its_own_cluster(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    plain = {"component": "gpu", "downtime": 60, "cause": "x"}
    events = [{"time": 1.7e9 + 3600 * i, "node": f"n{i}"} | plain for i in (0, 9)]
    path.write_text(json.dumps({"nodes": 16, "gpus_per_node": 4, "days": 2, "events": events}))
    history = read_history(str(path))
    assert (history.nodes, history.gpus_per_node, history.node_hours) == (16, 4, 768)
    path.write_text(json.dumps([events[0], events[1] | {"repairs": 5}]))
    with pytest.raises(ConfigError, match=r"events\[1\]\.repairs: nothing reads this field; did you mean repair\?"):
        read_history(str(path), nodes=2, days=1)


def test_misspelt_field_of_a_json_log_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text(json.dumps({"node": 16, "events": []}))
    with pytest.raises(ConfigError, match=r"log\.json: log\.node: nothing reads this field; did you mean nodes\?"):
        read_history(str(path), days=2)


def test_log_of_a_spreadsheet_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", [(0, "a", "gpu", 1, "x"), (48, "b", "gpu", 1, "x")])
    path.write_text("\ufeff" + path.read_text().replace(",", ", "), encoding="utf-8")
    assert [event.node for event in read_history(str(path), nodes=9).events] == ["a", "b"]


def test_published_causes_of_llama_3_add_up() -> None:
    history = published_histories()["llama3"]
    planned = sum(cause.count for cause in history.causes if cause.planned)
    assert (sum(cause.count for cause in history.causes), planned) == (466, 47)
    found = assess(history)
    assert fault_model(found, FaultModel()).mtbf(16384) / 3600 == pytest.approx(54 * 24 / 466)


def test_every_published_history_says_whether_it_was_checked() -> None:
    for history in published_histories().values():
        assert history.checked in ("text", "abstract", "quoted") and "arXiv" in history.source
        text = reliability_text(assess(history))
        assert ("not checked" in text) == (history.checked == "quoted")


def test_rate_of_one_cluster_predicts_anothers_gpus_but_not_its_total() -> None:
    rows = {(row.fitted, row.predicted): row for row in held_out()}
    assert rows["llama3", "b200_504"].is_within and rows["b200_504", "llama3"].is_within
    totals = [row for row in rows.values() if row.component == "all"]
    assert not any(row.is_within for row in totals)
    assert rows["llama3", "rsc1"].factor == pytest.approx(1.72, abs=0.01)
    assert rows["llama3", "opt175b"].factor == pytest.approx(3.72, abs=0.01)


def test_history_without_a_time_has_no_rate() -> None:
    with pytest.raises(ConfigError, match="megascale does not say how long"):
        fault_model(assess(published_histories()["megascale"]), FaultModel())


PLAN = "plan training --model llama3_8b --gpus 64 --tp 1 --pp 1 --recompute full".split()


def test_plan_takes_interval_spares_and_goodput_from_a_history(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--history", "opt175b", "--json"]) == 0
    harsh = json.loads(capsys.readouterr().out)["faults"]
    assert main([*PLAN, "--history", "rsc2", "--json"]) == 0
    mild = json.loads(capsys.readouterr().out)["faults"]
    assert harsh["best"]["fraction"] < mild["best"]["fraction"]
    assert harsh["best"]["interval"] < mild["best"]["interval"]
    assert harsh["model"]["spares"] >= mild["model"]["spares"]
    assert harsh["goodput_bounds"][0] < harsh["best"]["fraction"] < harsh["goodput_bounds"][1]


def test_history_alone_is_assessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gaps = 20 * np.random.default_rng(5).weibull(0.5, 60)
    hours = np.cumsum(gaps)
    rows: list[Row] = [(float(hour), f"n{i % 9}", "gpu", 300, f"cause {i % 4}") for i, hour in enumerate(hours)]
    path = write(tmp_path / "log.csv", rows)
    assert main(["plan", "training", "--history", str(path), "--history-nodes", "64"]) == 0
    text = capsys.readouterr().out
    assert "gaps: Weibull" in text and "a node fails again" in text and "first event to the last" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--history llama3 --failure-rate 1e-5", "both give the rate of failures"),
        ("--history-nodes 8", "belong to --history FILE"),
        ("--history megascale", "does not say how long it was observed"),
        ("--history llama3 --history-nodes 8", "has its own nodes and days"),
    ],
)
def test_flags_of_a_history_that_contradict_are_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, *arguments.split()]) == 2
    assert message in capsys.readouterr().err
