"""Launches of the GPU kernels, with a kernel that only says where it was launched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from memfine_fx.kernels.launches import Tiles, launch


@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_a_kernel_is_launched_on_the_device_of_its_tensors(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    current, seen = ["cuda:0"], []

    @contextlib.contextmanager
    def entered(one: torch.device) -> Iterator[None]:
        current.append(str(one))
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **arguments: seen.append((grid, arguments["SIZE"], current[-1]))

    monkeypatch.setattr(torch.cuda, "device", entered)
    with FakeTensorMode():
        rows = torch.empty(3, device=device)
    launch(Kernel(), (4,), {"first_row": 0, "rows": rows}, {"SIZE": 2}, Tiles(1, 1, 1))
    assert seen == [((4,), 2, "cuda:1" if device == "cuda:1" else "cuda:0")]
    assert current == ["cuda:0"]
