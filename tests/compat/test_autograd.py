"""Hooks on saved tensors are taken off where functorch traces, also while a compilation hides them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memfine_fx.compat.autograd import without_saved_tensor_hooks


@pytest.mark.parametrize("is_tracing", [False, True])
def test_functorch_differentiates_under_hooks_of_the_user(is_tracing: bool) -> None:
    autograd: Any = torch._C._autograd
    with torch.autograd.graph.save_on_cpu():
        before = autograd._saved_tensors_hooks_set_tracing(is_tracing)
        try:
            with pytest.raises(RuntimeError, match="saved tensor hooks"):
                torch.func.vjp(torch.sin, torch.ones(2))
            with without_saved_tensor_hooks():
                value, _ = torch.func.vjp(torch.sin, torch.ones(2))
        finally:
            autograd._saved_tensors_hooks_set_tracing(before)
        assert autograd._top_saved_tensors_default_hooks(False) is not None
    assert torch.equal(value, torch.ones(2).sin())
