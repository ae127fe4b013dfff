"""Architectures from built-in sizes, transformers configs and JSON."""

import json
from pathlib import Path

import pytest

from memfine_fx.errors import ConfigError
from memfine_planner.costs.architectures import Architecture
from memfine_planner.costs.model_configs import architecture


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("llama3_8b", 8.03, 7.5),
        ("llama3_405b", 405.9, 403.7),
        ("deepseek_v3", 671.0, 36.6),
        ("qwen3_235b_a22b", 235.1, 21.6),
        ("gpt_oss_120b", 116.8, 5.1),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, billions: float, active: float) -> None:
    arch = architecture(name)
    assert arch.params / 1e9 == pytest.approx(billions, rel=2e-3)
    assert arch.active_params / 1e9 == pytest.approx(active, rel=1e-2)


def test_latent_attention_config_of_transformers_agrees_with_the_built_in_sizes() -> None:
    config = pytest.importorskip("transformers").AutoConfig.for_model("deepseek_v3")
    assert architecture(config).params == architecture("deepseek_v3").params


def test_windows_and_moe_layers_are_read_per_layer() -> None:
    transformers = pytest.importorskip("transformers")
    oss = architecture(transformers.AutoConfig.for_model("gpt_oss"))
    assert oss.windows[:3] == (128, 0, 128)
    config = transformers.AutoConfig.for_model(
        "qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]
    )
    assert architecture(config).moe_layers == (1, 5)


def test_json_file_of_a_config_is_read_without_transformers(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100, intermediate_size=256)
    path.write_text(json.dumps(sizes | {"model_type": "llama"}))
    arch = architecture(str(path))
    assert (arch.layers, arch.head_dim, arch.ffn, arch.is_moe) == (2, 16, 256, False)


def test_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown model 'nope'; built in: deepseek_v3, .*llama3_8b"):
        architecture("nope")


def test_broken_json_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"layers": 2,\n oops}')
    with pytest.raises(ConfigError, match=r"bad\.json:2: not valid JSON"):
        architecture(str(path))


def test_sizes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="heads=6 is no multiple of kv_heads=4"):
        Architecture("x", layers=1, hidden=8, vocab=8, heads=6, kv_heads=4, head_dim=2, ffn=8)
    with pytest.raises(ConfigError, match="experts >= top_k >= 1"):
        Architecture("x", 1, 8, 8, 4, 4, 2, experts=2, top_k=4, moe_ffn=8, moe_layers=(0,))


def test_window_lowers_attention_flops() -> None:
    arch = architecture("gpt_oss_120b")
    full, windowed = sorted(arch.kind_counts, key=lambda kind: kind.window)
    assert arch.attention_flops(windowed, 4096) < 0.1 * arch.attention_flops(full, 4096)


@pytest.mark.parametrize(
    "fields", [{"layer_types": ["linear_attention", "full_attention"]}, {"mamba_d_state": 16}, {"zero_expert_num": 8}]
)
def test_layers_that_are_not_modelled_are_refused(fields: dict[str, object]) -> None:
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100, intermediate_size=256)
    with pytest.raises(ConfigError, match="only layers of softmax attention and a dense or routed FFN are modelled"):
        architecture(sizes | fields)


def test_short_names_are_read_from_a_mapping_too() -> None:
    arch = architecture({"name": "tiny", "layers": 2, "hidden": 64, "ffn": 128, "heads": 4, "vocab": 100})
    assert (arch.name, arch.head_dim, arch.gated) == ("tiny", 16, True)
    with pytest.raises(ConfigError, match=r"the model\.heads: Field required"):
        architecture({"layers": 2, "hidden": 64, "vocab": 100})


@pytest.mark.parametrize("value", ["8", 1.5, True, [1, 2]])
def test_size_of_another_kind_in_a_config_is_named(value: object, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    path.write_text(json.dumps(sizes | {"model_type": "mine", "num_experts": value}))
    with pytest.raises(ConfigError, match=r"the config of mine: num_experts=.*; expected an integer"):
        architecture(str(path))


SIZES = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
EXPERTS = {"intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"intermediate_size": -5}, "ffn=-5; expected a non-negative integer"),
        (EXPERTS | {"mlp_only_layers": 3}, "mlp_only_layers=3; expected a list of layer indices"),
        (EXPERTS | {"moe_layers": [0, 9]}, "moe_layers 9: expected different indices from 0 to 3"),
        (EXPERTS | {"first_k_dense_replace": 9}, "experts=8, but none of its 4 layers holds them"),
        (EXPERTS | {"kv_lora_rank": 16}, "qk_nope_head_dim=0; expected a positive integer"),
        (EXPERTS | {"sliding_window": -1}, r"windows\[0\]=-1; expected a non-negative integer"),
    ],
)
def test_size_that_cannot_be_is_named_with_its_file(fields: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SIZES | {"model_type": "mine"} | fields))
    with pytest.raises(ConfigError, match=rf"config\.json: .*mine: {message}"):
        architecture(str(path))
