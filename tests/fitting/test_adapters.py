"""Adapters and weights in 4 bits of models that `fit` makes: the same as a real model has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import memfine_fx
from memfine_fx.compat.bitsandbytes import scale_tensors
from memfine_fx.errors import ConfigError, MissingPackage
from memfine_fx.fitting.models import fake_model, held_tensors, num_parameters, real_model
from memfine_fx.fitting.setup import Setup, Train
from tests.fitting.models import fake_mode
from tests.fitting.test_fit import config_of

pytestmark = pytest.mark.trainers
BLOCK, SCALES_A_BLOCK = 64, 256


def needs(train: Train) -> None:
    for package in ("transformers", "peft", *(("bitsandbytes",) if train == "qlora" else ())):
        pytest.importorskip(package)


def setup_of(train: Train, **given: Any) -> Setup:
    needs(train)
    return Setup(2, 64, train=train, dtype="bf16", **given)


def described(tensors: list[torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype, bool]]:
    return [(tuple(one.shape), one.dtype, one.requires_grad) for one in tensors]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "phimoe", "granitemoe"])
@pytest.mark.parametrize("train", ["lora", "qlora"])
def test_a_fake_model_has_the_tensors_of_a_real_one(family: str, train: Train) -> None:
    setup = setup_of(train)
    config = config_of(family, num_local_experts=8)
    fake, real = fake_model(config, setup, fake_mode()), real_model(config, setup)
    assert [name for name, _ in fake.named_parameters()] == [name for name, _ in real.named_parameters()]
    assert described(held_tensors(fake)) == described(held_tensors(real))
    assert num_parameters(fake) == num_parameters(real)


def test_weights_in_4_bits_are_half_a_byte_a_number_and_their_scales() -> None:
    model = fake_model(config_of(), setup_of("qlora"), fake_mode())
    whole = fake_model(config_of(), Setup(2, 64, dtype="bf16"), fake_mode())
    kept = ("embed_tokens", "lm_head", "norm", "mlp.gate")
    packed = [one.numel() for name, one in whole.named_parameters() if not any(word in name for word in kept)]
    frozen = [one for one in model.parameters() if one.dtype is torch.uint8]
    assert sorted(one.numel() for one in frozen) == sorted(size // 2 for size in packed)
    scales = [one for part in model.modules() for one in scale_tensors(part) if one.dtype is torch.uint8]
    assert sorted(one.numel() for one in scales) == sorted(size // BLOCK for size in packed)
    floats = [one for part in model.modules() for one in scale_tensors(part) if one.dtype is torch.float32]
    of_scales = sum(-(-size // BLOCK // SCALES_A_BLOCK) for size in packed)
    offset_and_codebooks = 1 + 16 + SCALES_A_BLOCK
    assert sum(one.numel() for one in floats) == of_scales + offset_and_codebooks * len(packed)
    adapters = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert num_parameters(model) == sum(one.numel() for one in whole.parameters()) + adapters


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_linear_layers_that_transformers_loads_in_4_bits_are_those_that_are_packed(
    family: str, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    setup = setup_of("qlora")
    import transformers

    latent = dict(q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
    more: dict[str, Any] = dict(latent, n_group=1, topk_group=1, num_key_value_heads=4) if "deep" in family else {}
    config = config_of(family, num_local_experts=8, n_routed_experts=8, **more)
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    four_bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    loaded = auto.from_pretrained(tmp_path, quantization_config=four_bits, dtype=torch.bfloat16, device_map="cpu")
    ours = real_model(config, setup)
    assert linear_layers(ours) == linear_layers(loaded)


def linear_layers(model: torch.nn.Module) -> dict[str, object]:
    """By name: how the weight of a layer in 4 bits is kept."""
    named = (
        (name.removeprefix("base_model.model.").removesuffix(".base_layer"), one) for name, one in model.named_modules()
    )
    found = {name: one for name, one in named if type(one).__module__ == "bitsandbytes.nn.modules"}
    return {
        name: (described([one.weight]), described(scale_tensors(one)), one.compute_dtype, one.weight.quant_type)
        for name, one in found.items()
    }


def test_a_router_that_is_a_linear_layer_by_its_class_gets_no_adapter() -> None:
    """It returns a tuple, to which PEFT would add its product: the step fails, in eager too."""
    model = real_model(config_of("phimoe", num_local_experts=8), setup_of("lora"))
    adapted = {name for name, one in model.named_parameters() if one.requires_grad}
    assert any("q_proj" in name for name in adapted) and not any("router" in name for name in adapted)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    model(input_ids=tokens, labels=tokens).loss.backward()
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.router is a PhimoeTopKRouter, which does not"):
        real_model(config_of("phimoe", num_local_experts=8), setup_of("lora", targets=("q_proj", "router")))


def test_targets_that_are_no_layers_are_named() -> None:
    with pytest.raises(ConfigError, match=r"\['no_such_proj'\] name nothing here; linear layers: k_proj, .*q_proj.*; "):
        real_model(config_of(), setup_of("lora", targets=("no_such_proj",)))
    with pytest.raises(ConfigError, match=r"expert weights: mlp\.experts\.down_proj, mlp\.experts\.gate_up_proj$"):
        real_model(config_of(), setup_of("lora", targets=("q_porj", "mlp.experts.down_proj")))


EXPERT_WEIGHTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.mark.parametrize("others", [(), ("q_proj",)])
def test_expert_weights_among_the_targets_get_adapters(others: tuple[str, ...]) -> None:
    setup = setup_of("lora", targets=(*others, *EXPERT_WEIGHTS), lora_r=2)
    fake, real = fake_model(config_of(), setup, fake_mode()), real_model(config_of(), setup)
    assert described(held_tensors(fake)) == described(held_tensors(real))
    trained = {name: parameter for name, parameter in real.named_parameters() if parameter.requires_grad}
    of_experts = [parameter for name, parameter in trained.items() if "experts" in name]
    assert len(of_experts) == 2 * 2 * 2, "A and B for two weights in each of two layers"
    assert any("q_proj" in name for name in trained) is bool(others)
    assert all("q_proj" in name or "experts" in name for name in trained)
    num_experts, rank, hidden, width = 8, 2, 64, 64
    adapter_numbers = num_experts * rank * (hidden + 2 * width + width + hidden)
    assert sum(parameter.numel() for parameter in of_experts) == 2 * adapter_numbers


def test_expert_weights_in_4_bits_get_no_adapters() -> None:
    with pytest.raises(ConfigError, match=r"targets=\['mlp.experts.down_proj'\]: PEFT adds adapters to expert weights"):
        real_model(config_of(), setup_of("qlora", targets=("q_proj", "mlp.experts.down_proj")))


def test_a_name_of_layers_and_of_expert_weights_means_the_layers() -> None:
    config = config_of("qwen2_moe", shared_expert_intermediate_size=64)
    model = real_model(config, setup_of("lora", targets=("down_proj",)))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all("shared_expert.down_proj" in name for name in trained)


@pytest.mark.parametrize("train", ["lora", "qlora"])
def test_a_missing_package_is_named(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(train)
    missing = {"lora": "peft", "qlora": "bitsandbytes"}[train]
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingPackage, match=f"needs the package '{missing}'"):
        fake_model(config_of(), Setup(2, 64, train=train), fake_mode())


@pytest.mark.slow
def test_a_real_step_over_adapters_of_expert_weights_takes_what_was_said() -> None:
    from benchmarks.fit_accuracy import measured_peak

    setup = setup_of("lora", targets=EXPERT_WEIGHTS, lora_r=4)
    report = memfine_fx.fit(config_of(), batch=2, seq=64, train="lora", lora_r=4, targets=EXPERT_WEIGHTS, dtype="bf16")
    assert report.asked is not None and len(report.chunked) == 2
    measured = measured_peak(config_of(), setup)
    assert 0.99 * measured <= report.asked.num_bytes <= 1.03 * measured


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("seq", [256, 384])
def test_a_real_step_over_weights_in_4_bits_takes_what_was_said(family: str, seq: int) -> None:
    from benchmarks.fit_accuracy import measured_peak

    config = config_of(family, num_local_experts=8, vocab_size=128)
    needs("qlora")
    report = memfine_fx.fit(config, batch=2, seq=seq, train="qlora", dtype="bf16")
    assert report.asked is not None and len(report.chunked) == 2
    measured = measured_peak(config, Setup(2, seq, train="qlora", dtype="bf16"))
    assert 0.99 * measured <= report.asked.num_bytes <= 1.02 * measured
