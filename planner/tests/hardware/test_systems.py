"""Systems: built in, and from files that may be wrong."""

from pathlib import Path

import pytest

from memfine_fx.errors import ConfigError
from memfine_planner.hardware.systems import builtin_systems, system

GOOD = """Mine:
  gpu: toy
  generation: hopper
  tflops: {BF16: 100}
  memory_gib: 16
  memory_gb_per_s: 1000
  nvlink_domain: 4
  nvlink_gb_per_s: 100
  network_gb_per_s: 10
  host_link_gb_per_s: 20
"""


@pytest.mark.parametrize("name", ["A100", "h100", "H200", "B200", "GB200", "GB300"])
def test_built_in_systems_have_sources(name: str) -> None:
    assert system(name).sources


def test_unknown_system_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=f"unknown system 'Z1'; known: {', '.join(builtin_systems())}"):
        system("Z1")


def test_yaml_file_of_a_user_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert system(path).rate("BF16") == 100e12


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_gib: 16", "memory_gib: -3", r"mine\.yaml:5: Mine\.memory_gib: .*greater than 0 \(got -3\)"),
        ("nvlink_domain: 4", "nvlink_domain: many", r"mine\.yaml:7: Mine\.nvlink_domain: .*integer.*'many'"),
        ("{BF16: 100}", "{BF17: 100}", r"mine\.yaml:4: Mine\.tflops\.BF17"),
        ("gpu: toy", "gpus: toy", r"mine\.yaml:2: Mine\.gpus: Extra inputs"),
        ("{BF16: 100}", "{BF16: 0}", r"mine\.yaml:4: Mine\.tflops\.BF16: .*greater than 0 \(got 0\)"),
        ("{BF16: 100}", "{}", r"mine\.yaml:4: Mine\.tflops: .*at least 1 item"),
        ("network_gb_per_s: 10", "network_gb_per_s: .inf", r"mine\.yaml:9: Mine\.network_gb_per_s: .*finite"),
        ("  gpu: toy", "  gpu: toy\n  gpu: two", r"mine\.yaml:3: Mine\.gpu is given twice, first in line 2"),
        ("  gpu: toy\n", "", r"mine\.yaml:1: Mine\.gpu: Field required$"),
    ],
)
def test_bad_value_is_named_with_its_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        system(path)


def test_file_cannot_run_code(tmp_path: Path) -> None:
    path = tmp_path / "evil.yaml"
    path.write_text("a: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        system(path)


def test_missing_number_format_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="H100 has no FP4 rate; known: FP16, BF16, FP8"):
        system("H100").rate("FP4")
