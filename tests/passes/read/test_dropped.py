"""Ids of capacity masks, in which some choices were dropped."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from memfine_fx.passes.ops import target_name
from memfine_fx.passes.read.dropped import drop_unread_ids, ids_of_mask, insert_ids
from tests.helpers import capture


def test_ids_name_the_expert_and_e_where_a_choice_was_dropped() -> None:
    mask = torch.tensor([[[0, 0, 1], [1, 0, 0]], [[0, 0, 0], [0, 1, 0]]])
    assert ids_of_mask(mask).tolist() == [[2, 0], [3, 1]]
    assert ids_of_mask(torch.zeros(0, 1, 3, dtype=torch.int64)).shape == (0, 1)


def test_ids_that_nothing_reads_leave_the_graph_as_it_was() -> None:
    graph_module = capture(lambda scores: F.one_hot(scores.argmax(-1), 4) + 0, torch.randn(2, 9, 4))
    before = str(graph_module.graph)
    mask = next(node for node in graph_module.graph.nodes if target_name(node) == "one_hot")
    ids = insert_ids(mask)
    assert ids.meta["example_value"].shape == mask.meta["example_value"].shape[:-1]
    drop_unread_ids(graph_module)
    assert str(graph_module.graph) == before
