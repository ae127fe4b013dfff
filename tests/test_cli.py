"""`memfine`: what it says of itself without torch, verify, and configs from a file."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import memfine_fx
from memfine_fx.cli import main

FACTORY = """
import torch
from memfine_fx.models import MixtralConfig, MixtralMoE

def make():
    torch.manual_seed(0)
    return MixtralMoE(MixtralConfig(16, 24, 4, 2, spelling="gathered")), torch.randn(9, 16)
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    file = tmp_path / "model.py"
    file.write_text(FACTORY, encoding="utf-8")
    return f"{file}:make"


@pytest.mark.parametrize(
    ("argument", "said"), [("--version", f"memfine {memfine_fx.__version__}"), ("--help", "usage: memfine")]
)
def test_what_it_says_of_itself_loads_no_torch(argument: str, said: str) -> None:
    source = f"""
import sys
from memfine_fx.cli import main
try:
    main([{argument!r}])
finally:
    print([name for name in ("torch", "sympy", "numpy") if name in sys.modules])
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.startswith(said) and done.stdout.rstrip().endswith("[]")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5, "of CPU time; torch takes seconds"


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(getattr(memfine_fx, name) is not None for name in memfine_fx.__all__)
    assert set(memfine_fx.__all__) <= set(dir(memfine_fx))
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        memfine_fx.optimise  # noqa: B018  # asking is the test


def test_verify_prints_what_was_compared(target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"inner_backend": "eager", "bins": [1, 2], "axis": "tokens"}), encoding="utf-8")
    assert main(["verify", target, "--config", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_explain_takes_a_budget_and_a_config(target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"rows_per_chunk": 3}), encoding="utf-8")
    assert main(["explain", target, "--config", str(file), "--budget", "1GiB"]) == 0
    assert "R=3 a chunk" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "--config"),
        ("[1]", "must hold an object of fields, got list"),
        ('{"colour": 1}', "unknown option 'colour'"),
    ],
)
def test_a_config_that_is_malformed_is_one_line(
    text: str, said: str, target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    assert main(["explain", target, "--config", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_benchmarks_are_offered_in_a_checkout_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "bench" not in capsys.readouterr().out
    assert main(["bench"]) == 2
    assert "source checkout" in capsys.readouterr().err
