"""What regions may keep of no row is written over by no compiled backward; what always has memory may be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import fx

from memfine_fx.passes.step import save


def backward_of(region_id: str) -> fx.Graph:
    graph = fx.Graph()
    saved, grad, hidden = (graph.placeholder(name) for name in ("saved", "tangents_1", "primals_1"))
    arguments = (grad, hidden, None, hidden, hidden, [hidden], region_id, [True], [saved], "projections")
    graph.call_function(torch.ops.memfine.experts_backward_saved.default, arguments)
    return graph


@pytest.mark.parametrize(("decides", "withheld"), [(True, {0}), (False, set())])
def test_only_what_a_run_may_keep_of_no_row_is_withheld(
    decides: bool, withheld: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "lookup", {"layer": SimpleNamespace(decides_saved_rows=decides)}.__getitem__)
    assert save.saved_inputs(backward_of("layer")) == withheld
