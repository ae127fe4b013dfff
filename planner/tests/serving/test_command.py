"""`memfine plan serving` from the shell, the messages for bad files, and the published ratios."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from memfine_fx.errors import ConfigError
from memfine_planner.serving.command import add_parser, run
from memfine_planner.serving.hardware import Accelerator, accelerators
from memfine_planner.serving.validation import compare

TASK = {
    "model": "llama3_8b",
    "rate": 10,
    "lengths": [{"prompt": 512, "output": 128}],
    "targets": {"first_token_s": 0.4, "token_s": 0.04},
    "pool": {"H100": {"devices": 8}},
}


def plan(*arguments: str) -> int:
    return run(add_parser(argparse.ArgumentParser().add_subparsers()).parse_args(arguments))


def written(folder: Path, name: str, content: object) -> str:
    path = folder / name
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_fleet_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan() == 0
    text = capsys.readouterr().out
    assert "prefill" in text and "decode" in text and "handed over in" in text


def test_json_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--request", written(tmp_path, "task.yaml", TASK), "--rate", "30", "--json") == 0
    loaded = json.loads(capsys.readouterr().out)
    rows = loaded["prefill"] + loaded["decode"]
    assert sum(row["price"] * row["count"] for row in rows) == pytest.approx(loaded["price"])
    assert sum(row["capacity"] * row["count"] for row in loaded["prefill"]) >= 30


def test_users_device_joins_the_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {
        "vendor": "us", "tflops": {"BF16": 2000}, "memory_gib": 200, "memory_gb_per_s": 9000, "domain": 8,
        "domain_gb_per_s": 500, "network_gb_per_s": 50, "host_link_gb_per_s": 64,
    }  # fmt: skip
    pool = {"pool": {"Ours": {"devices": 8}, "H100": {"devices": 8}}}
    devices = written(tmp_path, "devices.yaml", {"Ours": fields})
    assert plan("--request", written(tmp_path, "task.yaml", TASK | pool), "--accelerators", devices) == 0
    assert "Ours" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rate": None}, "task.yaml: request.rate: Input should be a valid number (got null)"),
        ({"lengths": [{"prompt": 0, "output": 1}]}, "lengths.0.prompt: Input should be greater than or equal to 1"),
        ({"targets": {"first_token_s": 1}}, "targets.token_s: Field required"),
        ({"pool": {"H100": {"devices": 8, "prise": 3}}}, "pool.H100.prise: Extra inputs are not permitted (got 3)"),
        ({"number": "INT7"}, "number: String should match pattern"),
        ({"model": "nope"}, "unknown model 'nope'"),
        ({"sizes": []}, "request.sizes: Tuple should have at least 1 item"),
        (
            {"pool": {"H100": {"devices": 8, "price": 2}, "H200": {"devices": 8}}},
            "request.pool: Value error, expected a price for every accelerator or for none; none for H200",
        ),
    ],
)
def test_bad_task_is_named_by_field(changed: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        plan("--request", written(tmp_path, "task.yaml", TASK | changed))
    assert message in str(error.value)


def test_bad_device_is_named_by_field(tmp_path: Path) -> None:
    devices = written(tmp_path, "devices.yaml", {"Ours": {"vendor": "us", "tflops": {"BF17": 1}, "memory_gib": -1}})
    with pytest.raises(ConfigError) as error:
        plan("--accelerators", devices)
    text = str(error.value)
    assert "Ours.memory_gib: Input should be greater than 0 (got -1)" in text
    assert "Ours.tflops.BF17: Input should be" in text and "Ours.domain: Field required" in text


def test_every_device_has_its_sources_and_says_what_was_checked() -> None:
    known = accelerators()
    assert {"H100", "H200", "B200", "MI300X", "MI355X", "Ascend-910B", "Gaudi-3"} <= set(known)
    for one in known.values():
        assert one.sources, one.name
        assert {name.split(".")[0] for name in one.checked} <= set(type(one).model_fields)
        assert all(one.checked.values())


FIGURES = ("tflops", "memory_gib", "memory_gb_per_s", "domain", "domain_gb_per_s", "network_gb_per_s",
           "host_link_gb_per_s")  # fmt: skip


def unchecked(one: Accelerator) -> list[str]:
    formats = [f"tflops.{number}" for number in one.tflops]
    names = FIGURES if not any(name in one.checked for name in formats) else (*formats, *FIGURES[1:])
    return [name for name in names if name not in one.checked]


def test_page_names_every_figure_that_nobody_read() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.count(" | ") == 1]
    written = {name: fields.split(", ") for name, fields in rows if name in accelerators()}
    assert written == {name: unchecked(one) or ["none"] for name, one in accelerators().items()}


def test_page_prints_the_ratios_that_the_model_gives() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text()
    for one in compare():
        checked = "yes" if one.checked else "no"
        assert f"| {one.published:.3g} | {one.predicted:.2f} | {one.miss:+.0%} | {checked} | {one.name} |" in page


def test_published_ratios_are_met_as_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--check") == 0
    assert capsys.readouterr().out.count("\n") == len(compare()) + 1
    checked = [abs(one.miss) for one in compare() if one.checked]
    assert len(checked) >= 8
    assert np.median(checked) <= 0.16
    assert max(checked) <= 0.60
