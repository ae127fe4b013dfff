"""Capacity masks read through ids, and put back where no region took them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memfine_fx.passes.dataflow import target_name
from memfine_fx.passes.dispatch_masks import conceal, expose, ids_of_mask
from tests.helpers import capture


def masked(scores: Tensor) -> Tensor:
    mask = F.one_hot(scores.argmax(-1), 4)
    mask = mask * (torch.cumsum(mask, dim=-2) <= 2)
    return mask.view(-1, 1, 4).permute(2, 1, 0) + 0


def test_ids_name_the_expert_and_e_where_a_choice_was_dropped() -> None:
    mask = torch.tensor([[[0, 0, 1], [1, 0, 0]], [[0, 0, 0], [0, 1, 0]]])
    assert ids_of_mask(mask).tolist() == [[2, 0], [3, 1]]
    assert ids_of_mask(torch.zeros(0, 1, 3, dtype=torch.int64)).shape == (0, 1)


def test_readers_see_the_same_mask_through_ids() -> None:
    scores = torch.randn(2, 9, 4)
    graph_module = capture(masked, scores)
    (exposed,) = expose(graph_module)
    assert [target_name(node) for node in reversed(exposed.made)] == ["ids_of_mask", "one_hot", "getitem"]
    graph_module.recompile()
    results = [torch.fx.Interpreter(graph_module).run(*_arguments(graph_module, scores))]
    assert torch.equal(results[0][0], masked(scores))


def test_concealing_leaves_the_graph_as_it_was() -> None:
    graph_module = capture(masked, torch.randn(2, 9, 4))
    before = str(graph_module.graph)
    conceal(graph_module, expose(graph_module))
    assert str(graph_module.graph) == before


def test_plain_one_hot_masks_are_left_alone() -> None:
    graph_module = capture(lambda scores: F.one_hot(scores.argmax(-1), 4).view(-1, 1, 4) + 0, torch.randn(2, 9, 4))
    assert expose(graph_module) == []


def _arguments(graph_module: torch.fx.GraphModule, scores: Tensor) -> list[object]:
    """Tensors and sizes in the order of the placeholders."""
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    sizes = iter(scores.shape)
    return [scores if isinstance(node.meta["example_value"], Tensor) else next(sizes) for node in placeholders]
