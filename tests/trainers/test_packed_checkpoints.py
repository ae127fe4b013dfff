"""Checkpoints in FP8 and MXFP4, which transformers dequantizes as it loads them on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import memfine_fx
from memfine_fx.demo.tiny import tiny_causal_lm

pytestmark = pytest.mark.trainers

_FP8_BLOCK = 16
_QUANTIZATION: dict[str, dict[str, Any]] = {
    "fp8": {"weight_block_size": [_FP8_BLOCK] * 2, "modules_to_not_convert": ["lm_head"]},
    "mxfp4": {"modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"]},
}


def in_fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A matrix [m,n] as DeepSeek-V3's files hold it: FP8, and a scale for each block."""
    if "proj" not in name:
        return {name: weight}
    blocks = weight.unflatten(0, (-1, _FP8_BLOCK)).unflatten(2, (-1, _FP8_BLOCK))
    scales = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    packed = (blocks / scales).to(torch.float8_e4m3fn).reshape(weight.shape)
    return {name: packed, f"{name}_scale_inv": scales[:, 0, :, 0]}


def in_mxfp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Other experts of the same shapes [E,n,m], as GPT-OSS's files hold them: 16 bytes for 32 numbers, and a scale."""
    if not name.endswith("_proj"):
        return {name: weight}
    num_experts, inner, outer = weight.shape
    return {
        f"{name}_blocks": torch.randint(0, 256, (num_experts, outer, inner // 32, 16), dtype=torch.uint8),
        f"{name}_scales": torch.randint(118, 124, (num_experts, outer, inner // 32), dtype=torch.uint8),
    }


@pytest.mark.parametrize(
    ("family", "method", "pack"), [("qwen3_moe", "fp8", in_fp8), ("gpt_oss", "mxfp4", in_mxfp4)], ids=["fp8", "mxfp4"]
)
def test_experts_of_packed_checkpoints_train_in_chunks(family: str, method: str, pack: Any, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the experts stay packed")
    pytest.importorskip("accelerate")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    tiny_causal_lm(family, num_hidden_layers=2, **sizes).save_pretrained(tmp_path)
    (weights, configuration) = tmp_path / "model.safetensors", tmp_path / "config.json"
    torch.manual_seed(0)
    packed = [pack(name, weight) for name, weight in load_file(weights).items()]
    save_file({name: part for parts in packed for name, part in parts.items()}, weights, metadata={"format": "pt"})
    fields = {"quantization_config": {"quant_method": method, **_QUANTIZATION[method]}}
    configuration.write_text(json.dumps(json.loads(configuration.read_text()) | fields))

    def step(implementation: str) -> tuple[Any, dict[str, Tensor]]:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            tmp_path, experts_implementation=implementation, dtype=torch.float32
        )
        tokens = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(0))
        model.train()(input_ids=tokens, labels=tokens).loss.backward()
        return model, {name: value.grad for name, value in model.named_parameters() if value.grad is not None}

    (_, expected), (model, gradients) = step("eager"), step("memfine")
    assert any("experts" in name for name in expected) and gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)
    assert memfine_fx.report(model).num_chunked == 2
