"""A layer of kernels on a fake GPU: launches that sizes alone decide, and nothing that waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfine_fx.runtime import routing
from tests.runtime.kernels.cases import in_kernels

pytestmark = in_kernels
aten = torch.ops.aten
_READS_VALUES = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.is_nonzero.default, aten._unique2.default, aten.bincount.default, aten.repeat_interleave.Tensor,
}  # fmt: skip


class Synchronising(TorchDispatchMode):
    """Notes the operators that wait for a device: those that read values, and copies between it and the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if func in _READS_VALUES or len({tensor.device.type for tensor in tensors}) > 1:
            self.found.append(str(func))
        return result


def run_layer(*, rows: int, tokens: int = 64, **options: Any) -> tuple[list[str], list[str], list[str]]:
    """Names of forward's launches and of backward's, and the operators that synchronise, for K=2."""
    from memfine_fx.runtime.kernels.launches import recording
    from memfine_fx.runtime.kernels.layer import LayerOptions, run_backward, run_forward
    from memfine_fx.runtime.kernels.sorting import sort_assignments
    from memfine_fx.runtime.kernels.tiling import tiles_for

    chosen = LayerOptions(rows, tiles=tiles_for("sm_90", torch.bfloat16), **options)
    with FakeTensorMode(), torch.no_grad(), torch.device("cuda"):
        hidden = torch.empty(tokens, 256, dtype=torch.bfloat16)
        index, weight = torch.empty(tokens, 2, dtype=torch.int64), torch.empty(2 * tokens)
        params = [torch.empty(8, 256, 256, dtype=torch.bfloat16), torch.empty(8, 256, 128, dtype=torch.bfloat16)]
        with Synchronising() as mode, recording() as launches:
            found = sort_assignments(index, 8)
            out, kept = run_forward(hidden, weight, found, params, chosen)
            num_forward = len(launches)
            run_backward(out, hidden, weight, found, params, kept, chosen, [True] * 4)
    names = [one.name for one in launches]
    return names[:num_forward], names[num_forward:], mode.found


@pytest.mark.parametrize("options", ({}, {"keeps_products": True}, {"is_deterministic": True}), ids=str)
@pytest.mark.parametrize("rows", (16, 50, 128, 4096))
def test_no_operator_waits_for_the_device(rows: int, options: dict[str, bool]) -> None:
    assert run_layer(rows=rows, **options)[2] == []


def test_an_operator_that_waits_would_be_seen() -> None:
    with FakeTensorMode(), torch.device("cuda"), Synchronising() as mode:
        routing.sort_assignments(torch.empty(64, 2, dtype=torch.int64), 8)
    assert mode.found == ["aten._to_copy.default"]


@pytest.mark.parametrize(("rows", "num_windows"), ((16, 8), (50, 3), (128, 1), (4096, 1)))
@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    (({}, 2, 5), ({"keeps_products": True}, 2, 4), ({"is_deterministic": True}, 3, 6)),
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
    kernels = "gate_up down_backward down weight_gradient weight_gradient"
    assert backward == [f"{name}_kernel" for name in kernels.split()]
