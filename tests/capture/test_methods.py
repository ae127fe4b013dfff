"""Which methods are rewritten: plain ones, whose source is what they run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from memfine_fx.capture.source import RewrittenLoops
from memfine_fx.capture.source.helpers import by_hand
from memfine_fx.errors import LeftoverShapes

LAYER = """
import torch

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: "unknown", index: "unknown", act=lambda rows: rows, *, scale: "unknown" = 2.0):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token = torch.where(index == e)[0]
            if token.numel() == 0:
                continue
            out.index_add_(0, token, act(expert(x[token])) * scale)
        return out
"""

Load = Callable[[str], ModuleType]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def loaded(source: str) -> ModuleType:
        path = tmp_path / "layer_of_a_test.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return loaded


def is_rewritten(layer: torch.nn.Module) -> bool:
    with RewrittenLoops(layer).installed():
        return "forward" in vars(layer)


def test_a_method_is_rewritten_for_a_call_and_computes_the_same(load: Load) -> None:
    layer = load(LAYER).Layer()
    x, index = torch.randn(5, 4), torch.tensor([0, 0, 2, 2, 0])  # nothing goes to the second expert
    expected = layer(x, index)
    with RewrittenLoops(layer).installed():
        assert vars(layer)["forward"].__code__ is not type(layer).forward.__code__
        with by_hand():
            assert torch.equal(layer(x, index), expected)
            assert torch.equal(layer(x, index, scale=4.0), 2 * expected)
        with pytest.raises(LeftoverShapes, match="not captured as a whole"):
            layer(x, index)  # as behind a graph break
    assert "forward" not in vars(layer)


def test_a_method_whose_file_was_edited_after_its_import_stays_as_it_runs(load: Load, tmp_path: Path) -> None:
    module = load(LAYER)
    (tmp_path / "layer_of_a_test.py").write_text(LAYER.replace("2.0", "3.0").replace("x[token]", "x[token].relu()"))
    assert not is_rewritten(module.Layer())


def test_names_that_are_private_to_a_class_keep_a_method_as_it_is(load: Load) -> None:
    assert not is_rewritten(load(LAYER.replace("self.experts", "self.__experts")).Layer())


@pytest.mark.parametrize(
    "source",
    [
        LAYER.replace("    def forward", "    @torch.no_grad()\n    def forward"),
        LAYER.replace("        return out", "        return out, __class__"),
    ],
    ids=["decorated", "with a closure"],
)
def test_a_method_that_is_not_plain_stays_as_it_is(load: Load, source: str) -> None:
    assert not is_rewritten(load(source).Layer())
