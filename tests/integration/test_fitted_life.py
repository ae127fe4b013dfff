"""`fit`'s smallest budget holds for a run that accumulates, evaluates, generates, saves, and resumes elsewhere.

`python -m tests.integration.test_fitted_life FAMILY FOLDER` asks `fit`, trains 15 steps and saves. With a third
argument, `resumed`, it loads what was saved and trains 15 more. The last line that it prints is JSON.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import memfine_fx
from memfine_fx.compiler import own_code, regions
from memfine_fx.config import Config
from memfine_fx.fitting.answer import analyse
from memfine_fx.fitting.setup import Setup
from memfine_fx.memory.measure import trace_memory
from tests.rates import give_rates

CPU, VOCAB, NUM_STEPS = torch.device("cpu"), 1024, 15
SETUP = Setup(batch=2, seq=128, dtype="fp32", optimizer="adamw", accumulate=2)
SIZES: dict[str, Any] = dict(
    hidden_size=128, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, vocab_size=VOCAB, num_experts=4, num_local_experts=4, num_experts_per_tok=2,
    max_position_embeddings=1024, pad_token_id=0,
)  # fmt: skip


class Run:
    """A model of transformers and its optimizer, new or from a folder."""

    def __init__(self, config: Any, folder: Path, *, is_resumed: bool) -> None:
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        auto, self.folder = transformers.AutoModelForCausalLM, folder
        self.model = auto.from_pretrained(folder) if is_resumed else auto.from_config(config, dtype=torch.float32)
        self.model.train().config.use_cache = False
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if is_resumed:
            self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))

    def train(self, step: int) -> list[float]:
        losses = [self.loss(tokens(seed, SETUP.seq)) for seed in (2 * step, 2 * step + 1)]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def loss(self, batch: torch.Tensor) -> float:
        loss = self.model(input_ids=batch, labels=batch.clone()).loss
        if loss.requires_grad:
            (loss / SETUP.accumulate).backward()
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self) -> list[float]:
        self.model.eval()
        loss = self.loss(tokens(0, SETUP.seq * 3 // 4))
        self.model.train()
        return [loss]

    def generate(self) -> list[float]:
        self.model.eval()
        chosen = self.model.generate(tokens(0, 8), max_new_tokens=3, min_new_tokens=3, do_sample=False)
        self.model.train()
        return chosen.flatten().tolist()  # type: ignore[no-any-return]  # of transformers

    def save(self) -> None:
        self.model.save_pretrained(self.folder)
        torch.save(self.optimizer.state_dict(), self.folder / "optimizer.pt")

    @property
    def static_bytes(self) -> int:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers(), *states))


def tokens(seed: int, seq: int) -> torch.Tensor:
    return torch.randint(1, VOCAB, (SETUP.batch, seq), generator=torch.Generator().manual_seed(seed))


def live(family: str, folder: Path, *, is_resumed: bool) -> dict[str, Any]:
    """Return the budget, and (what, bytes, results of ours, of the plain model) of each step, in order."""
    config = pytest.importorskip("transformers").CONFIG_MAPPING[family](**SIZES)
    if not is_resumed:
        analysis, _ = analyse(config, SETUP, Config(), plans=("least",))
        (folder / "budget").write_text(str(analysis.total("least", SETUP.batch, SETUP.seq).num_bytes))
    budget = int((folder / "budget").read_text())
    ours, plain = (Run(config, folder / name, is_resumed=is_resumed) for name in ("ours", "plain"))
    memfine_fx.optimize(ours.model, memory_budget=budget, dynamic=True)
    rows: list[tuple[str, int, list[float], list[float]]] = []
    first = NUM_STEPS + 1 if is_resumed else 1
    for step in range(first, first + NUM_STEPS):
        every = {"train": 1, "evaluate": 5, "generate": 10}
        for what in (what for what, period in every.items() if step % period == 0):
            inputs = [step] if what == "train" else []
            num_static, results = ours.static_bytes, [getattr(ours, what)]
            trace = trace_memory(functools.partial(call_first, results, *inputs), CPU, collects_garbage=False)
            rows.append((what, num_static + trace.peak_bytes, results[0], getattr(plain, what)(*inputs)))
    ours.save()
    plain.save()
    return {"budget": budget, "rows": rows}


def call_first(functions: list[Any], *inputs: int) -> None:
    """Put what the first function returns in its place."""
    functions[0] = functions[0](*inputs)


def in_new_process(*arguments: str, cache: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.integration.test_fitted_life", *arguments]
    root, variables = Path(__file__).resolve().parents[2], {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["gpt_oss", *(pytest.param(family, marks=pytest.mark.campaign) for family in ("qwen3_moe", "mixtral"))]
)
def test_thirty_steps_keep_the_smallest_budget_that_fit_named(family: str, tmp_path: Path) -> None:
    for more in ([], ["resumed"]):
        part = in_new_process(family, str(tmp_path), *more, cache=tmp_path / "cache")
        num_bytes = {what: max(row[1] for row in part["rows"] if row[0] == what) for what, *_ in part["rows"]}
        assert set(num_bytes) == {"train", "evaluate", "generate"} and max(num_bytes.values()) <= part["budget"]
        assert num_bytes["train"] >= 0.98 * part["budget"]
        for what, _, ours, plain in part["rows"]:
            assert ours == (plain if what == "generate" else pytest.approx(plain, rel=1e-4)), what


if __name__ == "__main__":
    # What compares layers with their own code, and with autograd, takes bytes that no budget bounds.
    patch = pytest.MonkeyPatch()
    patch.setattr(regions, "check_gradients", lambda *_: "")
    patch.setattr(own_code, "compare_with_own_code", lambda graph, outcomes, *_: list(outcomes))
    give_rates()
    print(json.dumps(live(sys.argv[1], Path(sys.argv[2]), is_resumed="resumed" in sys.argv)))
