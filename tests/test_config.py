"""Options and budgets: every accepted form, and messages that name what was not accepted."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import memfine_fx
from memfine_fx.config import Config, asked_gpu_kernels, parse_budget
from memfine_fx.errors import ConfigError


@pytest.mark.parametrize(
    ("budget", "num_bytes"),
    [
        (None, None),
        (1, 1),
        (10**12, 10**12),
        ("512", 512),
        ("512B", 512),
        ("20GiB", 20 * 2**30),
        ("800MB", 800 * 10**6),
        ("1.5G", 1_500_000_000),
        ("3 kb", 3000),
        ("  2KiB  ", 2048),
        ("2ki", 2048),
        ("1TiB", 2**40),
        ("0.5tb", 5 * 10**11),
        ("7mib", 7 * 2**20),
    ],
)
def test_a_budget_is_read_in_each_of_its_forms(budget: Any, num_bytes: int | None) -> None:
    assert parse_budget(budget) == num_bytes


@pytest.mark.parametrize(("fraction", "num_bytes"), [(0.5, 500), (1.0, 1000), (0.001, 1)])
def test_a_fraction_is_of_the_device(fraction: float, num_bytes: int) -> None:
    assert parse_budget(fraction, device_bytes=1000) == num_bytes


def test_a_fraction_without_a_device_is_no_number_yet() -> None:
    assert parse_budget(0.5) is None


def test_the_device_does_not_change_a_number_of_bytes() -> None:
    assert parse_budget("2000", device_bytes=1000) == 2000


@pytest.mark.parametrize(
    "budget",
    [
        "", "GiB", "-1GB", "0", "0.0GB", "0.1B", "1e9", "1.GB", ".5GB", "12 parsecs", "1GiBB", "1G B", "50%", "nan",
        0, -5, 0.0, 1.5, -0.1, float("nan"), float("inf"), True, False, [1], b"1GB", 1j,
    ],
)  # fmt: skip
def test_a_malformed_budget_is_named_with_what_is_accepted(budget: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"memory_budget={budget!r}")) as caught:
        parse_budget(budget)
    assert "expected None, an int of bytes, a float in (0, 1]" in str(caught.value)
    assert "'20GiB' or '800MB'" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"axis": "columns"}, "Config.axis='columns' is unknown; expected one of ['rows', 'tokens']"),
        ({"inner_backend": "tvm"}, "Config.inner_backend='tvm' is unknown"),
        ({"rows_per_chunk": 0}, "Config.rows_per_chunk=0 must be a positive int"),
        ({"rows_per_chunk": 2.0}, "Config.rows_per_chunk=2.0 must be a positive int"),
        ({"rows_per_chunk": True}, "Config.rows_per_chunk=True must be a positive int"),
        ({"tokens_per_chunk": -3}, "Config.tokens_per_chunk=-3 must be a positive int"),
        ({"captures_loops": 1}, "Config.captures_loops must be a bool, got 1"),
        ({"returns_logits": None}, "Config.returns_logits must be a bool, got None"),
        ({"verify": "no"}, "Config.verify must be a bool, got 'no'"),
        ({"memory_budget": "lots"}, "memory_budget='lots' is not understood"),
    ],
)
def test_a_malformed_field_is_named_where_the_config_is_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config(**fields)


def test_the_default_config_chunks_rows_without_a_limit() -> None:
    config = Config()
    assert (config.axis, config.rows_per_chunk, config.memory_budget) == ("rows", None, None)
    assert (config.captures_loops, config.verify, config.inner_backend) == (True, False, "inductor")


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().axis = "tokens"  # type: ignore[misc]  # on purpose


@pytest.mark.parametrize("options", [None, {}])
def test_no_options_are_the_default_config(options: dict[str, Any] | None) -> None:
    assert Config.from_options(options) == Config()


def test_options_are_fields() -> None:
    assert Config.from_options({"rows_per_chunk": 7, "axis": "tokens"}) == Config(axis="tokens", rows_per_chunk=7)


def test_options_override_a_ready_config() -> None:
    base = Config(bins=(1, 3), rows_per_chunk=5)
    assert Config.from_options({"config": base, "rows_per_chunk": 9}) == Config(bins=(1, 3), rows_per_chunk=9)


def test_an_unknown_option_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown option 'chunk_size' for backend 'memfine'") as caught:
        Config.from_options({"chunk_size": 4})
    assert "'rows_per_chunk'" in str(caught.value)


def test_an_option_is_checked_like_a_field() -> None:
    with pytest.raises(ConfigError, match=re.escape("Config.axis='columns'")):
        Config.from_options({"axis": "columns"})


def test_a_config_option_of_another_type_is_named() -> None:
    with pytest.raises(ConfigError, match=re.escape("options['config'] must be a memfine_fx.Config, got dict")):
        Config.from_options({"config": {"axis": "rows"}})


@pytest.mark.parametrize("bins", [(), [1, 2], (2, 1), (1, 1), (0, 1), (1.0,), (True,), "12", 4])
def test_bins_that_are_no_rising_tuple_are_named(bins: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"Config.bins={bins!r} must be a tuple of rising positive ints")):
        Config(bins=bins)


def test_bins_and_fixed_slices_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="both set the number of token slices"):
        Config(axis="tokens", bins=(1, 2), tokens_per_chunk=8)


def test_there_are_few_options() -> None:
    assert len(dataclasses.fields(Config)) <= 14


def test_the_table_of_options_names_every_field() -> None:
    page = (Path(__file__).parents[1] / "docs" / "trainers.md").read_text(encoding="utf-8")
    table = page[page.index("## Options") : page.index("## DDP")]
    keys = re.findall(r"^\|[^|]*\| `(\w+)` \| `(\w+)=", table, re.MULTILINE)
    assert [first for first, second in keys if first == second] == [first for first, _ in keys]
    assert sorted(first for first, _ in keys) == sorted(field.name for field in dataclasses.fields(Config))


@pytest.mark.parametrize(("written", "expected"), ((None, None), ("", None), ("0", False), ("1", True)))
def test_gpu_kernels_are_asked_for_by_a_variable(
    written: str | None, expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEMFINE_GPU_KERNELS", raising=False)
    if written is not None:
        monkeypatch.setenv("MEMFINE_GPU_KERNELS", written)
    assert asked_gpu_kernels() is expected


def test_another_value_of_that_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFINE_GPU_KERNELS", "yes")
    with pytest.raises(ConfigError, match="MEMFINE_GPU_KERNELS='yes' is unknown; expected 0 or 1"):
        asked_gpu_kernels()


def test_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "MEMFINE_OPTIONS",
        " memory_budget=20GiB, returns_logits=false,bins=1/2/4,rows_per_chunk=none,axis=tokens,idle_gradients=none",
    )
    expected = Config(memory_budget="20GiB", returns_logits=False, bins=(1, 2, 4), axis="tokens", idle_gradients="none")
    assert Config.from_environment() == expected
    assert Config.from_options(None) == expected
    assert Config.from_options({"axis": "rows"}) == dataclasses.replace(expected, axis="rows")
    assert Config.from_options({"config": Config()}) == Config(), "a config that is given is whole"


@pytest.mark.parametrize(("text", "budget"), [("0.8", 0.8), ("123456", 123456), ("800MB", "800MB"), ("none", None)])
def test_a_budget_of_the_environment_has_each_of_its_forms(
    text: str, budget: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFINE_OPTIONS", f"memory_budget={text}")
    assert Config.from_environment().memory_budget == budget


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("colour=3", "unknown option 'colour'"),
        ("memory_budget", "'memory_budget' is not NAME=VALUE"),
        ("memory_budget=20 parsecs", "is not understood"),
        ("returns_logits=yes", "returns_logits must be a bool, got 'yes'"),
        ("rows_per_chunk=-1", "must be a positive int"),
        ("bins=4/2", "must be a tuple of rising positive ints"),
        ("axis=columns", "expected one of"),
    ],
)
def test_a_bad_value_of_the_environment_names_the_variable(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFINE_OPTIONS", text)
    with pytest.raises(ConfigError, match=r"MEMFINE_OPTIONS=.*" + re.escape(said)):
        Config.from_environment()
    with pytest.raises(ConfigError, match="MEMFINE_OPTIONS"):
        memfine_fx.optimize(torch.nn.Linear(2, 2))
    memfine_fx.optimize(torch.nn.Linear(2, 2), config=Config())


@pytest.mark.parametrize(("budget", "has_budget"), [(None, False), ("least", False), ("20GiB", True), (0.5, True)])
def test_least_is_a_plan_and_no_limit(budget: Any, has_budget: bool) -> None:
    assert Config(memory_budget=budget).has_budget is has_budget
    assert parse_budget("least", device_bytes=1000) is None
