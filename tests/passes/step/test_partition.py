"""Partitioning: what the backward of a checkpointed layer with a region may not compute again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import memfine_fx
from memfine_fx.compat.functorch import random_state_ops
from memfine_fx.memory.liveness import CountedInputs
from memfine_fx.memory.step import GraphStep
from memfine_fx.passes.step import partition as partition_module
from memfine_fx.passes.step.partition import StepPartitioner, counted_inputs, give_values
from tests.helpers import HIDDEN, GatheredMoE, hidden_states

Graphs = list[tuple[fx.GraphModule, fx.GraphModule]]


class AttentionAndExperts(nn.Module):
    """One layer: attention over the tokens as one sequence, then experts; the sum is normed outside."""

    def __init__(self, context_fn: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.experts = GatheredMoE()
        self.norm = nn.LayerNorm(HIDDEN)
        self.options = {} if context_fn is None else {"context_fn": context_fn}

    def layer(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).view(1, -1, 1, 3 * HIDDEN).transpose(1, 2).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + attended.transpose(1, 2).reshape(hidden.shape)
        result: Tensor = hidden + self.experts(hidden)
        return result

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.norm(checkpoint(self.layer, hidden, use_reentrant=False, **self.options))
        return result


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """Forward and backward graph of everything that is partitioned during a test."""
    seen: Graphs = []
    original = StepPartitioner.__call__

    @functools.wraps(original)
    def spy(self: StepPartitioner, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        seen.append(original(self, *args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(StepPartitioner, "__call__", spy)
    yield seen


def train(module: nn.Module) -> None:
    memfine_fx.optimize(module, config=memfine_fx.Config(inner_backend="aot_eager"))
    module(hidden_states()).sum().backward()


def called(graph_module: fx.GraphModule, name: str) -> int:
    return sum(name in str(node.target) for node in graph_module.graph.nodes if node.op == "call_function")


def attentions(graph_module: fx.GraphModule) -> int:
    """Forward attentions; one that is recomputed runs under its saved random state."""
    return called(graph_module, "attention_for_cpu.default") + called(graph_module, "run_with_rng_state")


def test_backward_of_a_checkpointed_layer_does_not_route_attend_or_run_experts_again(partitions: Graphs) -> None:
    train(AttentionAndExperts())
    ((forward, backward),) = partitions
    assert called(forward, "memfine.route") == 1 and called(backward, "memfine.route") == 0
    assert called(forward, "memfine.experts.default") == 1 and called(backward, "memfine.experts.default") == 0
    assert called(backward, "memfine.experts_backward") == 1
    assert attentions(backward) == 0
    assert called(backward, "aten.mm.default") > 0  # the projection is recomputed, as the checkpoint asks


def recomputing() -> Any:
    """A policy of the user that demands recomputation of everything."""

    def policy(context: Any, target: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def test_a_policy_of_the_user_that_demands_recomputation_of_attention_is_obeyed(partitions: Graphs) -> None:
    train(AttentionAndExperts(recomputing))
    ((_, backward),) = partitions
    assert attentions(backward) == 1
    assert called(backward, "memfine.route") == 0


def test_attention_without_a_region_is_left_to_its_checkpoint(partitions: Graphs) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.sparse = AttentionAndExperts(), AttentionAndExperts()
            self.dense.experts = nn.Identity()  # type: ignore[assignment]

        def forward(self, hidden: Tensor) -> Tensor:
            result: Tensor = self.sparse(self.dense(hidden))
            return result

    train(Both())
    ((_, backward),) = partitions
    assert attentions(backward) == 1


@pytest.mark.parametrize("frees", [True, False])
def test_tangents_count_to_the_end_of_backward_where_autograd_holds_them(
    frees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_module, "frees_tangents", lambda: frees)
    graph = fx.Graph()
    for name in ("primals_1", "mul", "tangents_1", "tangents_2"):
        graph.placeholder(name)
    tangents = ("tangents_1", "tangents_2")
    assert counted_inputs(graph) == (CountedInputs(("mul", *tangents)) if frees else CountedInputs(("mul",), tangents))


def test_two_partitioners_of_equal_options_share_compiled_code() -> None:
    one, same, other = (StepPartitioner(key=key) for key in ("1GiB", "1GiB", "2GiB"))
    assert one.uuid() == same.uuid() != other.uuid()


def test_the_record_of_backward_holds_what_is_computed_again_whether_or_not_under_a_random_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[GraphStep] = []

    def spy(*args: Any, **kwargs: Any) -> GraphStep:
        chosen.append(partition_of(*args, **kwargs))
        return chosen[-1]

    partition_of = partition_module._partition
    monkeypatch.setattr(partition_module, "_partition", spy)
    train(AttentionAndExperts(recomputing))
    (partition,) = chosen
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # up to torch 2.13 it may draw
    (again,) = [node for node in partition.modules[1].graph.nodes if attention in (node.target, *node.args)]
    held = {one.name: one.num_bytes for one in partition.backward.allocations}
    attended, _ = sorted(again.users, key=lambda user: int(user.args[1]))
    assert held[attended.name] == hidden_states().nbytes


def test_attention_that_runs_from_a_random_state_of_a_device_has_values() -> None:
    """On CUDA devices what is recomputed is told its generator by name, which the operator itself does not know."""
    graph = fx.Graph()
    state, query = graph.placeholder("rng_state"), graph.placeholder("query")
    query.meta["val"] = FakeTensorMode().from_tensor(torch.empty(1, 2, 8, 4))
    state.meta["val"] = torch.Generator()
    *_, running = random_state_ops()
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    called = graph.call_function(running, (attention, query, query, query), {"rng_state": state})
    graph.output(called)

    give_values(graph)

    out, logsumexp = called.meta["val"]
    assert (out.shape, logsumexp.shape) == ((1, 2, 8, 4), (1, 2, 8))
