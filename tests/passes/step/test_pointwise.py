"""Spare: what a step without a budget computes again in backward, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy

import memfine_fx
from memfine_fx.passes.step.costly_results import costly_results
from memfine_fx.passes.step.partition import StepPartitioner
from tests.helpers import hidden_states
from tests.integration.comparison import FP32_TOLERANCE, relative_error
from tests.passes.step.test_partition import AttentionAndExperts, attentions, called


class TwoLayers(nn.Module):
    """Two layers of attention and experts, each behind a norm, without checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([AttentionAndExperts(), AttentionAndExperts()])

    def forward(self, hidden: Tensor) -> Tensor:
        for one in self.layers:
            assert isinstance(one, AttentionAndExperts)
            hidden = one.layer(nn.functional.silu(one.norm(hidden)))
        return hidden


@dataclass(frozen=True)
class Split:
    """A joint graph and what it was split into."""

    joint: fx.GraphModule
    num_results: int
    forward: fx.GraphModule
    backward: fx.GraphModule

    @property
    def saved_bytes(self) -> int:
        (results,) = self.forward.graph.find_nodes(op="output")[0].args
        saved = {node for node in results[self.num_results :] if isinstance(node, fx.Node) and node.op != "placeholder"}
        values = [node.meta["val"] for node in saved]
        return sum(int(value.numel()) * value.element_size() for value in values if isinstance(value, Tensor))


def train(module: nn.Module) -> list[Tensor | None]:
    """Gradients of the input and of all parameters."""
    torch.manual_seed(1)
    inputs = hidden_states().requires_grad_()
    module(inputs).square().sum().backward()
    return [inputs.grad, *(one.grad for one in module.parameters())]


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module, bool], Split]:
    """Trains a module one step and gives the split of its graph, as of a backend that fuses or one that does not."""

    def run(module: nn.Module, is_fused: bool) -> Split:
        seen: list[Split] = []
        original = StepPartitioner.__call__

        def spy(self: StepPartitioner, gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
            self._is_fused = is_fused
            seen.append(Split(gm, kwargs["num_fwd_outputs"], *original(self, gm, inputs, **kwargs)))
            return seen[-1].forward, seen[-1].backward

        with monkeypatch.context() as patch:
            patch.setattr(StepPartitioner, "__call__", spy)
            memfine_fx.optimize(module, config=memfine_fx.Config(inner_backend="aot_eager"))
            train(module)
        (found,) = seen
        return found

    return run


def test_elementwise_work_is_computed_again_but_neither_attention_nor_routing_nor_experts(
    split: Callable[[nn.Module, bool], Split],
) -> None:
    plain, spared = split(TwoLayers(), False), split(TwoLayers(), True)
    assert attentions(spared.forward) == 2 and attentions(spared.backward) == 0
    assert called(spared.backward, "memfine.route") == called(spared.backward, "memfine.experts.default") == 0
    assert called(spared.backward, "memfine.experts_backward") == 2
    assert 0 < spared.saved_bytes < 0.8 * plain.saved_bytes


def test_costly_results_computed_again_are_a_small_share_of_the_flops(
    split: Callable[[nn.Module, bool], Split],
) -> None:
    spared = split(TwoLayers(), True)
    results = costly_results(spared.joint.graph, spared.num_results)
    again = {
        node.name
        for node in spared.joint.graph.nodes
        if node.meta.get("recompute") is CheckpointPolicy.PREFER_RECOMPUTE
    }
    assert sum(one.flops for one in results if one.name in again) <= 0.06 * sum(one.flops for one in results)


def test_gradients_are_those_of_the_module_itself(split: Callable[[nn.Module, bool], Split]) -> None:
    module = TwoLayers()
    expected = train(module)
    module.zero_grad()
    split(module, True)
    module.zero_grad()
    for one, other in zip(train(module), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@torch.library.custom_op("memfine_tests::coin", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _coin(x: Tensor) -> Tensor:
    """An operator of a user that draws random numbers and says so."""
    return torch.randint_like(x, 2)


@torch.library.custom_op("memfine_tests::silent_coin", mutates_args=())
def _silent_coin(x: Tensor) -> Tensor:
    """As `_coin`, without saying so: torch.compile calls an operator that it does not know once."""
    return torch.randint_like(x, 2)


@_coin.register_fake
@_silent_coin.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": torch.rand_like,
    "randint_like": lambda x: torch.randint_like(x, 3),
    "randint": lambda x: torch.randint(3, x.shape).to(x),
    "bernoulli": lambda x: torch.bernoulli(x.detach().sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.detach().softmax(-1), x.shape[-1]).to(x),
    "randperm": lambda x: torch.randperm(x.shape[-1]).to(x),
    "normal": lambda x: torch.normal(x.detach(), 1.0),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "uniform_": lambda x: torch.zeros_like(x).uniform_(),
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "cond": lambda x: torch.cond(x.detach().sum() < 1e9, torch.rand_like, torch.zeros_like, (x.detach(),)),
    "custom operator": lambda x: _coin(x.detach()),
    "custom operator without a tag": lambda x: _silent_coin(x.detach()),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_are_not_drawn_again_in_backward(split: Callable[[nn.Module, bool], Split], draw: str) -> None:
    class Noisy(TwoLayers):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden * DRAWS[draw](hidden))

    module = Noisy()
    expected = train(module)
    state = torch.get_rng_state()
    module.zero_grad()
    split(module, True)
    assert torch.equal(torch.get_rng_state(), state)
    module.zero_grad()
    for gradient, other in zip(train(module), expected, strict=True):
        assert gradient is not None and other is not None and relative_error(gradient, other) < FP32_TOLERANCE


def test_checkpoints_of_the_model_decide_alone(split: Callable[[nn.Module, bool], Split]) -> None:
    plain, fused = split(AttentionAndExperts(), False), split(AttentionAndExperts(), True)
    targets = [[str(node.target) for node in one.backward.graph.nodes] for one in (plain, fused)]
    assert targets[0] == targets[1]
