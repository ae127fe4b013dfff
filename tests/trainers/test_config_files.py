"""Programs that are told by a config file alone: nothing of theirs imports memfine_fx, and every layer is chunked."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memfine_fx.demo.tiny import tiny_causal_lm
from tests.trainers.hosts import NUM_LAYERS, WORDS

pytestmark = pytest.mark.trainers

OURS = ("torch_compile: true", "torch_compile_backend: memfine")
OPTIONS = {"MEMFINE_OPTIONS": "inner_backend=eager,rows_per_chunk=5", "MEMFINE_LOGS": "passes"}
COMMON = (
    "model_name_or_path: model", "output_dir: out", "max_steps: 3", "per_device_train_batch_size: 2",
    "learning_rate: 1.0e-2", "logging_steps: 1", 'save_strategy: "no"', "report_to: none", "use_cpu: true",
    "bf16: false",
)  # fmt: skip
LLAMA_FACTORY = (
    "stage: sft", "do_train: true", "dataset: toy", "dataset_dir: data", "template: empty", "cutoff_len: 32",
    "use_reentrant_gc: false", "overwrite_output_dir: true",
)  # fmt: skip
CHUNKED = re.compile(r"graph \d+: chunked\s+\S*layers\.(\d+)\.")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a model of two layers that records router logits, its tokenizer, and data."""
    pytest.importorskip("transformers")
    from trl_trainers import tokenizer

    tokenizer().save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": NUM_LAYERS, "output_router_logits": True, "vocab_size": WORDS}
    tiny_causal_lm("qwen3_moe", **sizes).save_pretrained(tmp_path / "model")
    words = torch.randint(0, WORDS - 4, (32, 14), generator=torch.Generator().manual_seed(0)).tolist()
    lines = [" ".join(f"w{word}" for word in row) for row in words]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    (tmp_path / "data").mkdir()
    rows = [{"instruction": line[:20], "input": "", "output": line[20:]} for line in lines]
    (tmp_path / "data" / "toy.json").write_text(json.dumps(rows))
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"toy": {"file_name": "toy.json"}}))
    return tmp_path


def run(folder: Path, program: list[str], *lines: str) -> tuple[list[float], set[int], str]:
    """Losses, numbers of the layers that were chunked, and all that was printed."""
    by_key = {line.split(":")[0]: line for line in (*COMMON, *lines)}
    (folder / "run.yaml").write_text("\n".join(by_key.values()) + "\n")
    environment = os.environ | OPTIONS | {"OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)  # the installed package, as its users have it
    done = subprocess.run(
        [sys.executable, *program], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"'loss': '?([0-9.]+)", printed)]
    assert losses
    return losses, {int(number) for number in CHUNKED.findall(printed)}, printed


def compare(folder: Path, program: list[str], *lines: str, tolerance: float = 2e-3) -> None:
    plain, none, _ = run(folder, program, *lines)
    ours, layers, printed = run(folder, program, *lines, *OURS)
    assert (none, layers) == (set(), set(range(NUM_LAYERS)))
    assert ours == pytest.approx(plain, abs=tolerance)
    assert "memfine_fx found nothing" not in printed
    assert "The others run as written" not in printed, "the first step's summary is a warning where layers are missing"


def test_trl_by_its_command_line(folder: Path) -> None:
    """`trl sft --config`, with gradient checkpointing as TRL sets it."""
    _has("trl", major=1)
    script = "import sys; from trl.cli import main; sys.argv = ['trl', 'sft', '--config', 'run.yaml']; main()"
    compare(folder, ["-c", script], "dataset_name: texts", "max_length: 16")


@pytest.mark.parametrize(
    "tuned",
    [
        ("finetuning_type: full",),
        ("finetuning_type: lora", "lora_rank: 2", "lora_target: q_proj,v_proj"),
        ("finetuning_type: lora", "lora_rank: 2", "lora_target: all"),
        ("finetuning_type: full", "disable_gradient_checkpointing: true"),
        ("finetuning_type: full", "bf16: true"),
    ],
    ids=["full", "attention", "all", "without checkpoints", "bf16"],
)
def test_llama_factory_by_its_command_line(folder: Path, tuned: tuple[str, ...]) -> None:
    """`llamafactory-cli train`, with its own function around gradient checkpoints, which are not reentrant: otherwise
    eager training loses a gradient of the router (docs/trainers.md)."""
    _has("llamafactory")
    script = "import sys; from llamafactory.cli import main; sys.argv = ['', 'train', 'run.yaml']; main()"
    compare(folder, ["-c", script], *LLAMA_FACTORY, *tuned, tolerance=2e-2 if "bf16: true" in tuned else 2e-3)


def test_llama_factory_by_the_experts_of_the_models_config(folder: Path) -> None:
    """LLaMA-Factory has no key for the experts' function; transformers reads it from the model's config.json."""
    _has("llamafactory")
    script = "import sys; from llamafactory.cli import main; sys.argv = ['', 'train', 'run.yaml']; main()"
    plain, _, printed = run(folder, ["-c", script], *LLAMA_FACTORY, "finetuning_type: full")
    assert "memfine_fx.passes] graph" not in printed
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"experts_implementation": "memfine"}))
    ours, _, printed = run(folder, ["-c", script], *LLAMA_FACTORY, "finetuning_type: full")
    assert "graph 1: chunked" in printed
    assert ours == pytest.approx(plain, abs=2e-3)


def _has(package: str, major: int = 0) -> None:
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    if int(installed.split(".")[0]) < major:
        pytest.skip(f"{package} {installed} is older than {major}.0")
