"""The required architectures: outputs and every gradient against unmodified eager, in real models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx

import memfine_fx
from memfine_fx.demo.tiny import tiny_causal_lm
from memfine_fx.records import MoERegion
from tests.helpers import insert_identity
from tests.integration.comparison import (
    assert_no_worse_than_eager,
    assert_same_step,
    optimized_copy,
    relative_error,
    run_step,
)

FAMILIES = ("mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss", "olmoe")
NUM_MOE_LAYERS = {"deepseek_v3": 1}


def token_inputs(batch: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 64, (batch, length))
    return {"input_ids": tokens, "labels": tokens}


def chunked(model: torch.nn.Module) -> int:
    return memfine_fx.report(model).num_chunked


@pytest.mark.parametrize(
    ("family", "spelling"), [*((family, "grouped_mm") for family in FAMILIES), ("gpt_oss", "batched_mm")]
)
def test_fp32_outputs_and_gradients_equal_eager(family: str, spelling: str) -> None:
    model = tiny_causal_lm(family, experts_implementation=spelling)
    optimized = optimized_copy(model, rows_per_chunk=5)
    assert_same_step(optimized, model, token_inputs())
    assert chunked(optimized) == NUM_MOE_LAYERS.get(family, 2)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_gradient_checkpointing_keeps_gradients_equal(family: str) -> None:
    model = tiny_causal_lm(family)
    checkpointed = copy.deepcopy(model)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimized = optimized_copy(checkpointed, rows_per_chunk=5)
    assert_same_step(optimized, model, token_inputs())
    assert chunked(optimized) == NUM_MOE_LAYERS.get(family, 2)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_token_slices_give_the_same_gradients(family: str) -> None:
    model = tiny_causal_lm(family)
    assert_same_step(optimized_copy(model, axis="tokens", tokens_per_chunk=7), model, token_inputs())


def test_three_shapes_share_one_compilation() -> None:
    model = tiny_causal_lm("qwen3_moe")
    optimized = optimized_copy(model, rows_per_chunk=5)
    assert_same_step(optimized, model, token_inputs())
    graphs = memfine_fx.report(optimized).num_graphs
    for batch, length in ((3, 7), (5, 20), (4, 9)):
        assert_same_step(optimized, model, token_inputs(batch, length))
    assert memfine_fx.report(optimized).num_graphs == graphs


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_bf16_is_no_further_from_fp32_than_eager_bf16(family: str) -> None:
    """Compared on the experts alone, where the routing is an input: a flipped top-k would hide everything else."""
    torch.manual_seed(1)
    layer, hidden_size = moe_block(family)
    low = layer.to(torch.bfloat16)
    reference = copy.deepcopy(low).float()
    optimized = optimized_copy(low, rows_per_chunk=24)
    tokens = torch.randn(64, hidden_size).to(torch.bfloat16)
    index = torch.rand(64, 4).topk(2, dim=-1).indices
    weights = torch.rand(64, 2).to(torch.bfloat16)
    inputs = {"hidden_states": tokens, "top_k_index": index, "top_k_weights": weights}
    assert_no_worse_than_eager(optimized, low, reference, inputs)
    assert chunked(optimized) == 1


def moe_block(family: str) -> tuple[torch.nn.Module, int]:
    """The experts of one layer, alone, and their hidden size."""
    model = tiny_causal_lm(family, hidden_size=64, moe_intermediate_size=128, intermediate_size=128)
    blocks = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    return blocks[-1], 64


def test_router_gradients_of_the_auxiliary_loss_are_exact() -> None:
    model = tiny_causal_lm("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5)
    assert_same_step(optimized_copy(model, rows_per_chunk=5), model, token_inputs())


def test_frozen_experts_get_no_gradient_and_the_rest_is_exact() -> None:
    model = tiny_causal_lm("qwen3_moe")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    optimized = optimized_copy(model, rows_per_chunk=5)
    assert_same_step(optimized, model, token_inputs())
    assert all(p.grad is None for name, p in optimized.named_parameters() if "experts" in name)


def test_forward_without_gradients_is_that_of_eager() -> None:
    model = tiny_causal_lm("qwen3_moe")
    optimized = optimized_copy(model, rows_per_chunk=5)
    for context in (torch.no_grad, torch.inference_mode):
        inputs = token_inputs()
        with context():
            assert relative_error(optimized(**inputs).logits, model(**inputs).logits) < 1e-5


def test_switching_between_train_and_eval_keeps_results_exact() -> None:
    model = tiny_causal_lm("qwen3_moe")
    optimized = optimized_copy(model, rows_per_chunk=5)
    for mode in (True, False, True):
        assert_same_step(optimized.train(mode), model.train(mode), token_inputs())


def test_two_runs_give_the_same_bits_and_the_state_is_that_of_the_model() -> None:
    model = tiny_causal_lm("qwen3_moe")
    optimized = optimized_copy(model, rows_per_chunk=5)
    inputs = token_inputs()
    first, second = run_step(optimized, inputs), run_step(optimized, inputs)
    assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())
    assert optimized.state_dict().keys() == model.state_dict().keys()
    other = tiny_causal_lm("qwen3_moe")
    other.load_state_dict(optimized.state_dict())
    assert_same_step(optimized, other, inputs)


@pytest.mark.parametrize("inner", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_regions_put_back_as_they_were_change_nothing_at_all(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def put_back(body: fx.GraphModule, region: MoERegion, region_id: str, **_: object) -> None:
        insert_identity(body, region, f"control_{region_id.replace('/', '_')}")

    monkeypatch.setattr("memfine_fx.compiler.regions.lower_region", put_back)
    model = tiny_causal_lm("qwen3_moe")
    rewritten = optimized_copy(model, inner=inner)
    inputs = token_inputs()
    errors = run_step(rewritten, inputs).error_from(run_step(model, inputs))
    assert set(errors.values()) == {0.0}
    assert memfine_fx.report(rewritten).num_chunked == 2


@pytest.mark.parametrize(("family", "is_checkpointed"), [("qwen3_moe", False), ("gpt_oss", True)])
def test_bf16_models_train_chunked_at_the_loss_of_eager(family: str, is_checkpointed: bool) -> None:
    model = tiny_causal_lm(family).to(torch.bfloat16)
    trained = copy.deepcopy(model)
    if is_checkpointed:
        trained.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimized = optimized_copy(trained, rows_per_chunk=5)
    inputs = token_inputs()
    loss = optimized(**inputs).loss
    loss.backward()
    assert relative_error(loss, model(**inputs).loss) < 1e-2
    assert all(parameter.grad is not None for parameter in optimized.parameters())
    assert chunked(optimized) == NUM_MOE_LAYERS.get(family, 2)


@pytest.mark.slow
def test_inductor_gives_the_gradients_of_eager_in_every_shape() -> None:
    model = tiny_causal_lm("qwen3_moe")
    optimized = optimized_copy(model, inner="inductor", rows_per_chunk=5)
    for batch, length in ((2, 12), (3, 7), (5, 20)):
        assert_same_step(optimized, model, token_inputs(batch, length))
    assert chunked(optimized) == 2
