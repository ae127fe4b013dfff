"""Rates that tests plan by. Those of the machine would make plans, and so results of tests, follow its speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memfine_fx.compiler import compiled_graph, regions
from memfine_fx.expert_parallel import sharded
from memfine_fx.expert_parallel.bandwidth import Links
from memfine_fx.expert_parallel.groups import ExpertGroup
from memfine_fx.memory.region_bytes import RegionBytes
from memfine_fx.plan import budget, front
from memfine_fx.plan.cost import DeviceRates

__all__ = ["give_rates"]

_RATES = DeviceRates(((32, 7e10), (128, 9e10), (512, 1e11), (2048, 1e11)), copy_bytes=4e10, launch_seconds=3e-6)
_BANDWIDTH = 1e9
"""Bytes a second between ranks."""


def give_rates(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Put these rates where plans ask for the machine's, in this process.

    Args:
        put: sets an attribute; that of pytest's `monkeypatch` takes it back after the test.
    """
    for module in (budget, front, compiled_graph):
        put(module, "device_rates", _given_rates)
    put(sharded, "bandwidth_of", _given_bandwidth)
    put(sharded, "links_of", _given_links)
    put(regions, "measured_knee", _no_knee)


def _given_rates(device_type: str, dtype: torch.dtype) -> DeviceRates:
    return _RATES


def _no_knee(region: RegionBytes, dtype: torch.dtype) -> None:
    """Chunks have as many rows as where nothing is measured."""


def _given_bandwidth(ranks: ExpertGroup) -> float:
    return _BANDWIDTH


def _given_links(ranks: ExpertGroup) -> Links:
    return Links(_BANDWIDTH, _BANDWIDTH, ranks.node_ranks)
