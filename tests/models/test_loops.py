"""Every way of looping over the experts computes the same layer."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from memfine_fx.models import LoopConfig, LoopMoE, NaiveConfig, NaiveMoE
from memfine_fx.models.loops import LoopSpelling


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("spelling", get_args(LoopSpelling))
def test_a_loop_layer_computes_what_the_naive_one_does(spelling: LoopSpelling, top_k: int) -> None:
    naive = NaiveMoE(NaiveConfig(hidden=16, expert_width=24, num_experts=4, top_k=top_k))
    layer = LoopMoE(LoopConfig(hidden=16, expert_width=24, num_experts=4, top_k=top_k, spelling=spelling))
    layer.load_state_dict(naive.state_dict())
    for hidden in (torch.randn(11, 16), torch.randn(2, 3, 16), torch.randn(0, 16)):
        torch.testing.assert_close(layer(hidden), naive(hidden))


def test_an_unknown_spelling_is_refused() -> None:
    with pytest.raises(ValueError, match="spelling must be one of"):
        LoopConfig(spelling="recursive")  # type: ignore[arg-type]  # the point
