"""The list of passes: each runs in its place, is timed and dumped, and may be disabled without changing a result."""

from __future__ import annotations

import contextlib
import copy
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import memfine_fx
from memfine_fx import Config
from memfine_fx.config import PassName
from memfine_fx.errors import ConfigError
from memfine_fx.models import LoopConfig, LoopMoE
from memfine_fx.passes.pass_list import PASSES

VOCAB = 8192


class Model(nn.Module):
    """A loop that skips experts without rows, and a head of a large vocabulary."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layer = LoopMoE(LoopConfig(hidden=16, expert_width=width, num_experts=4, top_k=2, spelling="guarded"))
        self.head = nn.Linear(16, VOCAB, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.layer(self.embedding(tokens))
        return nn.functional.cross_entropy(self.head(hidden).float(), labels)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(32, (40,), generator=generator), torch.randint(VOCAB, (40,), generator=generator)


def test_the_list_names_every_pass_that_the_option_can_disable() -> None:
    assert [one.name for one in PASSES] == list(get_args(PassName))
    assert all(one.purpose and one.refuses for one in PASSES)


def test_every_pass_of_the_list_runs_somewhere() -> None:
    root = Path(memfine_fx.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in (*root.rglob("*.py"), *(root / "passes").rglob("*.py"))]
    used = {name for text in texts for name in re.findall(r'(?:run_pass|is_disabled)\(\s*"(\w+)"', text)}
    assert used == set(get_args(PassName))


@pytest.mark.parametrize("name", get_args(PassName))
def test_a_disabled_pass_changes_no_result(name: PassName) -> None:
    torch.manual_seed(0)
    eager = Model()
    config = Config(disable_passes=(name,), chunks_head=True, inner_backend="aot_eager")
    model = memfine_fx.optimize(copy.deepcopy(eager), config=config)
    expected = eager(*inputs())
    is_warned = name in ("guards", "regions")
    with pytest.warns(UserWarning, match="found no experts") if is_warned else contextlib.nullcontext():
        found = model(*inputs())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    expected.backward()
    found.backward()
    for own, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-7)
    report = memfine_fx.report(model)
    assert f"disabled passes: {name}" in report.notes
    assert report.num_chunked == (name not in ("guards", "regions"))
    assert any(head.status == "chunked" for head in report.heads) is (name != "heads")


def test_passes_are_timed_and_dumped_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFINE_DUMP", str(tmp_path))
    model = memfine_fx.optimize(Model(20), config=Config(chunks_head=True, inner_backend="aot_eager"))
    model(*inputs()).backward()
    names = ["guards", "fold_weight", "low_rank", "heads", "regions", "fuse_gradients", "partition"]
    files = sorted((path.name for path in tmp_path.glob("*_pass_*")), key=lambda name: name.split("_pass_")[1])
    dumped = [file.split("_before_")[1].removesuffix(".py") for file in files if "_before_" in file]
    assert [name for name in dict.fromkeys(dumped) if name in names] == names
    assert len(dumped) == sum("_after_" in file for file in files)
    texts = [
        next(tmp_path.glob(f"*_{moment}_regions.py")).read_text(encoding="utf-8") for moment in ("before", "after")
    ]
    assert ["memfine.experts" in text for text in texts] == [False, True]
    seconds = memfine_fx.report(model).seconds
    assert all(seconds[name] > 0 for name in names)


@pytest.mark.slow
def test_kernels_in_inductors_own_order_compute_the_same() -> None:
    torch.manual_seed(0)
    eager = Model()
    config = Config(disable_passes=("region_distance", "kernel_order"), chunks_head=True)
    model = memfine_fx.optimize(copy.deepcopy(eager), config=config)
    for one in (eager, model):
        one(*inputs()).backward()
    for own, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-7)
    assert not {"region_distance", "kernel_order"} & memfine_fx.report(model).seconds.keys()


def test_the_page_has_the_list() -> None:
    page = (Path(__file__).parents[2] / "docs" / "design.md").read_text(encoding="utf-8")
    for one in PASSES:
        assert f"| `{one.name}` | {one.form} | {one.purpose} | {one.refuses} |" in page


@pytest.mark.parametrize("value", [("unknown",), "regions", ["regions"]])
def test_an_unknown_pass_is_an_error(value: Any) -> None:
    with pytest.raises(ConfigError, match="disable_passes"):
        Config(disable_passes=value)


def test_the_variable_takes_several_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFINE_OPTIONS", "disable_passes=low_rank/kernel_order")
    assert Config.from_environment().disable_passes == ("low_rank", "kernel_order")
