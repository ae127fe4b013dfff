"""Models of transformers whose experts the kernels run, alone and with PEFT's adapters, as they are trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memfine_fx
from benchmarks.known_models import with_adapters
from tests.kernels.cases import DEVICE, in_kernels, relative_error

pytestmark = in_kernels

_NUM_LAYERS, _VOCABULARY = 2, 64
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(intermediate_size=64, moe_intermediate_size=48, num_experts=8, head_dim=16),
    "gpt_oss": dict(intermediate_size=48, num_local_experts=8, head_dim=16),
    "mixtral": dict(intermediate_size=48, num_local_experts=8),
}


def model_of(name: str, rank: int) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[name](
        **SIZES[name], vocab_size=_VOCABULARY, hidden_size=64, num_hidden_layers=_NUM_LAYERS, num_attention_heads=4,
        num_key_value_heads=2, num_experts_per_tok=2, use_cache=False, pad_token_id=None,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if rank:
        pytest.importorskip("peft")
        model = with_adapters(model, rank)
    return model.to(DEVICE).train()


def steps_of(model: Any, forward: Any) -> list[dict[str, torch.Tensor]]:
    """Loss and gradients of each step of a short training."""
    numbers = torch.Generator().manual_seed(3)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    found = []
    for _ in range(2):
        ids = torch.randint(0, _VOCABULARY, (2, 24), generator=numbers).to(DEVICE)
        optimizer.zero_grad()
        loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        named = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        found.append({"loss": loss.detach(), **named})
        optimizer.step()
    return found


@pytest.mark.parametrize("rank", (0, 4))
@pytest.mark.parametrize("name", SIZES)
def test_published_models_train_in_the_kernels_as_in_eager(name: str, rank: int, launches: list[str]) -> None:
    eager, ours = model_of(name, rank), model_of(name, rank)
    compiled = memfine_fx.optimize(ours, config=memfine_fx.Config(rows_per_chunk=40), inner_backend="eager")
    for found, expected in zip(steps_of(ours, compiled), steps_of(eager, eager), strict=True):
        assert found.keys() == expected.keys()
        for told, one in found.items():
            assert relative_error(one, expected[told]) < 1e-5, told
    assert launches.count("down_backward_kernel") == 2 * _NUM_LAYERS * 3  # steps, and windows of 96 rows
    assert ("narrow_kernel" in launches) is (rank > 0)
