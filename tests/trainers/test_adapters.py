"""LoRA by PEFT, frozen experts, and expert weights that are computed: merged, dequantised, parametrised."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfine_fx
from memfine_fx.compiler import experts_function
from memfine_fx.demo.tiny import tiny_causal_lm
from memfine_fx.memory.measure import trace_memory
from memfine_fx.models.loops import LoopConfig, LoopMoE
from memfine_fx.passes.verify.forced_choices import ForcedChoices
from tests.integration.comparison import FP32_TOLERANCE, assert_same_step, optimized_copy, relative_error

HIDDEN, NUM_EXPERTS, TOP_K, WIDTH = 16, 5, 2, 12


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(1, 64, (2, 12))
    return {"input_ids": tokens, "labels": tokens}


def lora(**settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_causal_lm("qwen3_moe", num_hidden_layers=1), peft.LoraConfig(r=2, **settings))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.trainers
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize(
    "targets", [[], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]], ids=["attention", "attention and experts"]
)
def test_adapters_train_in_one_chunked_graph(targets: list[str], is_checkpointed: bool) -> None:
    model = lora(target_modules=["q_proj", "v_proj"], target_parameters=targets)
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    optimized = optimized_copy(model, rows_per_chunk=5)
    inputs = batch()
    for _ in range(2):
        for one in (optimized, model):
            one.zero_grad()
            one(**inputs).loss.backward()
        for (name, ours), theirs in zip(optimized.named_parameters(), model.parameters(), strict=True):
            assert (ours.grad is not None) == ("lora" in name), name
            if ours.grad is not None and theirs.grad is not None:
                assert relative_error(ours.grad, theirs.grad) < FP32_TOLERANCE, name
    report = memfine_fx.report(optimized)
    assert [region.status for region in report.regions] == ["chunked"]


@pytest.mark.trainers
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_adapters_under_autocast_never_make_a_table(dtype: torch.dtype) -> None:
    """As trainers run them with `bf16=True`: adapters in fp32 on tables of either dtype."""
    model = lora(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    for parameter in model.parameters():
        parameter.data = parameter.data if parameter.requires_grad else parameter.data.to(dtype)
    optimized = optimized_copy(model, rows_per_chunk=5)
    inputs = batch()
    with torch.autocast("cpu", torch.bfloat16):
        losses = [one(**inputs).loss for one in (optimized, model)]
    losses[0].backward()
    assert relative_error(*losses) < 1e-2
    assert all((one.grad is not None) == ("lora" in name) for name, one in optimized.named_parameters())
    assert all(one.dtype is torch.float32 for one in losses)
    (region,) = memfine_fx.report(optimized).regions
    assert region.makes_tables == "each expert's tables made when it runs, low-rank terms factor by factor"


@pytest.mark.trainers
def test_checkpoints_that_run_outside_of_graphs_are_computed_again_as_they_were() -> None:
    """Dynamo compiles a few variants and then runs the model as it is; backward's recomputation is outside our call."""
    torch._dynamo.reset()
    model = lora(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    optimized = optimized_copy(model, rows_per_chunk=5)
    with torch._dynamo.config.patch(recompile_limit=1):
        for length in (12, 9):
            inputs = {name: tokens[:, :length] for name, tokens in batch().items()}
            for one in (optimized, model):
                one.zero_grad()
                one(**inputs).loss.backward()
            for (name, ours), theirs in zip(optimized.named_parameters(), model.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None), name
                if ours.grad is not None and theirs.grad is not None:
                    assert relative_error(ours.grad, theirs.grad) < FP32_TOLERANCE, name


@pytest.mark.trainers
def test_a_mask_of_padding_is_not_told_as_a_layer_that_was_refused() -> None:
    """Generation: the mask is an input of integers, as an index may be, and reaches the experts through attention."""
    optimized = optimized_copy(lora(target_parameters=["mlp.experts.gate_up_proj"]).eval(), rows_per_chunk=5)
    tokens = batch()["input_ids"]
    with torch.no_grad():
        optimized.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, do_sample=False, pad_token_id=0
        )
    assert [region.status for region in memfine_fx.report(optimized).regions] == ["chunked"]


@pytest.mark.trainers
def test_adapters_that_are_disabled_or_merged_run_as_peft_wrote_them() -> None:
    model = lora(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    optimized = optimized_copy(model, rows_per_chunk=5)
    inputs = batch()
    optimized(**inputs)
    with model.disable_adapter(), optimized.disable_adapter():
        assert relative_error(optimized(**inputs).logits, model(**inputs).logits) < FP32_TOLERANCE
    model.merge_adapter()
    optimized.merge_adapter()
    assert relative_error(optimized(**inputs).logits, model(**inputs).logits) < FP32_TOLERANCE


@pytest.mark.trainers
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["LoRA", "DoRA"])
def test_adapters_on_a_list_of_experts_train_in_one_chunked_graph(settings: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=r"experts\.\d+\.\w+", init_lora_weights=False, **settings)
    sizes = LoopConfig(hidden=HIDDEN, expert_width=WIDTH, num_experts=NUM_EXPERTS, top_k=TOP_K)
    model = peft.inject_adapter_in_model(config, LoopMoE(sizes))
    optimized = optimized_copy(model, rows_per_chunk=3)
    for _ in range(2):
        assert_same_step(optimized, model, {"hidden": torch.randn(10, HIDDEN)})
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked" and not region.why_expanded
    assert bool(region.makes_tables) == bool(settings)
    assert not any("get_lora_weight" in vars(module) for module in optimized.modules())


def test_frozen_experts_get_no_gradient_buffer_and_the_memory_model_knows() -> None:
    model = Gathered()
    frozen = copy.deepcopy(model)
    frozen.up.requires_grad_(False)
    frozen.down.requires_grad_(False)
    table_bytes = model.up.numel() * model.up.element_size()
    tokens = torch.randn(6, HIDDEN)

    def gradient_buffers(layer: nn.Module) -> int:
        optimized = optimized_copy(layer, inner="aot_eager", rows_per_chunk=3)

        def step() -> None:
            optimized.zero_grad()
            optimized(tokens).sum().backward()

        step()
        trace = trace_memory(step, torch.device("cpu"))
        foreseen.append(memfine_fx.report(optimized).predicted_peak_bytes)
        return sum(num_bytes == table_bytes for num_bytes in trace.allocation_bytes)

    foreseen: list[Any] = []
    assert gradient_buffers(model) == 2
    assert gradient_buffers(frozen) == 0
    assert foreseen[0] - foreseen[1] >= 2 * table_bytes


class Gathered(nn.Module):
    """Gathered weights; where the tables come from is where cases differ."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, HIDDEN) * 0.3)

    def tables(self) -> tuple[Tensor, Tensor]:
        return self.up, self.down

    def forward(self, x: Tensor) -> Tensor:
        weight, index = torch.softmax(self.router(x), -1).topk(TOP_K, -1)
        up, down = self.tables()
        ids = index.reshape(-1)
        inner = F.silu(torch.bmm(x.repeat_interleave(TOP_K, 0).unsqueeze(1), up[ids]))
        rows = torch.bmm(inner, down[ids]).squeeze(1) * weight.reshape(-1, 1)
        return rows.view(-1, TOP_K, HIDDEN).sum(1)


class Dequantised(Gathered):
    """int8 tables with a scale per expert and column, which is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randint(-127, 128, self.up.shape, dtype=torch.int8))
        self.scale = nn.Parameter(torch.rand(NUM_EXPERTS, 1, WIDTH) / 127)
        del self.up

    def tables(self) -> tuple[Tensor, Tensor]:
        return self.codes.to(self.scale.dtype) * self.scale, self.down


class Gate(nn.Module):
    def forward(self, table: Tensor) -> Tensor:
        return table * torch.sigmoid(table)


def parametrised() -> nn.Module:
    model = Gathered()
    nn.utils.parametrize.register_parametrization(model, "up", Gate())
    return model


def half_frozen() -> nn.Module:
    """A frozen table beside a trained one."""
    model = Gathered()
    model.up.requires_grad_(False)
    return model


@pytest.mark.parametrize("make", [Dequantised, parametrised, half_frozen])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_computed_expert_weights_get_their_gradients(make: Any, inner: str) -> None:
    model = make()
    optimized = optimized_copy(model, inner=inner, rows_per_chunk=3)
    assert_same_step(optimized, model, {"x": torch.randn(10, HIDDEN)})
    assert memfine_fx.report(optimized).num_chunked == 1


EXPERT_TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def step_of(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(**inputs).loss
    if loss.requires_grad:  # not where adapters are merged
        loss.backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    return {"loss": loss.detach(), **gradients}


def assert_experts_function_agrees(model: Any, inputs: dict[str, Tensor]) -> None:
    model.set_experts_implementation("eager")
    expected = step_of(model, inputs)
    model.set_experts_implementation("memfine")
    results = step_of(model, inputs)
    assert results.keys() == expected.keys()
    assert all(relative_error(results[name], value) < FP32_TOLERANCE for name, value in expected.items())


@pytest.mark.trainers
def test_the_experts_function_follows_the_life_of_adapters() -> None:
    peft = pytest.importorskip("peft")
    model, inputs = lora(target_modules=["q_proj"], target_parameters=EXPERT_TARGETS), batch()
    assert_experts_function_agrees(model, inputs)
    num_kinds = len(experts_function._kinds)
    assert_experts_function_agrees(model, inputs)
    assert len(experts_function._kinds) == num_kinds  # PEFT parametrizes anew at each call
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=EXPERT_TARGETS))
    model.set_adapter("second")
    assert_experts_function_agrees(model, inputs)
    with model.disable_adapter():
        assert_experts_function_agrees(model, inputs)
    model.set_adapter("default")
    model.merge_adapter()
    assert_experts_function_agrees(model, inputs)
    model.unmerge_adapter()
    assert_experts_function_agrees(model, inputs)
    merged = model.merge_and_unload()
    assert_experts_function_agrees(merged, inputs)


@pytest.mark.trainers
def test_the_experts_function_adds_adapters_one_expert_at_a_time() -> None:
    peft = pytest.importorskip("peft")
    sizes = dict(num_local_experts=32, hidden_size=128, moe_intermediate_size=256, num_hidden_layers=1)
    model = peft.get_peft_model(
        tiny_causal_lm("qwen3_moe", **sizes), peft.LoraConfig(r=2, target_parameters=EXPERT_TARGETS)
    )
    inputs = batch()

    def peak(implementation: str) -> int:
        model.set_experts_implementation(implementation)
        step_of(model, inputs)
        return trace_memory(lambda: step_of(model, inputs), torch.device("cpu")).peak_bytes

    table_bytes = 4 * 32 * 2 * 256 * 128
    assert peak("grouped_mm") > table_bytes
    assert peak("memfine") < 0.15 * peak("grouped_mm")


@pytest.mark.trainers
@pytest.mark.parametrize("way", ["experts function", "optimize"])
def test_adapted_experts_follow_a_routing_over_steps(way: str) -> None:
    model = lora(target_modules=["q_proj"], target_parameters=EXPERT_TARGETS)
    eager = copy.deepcopy(model)
    eager.set_experts_implementation("eager")
    if way == "optimize":
        memfine_fx.optimize(model, inner_backend="eager")
    else:
        model.set_experts_implementation("memfine")
    num_experts = model.get_base_model().model.layers[0].mlp.experts.num_experts
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, eager)]
    for _ in range(3):
        inputs = batch()
        ids = torch.rand(24, 1, num_experts).topk(model.config.num_experts_per_tok).indices
        with memfine_fx.replay_routing(model, ids):
            loss = model(**inputs).loss
            loss.backward()
        with ForcedChoices(lambda scores, own, ids=ids: ids.view(own.shape), num_experts):
            expected = eager(**inputs).loss
        expected.backward()
        assert relative_error(loss, expected) < FP32_TOLERANCE
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
