"""What regions may keep of no row is written over by no compiled backward; what always has memory may be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import fx

from memfine_fx.passes.step import keep
from memfine_fx.runtime.store import LiveRegion


def backward_of(site: str, device: str) -> fx.Graph:
    graph = fx.Graph()
    kept, grad, hidden = (graph.placeholder(name) for name in ("kept", "tangents_1", "primals_1"))
    grad.meta["val"] = torch.empty(4, 8, device=device)
    arguments = (grad, hidden, None, hidden, hidden, [hidden], site, [True], [kept], "projections")
    graph.call_function(torch.ops.memfine.experts_backward_kept.default, arguments)
    return graph


@pytest.mark.parametrize(
    ("device", "exchange", "withheld"), [("cpu", None, {0}), ("cpu", object(), set()), ("meta", None, set())]
)
def test_only_what_a_run_may_keep_of_no_row_is_withheld(
    device: str, exchange: object, withheld: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    region = SimpleNamespace(exchange=exchange, uses_kernels=False)
    region.decides_kept_rows = lambda where: LiveRegion.decides_kept_rows(region, where)  # type: ignore[arg-type]
    monkeypatch.setattr(keep, "lookup", {"layer": region}.__getitem__)
    assert keep.kept_inputs(backward_of("layer", device)) == withheld
