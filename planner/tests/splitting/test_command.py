"""`memfine plan split` from the shell, and the messages for bad fleets."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from memfine_fx.errors import ConfigError
from memfine_planner.splitting.command import add_parser, run

FLEET = {
    "server": {"flops_per_s": 1e10, "link_bytes_per_s": 1e7},
    "devices": [
        {"name": "slow", "flops_per_s": 1e8, "link_bytes_per_s": 1e6, "samples": 64},
        {"name": "fast", "flops_per_s": 1e10, "link_bytes_per_s": 1e7, "samples": 64},
    ],
}


ROOT = Path(__file__).resolve().parents[3]


def tiny() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)), torch.randn(4, 64)


def plan(*arguments: str) -> int:
    defaults = ("--model", f"{__file__}:tiny", "--fleet", f"{ROOT}/examples/split_fleet.yaml")
    return run(add_parser(argparse.ArgumentParser().add_subparsers()).parse_args((*defaults, *arguments)))


def written(folder: Path, fleet: object) -> str:
    path = folder / "fleet.json"
    path.write_text(json.dumps(fleet))
    return str(path)


def test_plan_is_printed_with_its_bound_and_the_optimum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--fleet", written(tmp_path, FLEET)) == 0
    text = capsys.readouterr().out
    assert "1 (relu)" in text and "no plan is faster than" in text
    assert all(name in text for name in ("optimum", "equal share", "all local", "all offloaded", "random"))


@pytest.mark.slow
def test_example_fleet_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model", f"{ROOT}/examples/split_models.py:small_cnn") == 0
    assert "clinic" in capsys.readouterr().out


def test_leakage_bound_moves_the_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def planned(fleet: object) -> dict[str, object]:
        assert plan("--fleet", written(tmp_path, fleet), "--json") == 0
        return json.loads(capsys.readouterr().out)

    free = planned(FLEET)
    nodes = [cut["node"] for cut in free["cuts"]]
    assert free["cut_at"][0] == nodes[0]
    curve = {node: 1 - index / len(nodes) for index, node in enumerate(nodes)}
    devices = [one | {"max_leakage": 0.99} for one in FLEET["devices"]]
    bounded = planned(FLEET | {"devices": devices, "leakage": curve})
    assert nodes[0] not in bounded["cut_at"]
    assert bounded["round_s"] > free["round_s"]


def changed(device: dict[str, object]) -> dict[str, object]:
    return FLEET | {"devices": [FLEET["devices"][0] | device]}


@pytest.mark.parametrize(
    ("fleet", "message"),
    [
        (changed({"flops_per_s": None}), "fleet.devices.0.flops_per_s: Input should be a valid number (got null)"),
        (changed({"samples": 0}), "devices.0.samples: Input should be greater than or equal to 1 (got 0)"),
        (changed({"sampels": 4}), "devices.0.sampels: Extra inputs are not permitted (got 4)"),
        ({"server": FLEET["server"]}, "devices: Field required"),
        ({**FLEET, "leakage": {"relu": 2}}, "leakage.relu: Input should be less than or equal to 1 (got 2)"),
        ({**FLEET, "leakage": {"relu": 0.5}}, "leakage has no value for the cuts input"),
        (
            {**FLEET, "leakage": {"input_1": 1, "linear": 1, "relu": 1, "linear_1": 0, "linear_2": 0}},
            "leakage.linear: the model has no such cut",
        ),
        ({**FLEET, "devices": FLEET["devices"] * 2}, "expected names that differ; slow, fast is given more than once"),
        (changed({"max_leakage": 0.5}), "device slow: max_leakage needs the cuts' leakage; pass --attack"),
        ([], "expected the fields server and devices, got list"),
    ],
)
def test_bad_fleet_is_named_by_field(fleet: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        plan("--fleet", written(tmp_path, fleet))
    assert message in str(error.value)


def test_too_few_samples_are_named(tmp_path: Path) -> None:
    samples = tmp_path / "samples.pt"
    torch.save(torch.randn(7, 64), samples)
    with pytest.raises(ConfigError, match=r"samples\.pt: 7 samples; expected at least 8"):
        plan("--fleet", written(tmp_path, FLEET), "--attack", str(samples))


@pytest.mark.parametrize("content", [b"", b"no tensor"])
def test_samples_that_are_no_tensor_are_named(content: bytes, tmp_path: Path) -> None:
    samples = tmp_path / "samples.pt"
    samples.write_bytes(content)
    with pytest.raises(ConfigError, match=r"samples\.pt: cannot be read as a tensor"):
        plan("--fleet", written(tmp_path, FLEET), "--attack", str(samples))


@pytest.mark.parametrize("target", ["nope", "nope.py:make", __file__ + ":missing", __file__ + ":FLEET"])
def test_bad_model_is_named(target: str) -> None:
    with pytest.raises(ConfigError, match="--model"):
        plan("--model", target)
