"""Every example, run as a user runs it; each fails unless it proves what it claims."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NEEDS = {
    "transformers_trainer": ("transformers", "accelerate"),
    "plain_loop": ("transformers",),
    "peft_lora": ("transformers", "peft"),
    "accelerate_loop": ("transformers", "accelerate"),
    "lightning_trainer": ("transformers", "lightning"),
    "distributed": ("transformers",),
    "tensorboard_logging": ("transformers", "accelerate", "tensorboard"),
    "lora_qwen3_moe": ("transformers", "peft"),
    "qlora_gpt_oss": ("transformers", "peft", "bitsandbytes"),
    "trl_trainers": ("transformers", "trl", "peft", "datasets"),
    "grpo_routing_replay": ("transformers", "trl", "datasets"),
}


@pytest.mark.trainers
@pytest.mark.parametrize("name", NEEDS)
def test_an_example_proves_itself(name: str) -> None:
    for package in NEEDS[name]:
        pytest.importorskip(package)
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), "--inner", "eager"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert ran.stdout.rstrip().endswith("OK")


def test_every_example_of_a_trainer_is_listed() -> None:
    """Those that share `common`; others have tests of their own."""
    found = {path.stem for path in EXAMPLES.glob("*.py") if "from common import" in path.read_text(encoding="utf-8")}
    assert found == set(NEEDS)
