"""Rewritten graphs and expert functions of one layer of each kind, as text; `make golden` writes it again.

What the other spellings compute is compared with eager code in tests/integration/test_spellings.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import memfine_fx
from benchmarks.coverage.spellings import SPELLINGS
from memfine_fx.capture.flags import SETTINGS, flags_set
from memfine_fx.capture.source import RewrittenLoops
from memfine_fx.compiler.captured_graph import LoweredRegion
from memfine_fx.compiler.pipeline import compile_graph
from memfine_fx.compiler.session import Session
from memfine_fx.compiler.sessions import open_session
from memfine_fx.demo.tiny import tiny_causal_lm
from tests.helpers import code_of

FOLDER = Path(__file__).parents[1] / "golden"


def _experts(spelling: str) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:
    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        model = tiny_causal_lm("qwen3_moe", experts_implementation=spelling)
        experts = next(module for module in model.modules() if type(module).__name__.endswith("Experts"))
        return experts, (torch.randn(24, 32), torch.rand(24, 4).topk(2).indices, torch.rand(24, 2))

    return build


def _spelling(name: str) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:
    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        layer, hidden = SPELLINGS[name]()
        return layer, (hidden,)

    return build


NAMES = (
    "gathered weights, shared expert, sigmoid router",
    "gathered weights, biases, clamped interleaved gate",
    "expert loop, where",
    "expert loop, guarded",
    "list of experts, counted",
    "list of experts, filled",
    "slots, choice",
    "every expert on every token, loop, masks",
    "every expert on every token, scatter by einsum",
    "scores on the input, bmm over all experts",
    "one-hot dispatch with capacity",
    "zero experts",
)
LAYERS = {"transformers grouped_mm": _experts("grouped_mm"), **{name: _spelling(name) for name in NAMES}}


def rewritten_text(layer: nn.Module, inputs: Sequence[Tensor]) -> str:
    """Every rewritten graph of one call, and the expert function of each region."""
    session = open_session(memfine_fx.Config(inner_backend="eager"))
    texts: list[str] = []

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = compile_graph(graph_module, example_inputs, session)
        texts.append("\n".join(["graph", *(f"    {line}" for line in code_of(graph_module))]))
        return compiled

    with flags_set(SETTINGS[0]), RewrittenLoops(layer).installed():
        torch.compile(layer, backend=backend, dynamic=True)(*inputs)
    return "\n\n".join([*texts, *_outcomes(session)]) + "\n"


def _outcomes(session: Session) -> list[str]:
    texts = []
    for outcome in session.outcomes:
        if isinstance(outcome, LoweredRegion):
            lines = [f"    {line}" for line in code_of(outcome.region.expert_fn.graph_module)]
            texts.append("\n".join([f"expert function ({outcome.region.family})", *lines]))
        else:
            texts.append(f"refused: {outcome.details}")
    return [re.sub(r"[0-9a-f]{16}/\d+", "SITE", text) for text in texts]


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the texts are those of torch 2.13")
@pytest.mark.parametrize("name", LAYERS)
def test_rewritten_graphs_read_as_committed(name: str, request: pytest.FixtureRequest) -> None:
    layer, inputs = LAYERS[name]()
    text = re.sub(r"[0-9a-f]{16}/\d+", "SITE", rewritten_text(layer, inputs))
    path = FOLDER / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.txt"
    if request.config.getoption("--refresh-golden"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "read the difference; `make golden` accepts it"
