"""`fit` answers for every family of docs/coverage.md that has a causal language model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import memfine_fx
from memfine_fx.errors import ConfigError

_COVERAGE = Path(__file__).parents[2] / "docs" / "coverage.md"


def families() -> list[str]:
    """Return the names in the first column of the table of transformers' families."""
    table = _COVERAGE.read_text(encoding="utf-8").partition("## Transformers families")[2].partition("\n## ")[0]
    return re.findall(r"^\| (\w+) \| \w+For", table, re.MULTILINE)


def tiny_config(family: str) -> Any:
    """Return the config of a toy model of the family, of the first of its model types that can be built."""
    from benchmarks.coverage.families import moe_families
    from memfine_fx.demo.tiny import tiny_model

    (types,) = [known.model_types for known in moe_families() if known.name == family]
    for model_type in types:
        try:
            return tiny_model(model_type).module.config
        except ConfigError:
            continue
    raise AssertionError(f"no toy model of {family} can be built")


def test_the_table_names_about_seventy_families() -> None:
    names = families()
    assert len(names) > 60 and len(set(names)) == len(names)
    assert {"qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss"} <= set(names)


@pytest.mark.campaign
@pytest.mark.parametrize("family", families())
def test_every_family_is_answered(family: str) -> None:
    pytest.importorskip("transformers")
    torch._dynamo.reset()
    config = tiny_config(family)
    try:
        report = memfine_fx.fit(config, batch=2, seq=48, dtype="fp32", memory="1GiB")
    except ConfigError as error:
        if "has no causal language model" not in str(error):
            raise
        pytest.skip(str(error))
    assert report.fits and report.line.startswith("memfine_fx.optimize(model")
    assert 0 < report.least.num_bytes <= report.most.num_bytes
    assert report.longest_seq is None or 48 <= report.longest_seq < 1 << 24
    assert report.largest_batch is None or 2 <= report.largest_batch < 1 << 16
    assert report.chunked or report.refused
