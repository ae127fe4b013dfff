"""A layer of kernels on a fake GPU: launches that sizes alone decide, and nothing that waits for the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from benchmarks.gpu_dry.waiting import Waiting
from memfine_fx.kernels import experts
from memfine_fx.kernels.experts import KernelExperts, route_on_device
from memfine_fx.kernels.tables import KernelForm
from memfine_fx.records import ChunkPlan
from memfine_fx.runtime import routing
from memfine_fx.runtime.compiled_expert import SavedTensor
from memfine_fx.runtime.loop import SavedRows
from memfine_fx.runtime.routing import Routed
from memfine_fx.runtime.store import LiveRegion
from tests.kernels.cases import in_kernels

pytestmark = in_kernels


def run_layer(*, rows: int, tokens: int = 64, **options: Any) -> tuple[list[str], list[str], list[str]]:
    """Names of forward's launches and of backward's, and the operators that synchronise, for K=2."""
    from memfine_fx.kernels.launches import recording
    from memfine_fx.kernels.layer import LayerOptions, run_backward, run_forward
    from memfine_fx.kernels.sorting import sort_assignments
    from memfine_fx.kernels.tiling import tiles_for

    chosen = LayerOptions(rows, tiles=tiles_for("sm_90", torch.bfloat16), **options)
    with FakeTensorMode(), torch.no_grad(), torch.device("cuda"):
        hidden = torch.empty(tokens, 256, dtype=torch.bfloat16)
        index, weight = torch.empty(tokens, 2, dtype=torch.int64), torch.empty(2 * tokens)
        params = [torch.empty(8, 256, 256, dtype=torch.bfloat16), torch.empty(8, 256, 128, dtype=torch.bfloat16)]
        with Waiting() as mode, recording() as launches:
            found = sort_assignments(index, 8)
            out, saved = run_forward(hidden, weight, found, params, chosen)
            num_forward = len(launches)
            run_backward(out, hidden, weight, found, params, saved, chosen, [True] * 4)
    names = [one.name for one in launches]
    return names[:num_forward], names[num_forward:], mode.found


@pytest.mark.parametrize("options", ({}, {"saves_products": True}, {"is_deterministic": True}), ids=str)
@pytest.mark.parametrize("rows", (16, 50, 128, 4096))
def test_no_operator_waits_for_the_device(rows: int, options: dict[str, bool]) -> None:
    assert run_layer(rows=rows, **options)[2] == []


@pytest.mark.parametrize("saves", (False, True))
def test_a_region_of_a_compiled_model_waits_for_nothing(saves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the experts' ids to the gradients, but for what tells of its routing a step later."""
    from memfine_fx.kernels.launches import recording

    kernels = KernelExperts(KernelForm("halves", (0, 1)))
    tensor = SavedTensor((256,), torch.bfloat16)
    compiled_expert: Any = SimpleNamespace(saved=(tensor,), param_kinds=("expert", "expert"))
    region: Any = SimpleNamespace(
        compiled_expert=compiled_expert, kernels=kernels, out_dtype=torch.bfloat16, num_experts=8
    )
    monkeypatch.setattr("memfine_fx.kernels.layer.target_of", lambda device: "sm_90")
    monkeypatch.setattr(experts, "_rows", lambda routed, params, options, plan: plan.rows_per_chunk)
    plan = ChunkPlan("rows", 50, 0, 0, "")
    with FakeTensorMode(), torch.no_grad(), torch.device("cuda"):
        hidden, weight = torch.empty(64, 256, dtype=torch.bfloat16), torch.empty(64, 2)
        params = [(torch.empty(8, 256, 256, dtype=torch.bfloat16),), (torch.empty(8, 256, 128, dtype=torch.bfloat16),)]
        saved = SavedRows(compiled_expert, [torch.empty(128, 256, dtype=torch.bfloat16)]) if saves else None
        index = torch.empty(64, 2, dtype=torch.int64)
        with Waiting() as mode, recording() as launches:
            routed = Routed(hidden, weight, *route_on_device(index, 8), params, 2)
            assert LiveRegion.kernels_for(region, routed, saved) is kernels
            out = kernels.forward(region, routed, plan, saved)
            kernels.backward(out, region, routed, plan, [True] * 4, saved, [None, None])
    assert mode.found == []
    assert len(launches) == 4 + (5 if saves else 6) * 3


def test_an_operator_that_waits_would_be_seen() -> None:
    with FakeTensorMode(), torch.device("cuda"), Waiting() as mode:
        routing.sort_assignments(torch.empty(64, 2, dtype=torch.int64), 8)
    assert mode.found == ["aten._to_copy.default"]


@pytest.mark.parametrize(("rows", "num_windows"), ((16, 8), (50, 3), (128, 1), (4096, 1)))
@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    (({}, 2, 4), ({"saves_products": True}, 2, 3), ({"is_deterministic": True}, 3, 5)),
    ids=str,
)
def test_launches_follow_from_the_number_of_windows(
    options: dict[str, bool], forward: int, backward: int, rows: int, num_windows: int
) -> None:
    found_forward, found_backward, _ = run_layer(rows=rows, **options)
    assert len(found_forward) == 4 + forward * num_windows
    assert len(found_backward) == backward * num_windows


def test_a_window_of_every_row_is_one_window() -> None:
    forward, backward, _ = run_layer(rows=128)
    kernels = "count scan offsets place gate_up down"
    assert forward == [f"{name}_kernel" for name in kernels.split()]
    kernels = "gate_up down_backward down weight_gradient"
    assert backward == [f"{name}_kernel" for name in kernels.split()]
