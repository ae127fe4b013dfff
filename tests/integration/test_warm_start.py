"""A second process takes graphs and bodies from AOT autograd's cache, and is in nothing different from the first."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memfine_fx.compat.functorch import CACHED_RECORDS
from tests.integration.comparison import FP32_TOLERANCE

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CACHED_RECORDS.holds(), reason="this torch's cache keeps no record beside a graph"),
]


def run(folder: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.warm_start", *arguments],
        cwd=ROOT,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("error") < FP32_TOLERANCE
    # The line that says what comparing with the model's own code took differs from run to run.
    found["reports"] = [re.sub(r"\n  layers compared with your code.*", "", report) for report in found["reports"]]
    return found


@pytest.mark.parametrize(
    ("arguments", "saved"),
    [(("silu",), "1 of 2 regions save"), (("silu", "least"), ""), (("silu", "device"), "2 of 2 regions save their")],
)
def test_a_second_process_is_as_the_first(tmp_path: Path, arguments: tuple[str, ...], saved: str) -> None:
    """Losses, gradients (kept graph, then added in place), measured bytes and whole reports with their predictions."""
    cold, warm = run(tmp_path, *arguments), run(tmp_path, *arguments)
    missed = cold.pop("misses")
    assert missed >= 3  # the graph, an expert's forward, its backward
    # A body may be found that this process has just written.
    assert (warm.pop("hits"), warm.pop("misses")) == (cold.pop("hits") + missed, 0)
    assert "gradients added to where they were" in cold["reports"][0]
    assert saved in cold["reports"][1]
    assert saved or "2 regions save" not in cold["reports"][1]
    assert warm == cold


def test_other_experts_in_an_equal_graph_are_not_found(tmp_path: Path) -> None:
    """Their graph differs in no operator: the experts are one operation in it."""
    first = run(tmp_path, "silu")
    other = run(tmp_path, "gelu")
    assert (other["hits"], other["misses"]) == (0, first["misses"])


def test_records_of_another_machine_are_not_found(tmp_path: Path) -> None:
    """What kernels take inside differs by instructions and threads, and so do records."""
    run(tmp_path, "silu")
    other = run(tmp_path, "silu", ONEDNN_MAX_CPU_ISA="AVX2")
    assert other["hits"] == 0
