"""Costly results of a joint graph: which they are, what they cost, which are kept first."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import memfine_fx.runtime.op  # noqa: F401  # registers the ops
from memfine_fx.passes.step.costly_results import costly_results

aten = torch.ops.aten


def joint_graph() -> fx.Graph:
    """x @ wide -> @ narrow -> experts -> @ wide -> experts -> @ wide, and a matmul of the backward."""
    graph = fx.Graph()

    def call(target: Any, shape: tuple[int, ...], *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = torch.empty(shape)
        return node

    x, wide, narrow = (graph.placeholder(name) for name in ("x", "wide", "narrow"))
    for node, shape in ((x, (8, 4)), (wide, (4, 4)), (narrow, (4, 2))):
        node.meta["val"] = torch.empty(shape)
    first = call(aten.mm.default, (8, 4), x, wide)
    second = call(aten.mm.default, (8, 2), first, narrow)
    experts = call(torch.ops.memfine.experts.default, (8, 4), first, second)
    third = call(aten.mm.default, (8, 4), call(aten.sin.default, (8, 4), experts), wide)
    experts = call(torch.ops.memfine.experts.default, (8, 4), third, second)
    last = call(aten.mm.default, (8, 4), experts, wide)
    backward = call(aten.mm.default, (4, 4), call(aten.t.default, (4, 8), last), last)
    graph.output([last, backward])
    return graph


def test_results_of_the_last_layer_come_first_then_flops_per_byte_and_later_ones() -> None:
    found = costly_results(joint_graph(), 1)
    assert [result.name for result in found] == ["mm_default_3", "mm_default_2", "mm_default_1", "mm_default"]
    assert [result.is_in_last_layer for result in found] == [True, True, False, False]
    assert [(result.flops, result.num_bytes) for result in found] == [(256, 128), (256, 128), (128, 64), (256, 128)]


def test_elementwise_work_opaque_ops_and_the_backward_are_not_costly_results() -> None:
    names = {result.name for result in costly_results(joint_graph(), 1)}
    assert not names & {"sin_default", "experts_default", "experts_default_1", "mm_default_4", "t_default"}


def test_attention_counts_its_flops_on_the_cpu_too() -> None:
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("query", "key", "value")]
    for node, length in zip(inputs, (6, 5, 5), strict=True):
        node.meta["val"] = torch.empty((2, 3, length, 4))
    attention = graph.call_function(aten._scaled_dot_product_flash_attention_for_cpu.default, tuple(inputs))
    attention.meta["val"] = (torch.empty((2, 3, 6, 4)), torch.empty((2, 3, 6)))
    graph.output([attention])
    (found,) = costly_results(graph, 1)
    products = 2 * (2 * 3 * 6 * 5 * 4)  # FLOPs of one of the two, query x key and scores x value
    assert (found.name, found.flops) == (attention.name, 2 * products)
    assert found.num_bytes == 4 * (2 * 3 * 6 * 4 + 2 * 3 * 6)
