"""transformers models whose experts run in an eager loop: switched where they offer it, else captured as written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memfine_fx
from memfine_fx.demo.tiny import tiny_causal_lm, tiny_model
from tests.integration.comparison import assert_same_step, assert_same_step_up_to_zeros, optimized_copy, run_step

SWITCHED: dict[str, dict[str, Any]] = {
    "jamba": {},
    "lfm2_moe": dict(num_dense_layers=1, layer_types=["conv", "full_attention"], moe_intermediate_size=24),
}


def token_inputs() -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 64, (2, 12))
    return {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("family", SWITCHED)
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_eager_loops_are_switched_to_a_capturable_spelling_and_reported(family: str) -> None:
    model = tiny_causal_lm(family, experts_implementation="eager", **SWITCHED[family])
    optimized = optimized_copy(model, rows_per_chunk=5)
    assert_same_step(optimized, model, token_inputs())
    report = memfine_fx.report(optimized)
    assert report.num_chunked >= 1
    assert "switched from 'eager'" in str(report)
    assert model.config._experts_implementation == "eager"  # the copy was switched, not the model


def test_explain_switches_back() -> None:
    model = tiny_causal_lm("qwen3_moe", experts_implementation="eager")
    report = memfine_fx.explain(model, **token_inputs())
    assert report.num_chunked == 2
    assert "switched from 'eager'" in report.notes[0]
    assert model.config._experts_implementation == "eager"


def dbrx() -> torch.nn.Module:
    from transformers import DbrxConfig, DbrxForCausalLM

    config = DbrxConfig(
        d_model=32,
        n_heads=2,
        n_layers=2,
        max_seq_len=64,
        vocab_size=64,
        ffn_config=dict(ffn_hidden_size=24, moe_num_experts=4, moe_top_k=2, hidden_size=32),
        attn_config=dict(kv_n_heads=2, clip_qkv=8, rope_theta=1e4),
        use_cache=False,
        pad_token_id=0,
    )
    return DbrxForCausalLM(config).train()


def test_a_loop_over_hit_experts_is_captured_as_written_also_in_a_checkpoint() -> None:
    model = dbrx()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimized = optimized_copy(model, rows_per_chunk=5)
    assert_same_step(optimized, model, token_inputs())
    report = memfine_fx.report(optimized)
    assert report.num_chunked == 2
    assert {region.family for region in report.regions} == {"loops"}


def test_weights_that_are_viewed_anew_for_every_expert_are_verified_as_one() -> None:
    report = memfine_fx.verify(dbrx(), config=memfine_fx.Config(inner_backend="eager"), **token_inputs())
    assert report.has_passed and len(report.regions) == 2, str(report)
    assert report.worst_error < 1e-5


def test_split_experts_of_jetmoe_are_chunked_and_its_attention_experts_refused() -> None:
    """Its attention experts keep one row per choice, which no [T,H] output stands for."""
    model = tiny_causal_lm("jetmoe", experts_implementation="eager")
    optimized = optimized_copy(model, rows_per_chunk=5)
    assert_same_step(optimized, model, token_inputs())
    regions = memfine_fx.report(optimized).regions
    assert [region.where.module.endswith("mlp.input_linear") for region in regions if region.status == "chunked"] == [
        True,
        True,
    ]
    assert all(region.reason for region in regions if region.status == "refused")


@pytest.mark.parametrize("family", ["phimoe", "inkling_text"])
def test_routers_that_also_weigh_something_else_keep_their_experts(family: str) -> None:
    """Maxima that scale the results (SparseMixer), weights of shared experts from one softmax with the routed ones'."""
    tiny = tiny_model(family, batch=2, length=12)
    optimized = optimized_copy(tiny.module, rows_per_chunk=5)
    state = torch.get_rng_state()
    step = run_step(optimized, tiny.inputs)
    torch.set_rng_state(state)  # SparseMixer draws its choices
    errors = step.error_from(run_step(tiny.module, tiny.inputs))
    assert max(errors.values()) < 1e-5, errors
    regions = memfine_fx.report(optimized).regions
    assert [region.status for region in regions] == ["chunked", "chunked"], str(regions)


@pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")
@pytest.mark.parametrize(
    ("family", "reason", "hint"),
    [
        ("doge", "topk: its experts are rows of a table", "no matmul to run per expert"),
        ("vitpose_backbone", "an input chooses one expert for all tokens of a sequence", "repeat the choice"),
    ],
)
def test_experts_of_other_kinds_are_named_with_place_and_hint(family: str, reason: str, hint: str) -> None:
    tiny = tiny_model(family)
    optimized = optimized_copy(tiny.module)
    if tiny.has_loss:
        assert_same_step(optimized, tiny.module, tiny.inputs)
    else:
        optimized(**tiny.inputs)
    regions = memfine_fx.report(optimized).regions
    assert regions and all(region.status == "refused" for region in regions)
    named = [region for region in regions if reason in region.reason]
    assert named and hint in named[0].hint
    assert f"modeling_{family}.py:" in named[0].where.source


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11 captures its loop outside of a graph")
@pytest.mark.parametrize(
    "capacity", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(64, marks=pytest.mark.slow)]
)
def test_switch_transformers_drop_the_same_tokens(capacity: int) -> None:
    """Encoder and decoder, experts in a ModuleDict, a capacity mask in place of ids."""
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        d_model=32,
        d_kv=16,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_heads=2,
        num_experts=4,
        vocab_size=64,
        expert_capacity=capacity,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = SwitchTransformersForConditionalGeneration(config).train()
    optimized = optimized_copy(model, rows_per_chunk=5)
    assert_same_step_up_to_zeros(optimized, model, token_inputs())
    assert memfine_fx.report(optimized).num_chunked == 2
