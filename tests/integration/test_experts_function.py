"""transformers' `experts_implementation="memfine"`: equal to the eager loop, in chunks, without a compiler."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import use_experts_implementation

import memfine_fx
from memfine_fx.compat.transformers import accept_experts_function
from memfine_fx.compiler import experts_function
from memfine_fx.errors import BudgetInfeasible, ConfigError
from memfine_fx.memory.measure import trace_memory
from memfine_fx.runtime import op

_VOCABULARY = 96
_WIDTHS = dict(
    vocab_size=_VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
    head_dim=16, max_position_embeddings=128,
)  # fmt: skip
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MEMFINE_OPTIONS", "rows_per_chunk=16")
    yield
    torch._dynamo.reset()


def qwen(implementation: str = "memfine", **fields: Any) -> PreTrainedModel:
    config = Qwen3MoeConfig(
        **{**_WIDTHS, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, **fields}
    )
    return _model(Qwen3MoeForCausalLM, config, implementation)


def gpt_oss(implementation: str = "memfine") -> PreTrainedModel:
    config = GptOssConfig(**_WIDTHS, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2)
    return _model(GptOssForCausalLM, config, implementation)


def _model(model_class: Any, config: Any, implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = model_class._from_config(config, experts_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    return model


def like(model: PreTrainedModel, implementation: str) -> PreTrainedModel:
    other = copy.deepcopy(model)
    other.set_experts_implementation(implementation)
    return other


def step(model: torch.nn.Module, call: Callable[..., Any] | None = None, length: int = 40) -> Tensors:
    """Return loss and gradients of one step, by name."""
    torch.manual_seed(1)
    ids = torch.randint(0, _VOCABULARY, (2, length))
    model.zero_grad()
    output = (model if call is None else call)(input_ids=ids, labels=ids)
    output.loss.backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    return {"loss": output.loss.detach(), **gradients}


def assert_close(results: Tensors, expected: Tensors, tolerance: float = 1e-5) -> None:
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        error = (results[name] - value).norm() / value.norm().clamp_min(1e-6)
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("build", [qwen, gpt_oss])
def test_loss_and_gradients_are_those_of_the_eager_loop(build: Callable[[], PreTrainedModel]) -> None:
    model = build()
    with mock.patch.object(op, "run_forward", wraps=op.run_forward) as run_forward:
        results = step(model)
    assert run_forward.call_count >= 3  # one for each layer; the first kind is compared once more
    assert_close(results, step(like(model, "eager")))
    for length in (2, 7, 64):
        assert_close(step(model, length=length), step(like(model, "eager"), length=length))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("casts", [True, False])
def test_in_16_bits_it_is_as_near_to_fp32_as_the_eager_loop(dtype: torch.dtype, casts: bool) -> None:
    model = qwen(num_experts=9)
    experts = model.model.layers[0].mlp.experts
    index = torch.rand(200, 9, generator=torch.Generator().manual_seed(0)).topk(2).indices

    def run(implementation: str, *, is_exact: bool = False) -> Tensors:
        model.set_experts_implementation(implementation)
        narrow = experts if is_exact or casts else copy.deepcopy(experts).to(dtype)
        with torch.autocast("cpu", dtype=dtype, enabled=casts and not is_exact):
            return routed_to(narrow, index)

    exact = run("eager", is_exact=True)

    def error(results: Tensors) -> float:
        return sum(float((results[name].float() - value).norm() / value.norm()) for name, value in exact.items())

    results, eager = run("memfine"), run("eager")
    assert {name: value.dtype for name, value in results.items()} == {
        name: value.dtype for name, value in eager.items()
    }
    assert error(results) <= 1.25 * error(eager)


def test_layers_of_one_kind_share_one_graph() -> None:
    model = qwen(num_hidden_layers=6)
    before = len(experts_function._kinds)
    step(model)
    assert len(experts_function._kinds) == before + 1


def test_kinds_live_as_long_as_their_layers() -> None:
    model = qwen(num_experts=7)
    step(model)
    kind = weakref.ref(next(iter(experts_function._kinds_of[model.model.layers[0].mlp.experts].values())))
    assert kind() is not None
    del model
    gc.collect()
    assert kind() is None


def test_evaluation_between_steps_traces_nothing_again() -> None:
    model = qwen(num_experts=11)
    step(model)
    step(model.eval())
    with mock.patch.object(experts_function, "_prepared", side_effect=AssertionError("traced again")):
        step(model.train())
        step(model.eval())
    assert memfine_fx.report(model).num_chunked == 3


def test_fp64() -> None:
    model = qwen(num_experts=13).double()
    assert_close(step(model), step(like(model, "eager")), 1e-10)
    assert memfine_fx.report(model).num_chunked == 3


def test_layers_with_other_attributes_do_not_share() -> None:
    model = gpt_oss()
    model.model.layers[1].mlp.experts.limit = 0.25
    step(model)
    model.model.layers[2].mlp.experts.alpha = 0.5  # after its first call
    assert_close(step(model), step(like(model, "eager")))


def test_frozen_experts_have_no_gradients() -> None:
    model = qwen()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down_proj" not in name)
    assert_close(step(model), step(like(model, "eager")))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model = qwen()
    expected = step(like(model, "eager"))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    if reentrant:
        model.enable_input_require_grads()
    assert_close(step(model), expected)


def test_selective_checkpoint() -> None:
    model = qwen()
    block = model.model.layers[0].mlp.experts
    hidden, weight = torch.randn(30, 32, requires_grad=True), torch.rand(30, 2, requires_grad=True)
    index = torch.randint(0, 8, (30, 1)).repeat(1, 2)
    index[:, 1] = (index[:, 0] + 1) % 8

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = operator is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    def run(context: Any) -> list[torch.Tensor]:
        output = torch.utils.checkpoint.checkpoint(
            block, hidden, index, weight, use_reentrant=False, **({} if context is None else {"context_fn": context})
        )
        return list(torch.autograd.grad(output.square().sum(), [hidden, weight, *block.parameters()]))

    selective = run(lambda: create_selective_checkpoint_contexts(policy))
    model.set_experts_implementation("eager")
    for value, expected in zip(selective, run(None), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


def test_generation_and_inference_mode() -> None:
    model = qwen().eval()
    ids = torch.randint(0, _VOCABULARY, (2, 5))
    expected = like(model, "eager").generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0), expected)
    with torch.inference_mode():
        assert torch.isfinite(model(ids).logits).all()
    assert_close(step(model), step(like(model, "eager")))  # nothing of inference mode is left


def routed_to(experts: torch.nn.Module, index: torch.Tensor) -> Tensors:
    generator, dtype = torch.Generator().manual_seed(3), next(experts.parameters()).dtype
    hidden = torch.randn(index.shape[0], 32, generator=generator).to(dtype).requires_grad_()
    weight = torch.rand(index.shape, generator=generator).to(dtype).requires_grad_()
    output = experts(hidden, index, weight)
    wanted = {"hidden": hidden, "weight": weight, **dict(experts.named_parameters())}
    gradients = torch.autograd.grad(output.square().sum(), list(wanted.values()), allow_unused=True)
    return {"output": output.detach(), **{n: g for n, g in zip(wanted, gradients, strict=True) if g is not None}}


@pytest.mark.parametrize(
    "index",
    [
        torch.zeros(50, 1, dtype=torch.int64).repeat(1, 2) + torch.tensor([0, 7]),  # all tokens to two experts
        torch.tensor([[0, 0]] * 9),  # one expert twice
        torch.tensor([[3, 5]]),  # one token
        torch.empty(0, 2, dtype=torch.int64),  # no token
    ],
)
def test_adversarial_routing(index: torch.Tensor) -> None:
    model = qwen()
    experts = model.model.layers[0].mlp.experts
    results = routed_to(experts, index)
    model.set_experts_implementation("batched_mm")
    assert_close(results, routed_to(experts, index))


def test_peak_of_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFINE_OPTIONS", "rows_per_chunk=64")
    model = qwen(num_experts=32, num_experts_per_tok=8, moe_intermediate_size=128, hidden_size=64)
    experts = model.model.layers[0].mlp.experts
    for parameter in experts.parameters():
        parameter.requires_grad_(False)
    hidden, weight = torch.randn(1024, 64, requires_grad=True), torch.rand(1024, 8, requires_grad=True)
    index = torch.rand(1024, 32).topk(8).indices

    def peak(implementation: str) -> int:
        model.set_experts_implementation(implementation)

        def run() -> None:
            torch.autograd.grad(experts(hidden, index, weight).sum(), [hidden, weight])

        run()
        return trace_memory(run, torch.device("cpu")).peak_bytes

    assert peak("memfine") < 0.1 * peak("grouped_mm")


def test_report_names_each_layer() -> None:
    model = qwen()
    step(model)
    report = memfine_fx.report(model)
    assert report.num_chunked == 3
    assert [region.where.module for region in report.regions] == [f"model.layers.{n}.mlp.experts" for n in range(3)]
    other = qwen()
    step(other)
    assert memfine_fx.report(other).num_chunked == 3


def test_options_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen()
    monkeypatch.setenv("MEMFINE_OPTIONS", "rows_per_chunk=5")
    expected = step(like(model, "eager"))
    assert_close(step(model), expected)
    assert {region.plan.rows_per_chunk for region in memfine_fx.report(model).regions if region.plan} == {5}
    monkeypatch.setenv("MEMFINE_OPTIONS", "rows_per_chunk=many")
    with pytest.raises(ConfigError, match="rows_per_chunk"):
        step(model)


def test_a_budget_makes_chunks_smaller_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen(num_hidden_layers=1)
    monkeypatch.setenv("MEMFINE_OPTIONS", "memory_budget=1KiB")
    with pytest.raises(BudgetInfeasible) as error:
        step(model)
    assert error.value.minimum_bytes > 1024
    monkeypatch.setenv("MEMFINE_OPTIONS", f"memory_budget={error.value.minimum_bytes}")
    assert_close(step(model), step(like(model, "eager")))
    assert "memfine_fx.optimize(model)" in str(memfine_fx.report(model))


def test_a_layer_that_is_refused_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen(num_experts=6)

    def mixing(self: Any, rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up + 0.1 * up.mean()

    monkeypatch.setattr(type(model.model.layers[0].mlp.experts), "_apply_gate", mixing)
    with pytest.warns(UserWarning, match='Qwen3MoeExperts runs in transformers\' "grouped_mm"'):
        results = step(model)
    assert_close(results, step(like(model, "grouped_mm")))
    assert memfine_fx.report(model).num_chunked == 0


def test_a_layer_that_reads_its_numbers_runs_all_the_same() -> None:
    class OnlyPositive(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows if rows.sum() > 0 else rows.relu()

    model = qwen(num_experts=16)
    for layer in model.model.layers:
        layer.mlp.experts.act_fn = OnlyPositive()
    with pytest.warns(UserWarning, match="does not run on fake tensors"):
        results = step(model)
    assert_close(results, step(like(model, "grouped_mm")))


def test_experts_on_several_ranks_are_refused() -> None:
    model = qwen(num_experts=14)
    for layer in model.model.layers:
        layer.mlp.experts._is_expert_parallel = True
    with pytest.warns(UserWarning, match="several ranks"):
        results = step(model)
    assert_close(results, step(like(model, "grouped_mm")))


def test_experts_in_fp8_run_in_the_kernels_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    functions = fp8.ALL_FP8_EXPERTS_FUNCTIONS
    decorated = use_experts_implementation(type("Experts", (fp8.FP8Experts,), {}), experts_interface=functions)
    experts = decorated(qwen().config, block_size=(8, 8))
    # The kernels need a GPU.
    monkeypatch.setitem(functions._global_mapping, "grouped_mm", lambda self, hidden, *_: 2 * hidden)
    hidden, index, weight = torch.randn(5, 32), torch.zeros(5, 2, dtype=torch.int64), torch.rand(5, 2)
    with pytest.warns(UserWarning, match="round its rows to FP8"):
        assert torch.equal(experts(hidden, index, weight), 2 * hidden)


def test_a_layer_whose_class_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen(num_experts=10)
    experts = type(model.model.layers[0].mlp.experts)
    eager = experts.forward.__wrapped__  # type: ignore[attr-defined]

    def doubled(self: Any, *args: Any) -> torch.Tensor:
        return 2 * eager(self, *args)  # type: ignore[no-any-return]

    monkeypatch.setattr(experts.forward, "__wrapped__", doubled)
    with pytest.warns(UserWarning, match="differ from the eager loop"):
        step(model)
    assert [region.status for region in memfine_fx.report(model).regions] == ["refused"] * 3


@pytest.mark.parametrize("backend", ["aot_eager", "memfine"])
def test_in_a_graph(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFINE_OPTIONS", "rows_per_chunk=16,inner_backend=aot_eager")
    model = qwen()
    expected = step(like(model, "eager"))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with mock.patch.object(op, "run_forward", wraps=op.run_forward) as run_forward:
        assert_close(step(model, compiled), expected)
    assert run_forward.call_count >= 3
    if backend == "memfine":
        report = memfine_fx.report(model)
        assert report.num_chunked == 3 and report.step is not None


def test_tensors_reach_a_graph_in_the_order_of_the_trace() -> None:
    model = qwen(num_experts=15)
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.act_fn = torch.nn.Sequential(torch.nn.LayerNorm(24), torch.nn.SiLU())
        experts.register_buffer("unread", torch.ones(3))
    expected = step(like(model, "eager"))
    assert_close(step(model), expected)
    assert_close(step(model, torch.compile(model, backend="aot_eager", fullgraph=True)), expected)


def test_a_graph_that_chunks_nothing_calls_the_chunked_layers() -> None:
    model = qwen()
    expected = step(like(model, "eager"))
    options = {"inner_backend": "aot_eager", "disable_passes": ("regions",)}
    compiled = torch.compile(model, backend="memfine", fullgraph=True, options=options)
    with mock.patch.object(op, "run_forward", wraps=op.run_forward) as run_forward:
        assert_close(step(model, compiled), expected)
    assert run_forward.call_count >= 3


def test_explain_reads_the_layers_and_leaves_the_model_alone() -> None:
    model = qwen()
    ids = torch.randint(0, _VOCABULARY, (2, 40))
    report = memfine_fx.explain(model, input_ids=ids, labels=ids)
    assert report.num_chunked == 3
    assert model.get_experts_implementation()[""] == "memfine"


def test_optimize_reads_the_layers_itself() -> None:
    model = qwen()
    expected = step(like(model, "eager"))
    memfine_fx.optimize(model, inner_backend="eager")
    assert_close(step(model), expected)
    report = memfine_fx.report(model)
    assert report.num_chunked == 3 and any("'memfine'" in note for note in report.notes)


def test_the_config_file_of_a_model_names_it(tmp_path: Path) -> None:
    qwen("eager").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"experts_implementation": "memfine"}))
    model = Qwen3MoeForCausalLM.from_pretrained(tmp_path)
    assert_close(step(model), step(like(model, "eager")))
    assert memfine_fx.report(model).num_chunked == 3
    model.save_pretrained(tmp_path / "saved")  # for readers that do not know the name
    assert "memfine" not in (tmp_path / "saved" / "config.json").read_text()


@pytest.mark.parametrize("first", ["memfine_fx", "transformers"])
def test_the_name_is_known_after_an_import(first: str) -> None:
    second = "transformers" if first == "memfine_fx" else "memfine_fx"
    code = (
        f"import {first}, {second}\n"
        "from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM\n"
        "config = Qwen3MoeConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8,"
        " num_key_value_heads=1, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)\n"
        "model = Qwen3MoeForCausalLM._from_config(config, experts_implementation='memfine')\n"
        "import sys, torch; assert 'memfine_fx.compiler.pipeline' not in sys.modules\n"
        "model(torch.zeros(1, 3, dtype=torch.int64)).logits.sum().backward()\n"
        "assert not {'networkx', 'torch.export._trace', 'torch._inductor.codecache'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "MEMFINE_OPTIONS": ""})


def test_no_warning_where_all_is_well() -> None:
    model = qwen(num_experts=12)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        step(model)


def test_a_model_that_knows_a_list_of_names_takes_ours() -> None:
    class Listed:
        def get_correct_experts_implementation(self, requested: str | None) -> str:
            if requested not in ("eager", "grouped_mm"):
                raise ValueError(requested)
            return requested

    module = types.SimpleNamespace(PreTrainedModel=Listed)
    accept_experts_function(module, "memfine")
    model = Listed()
    assert model.get_correct_experts_implementation("memfine") == "memfine"
    assert model.get_correct_experts_implementation("eager") == "eager"
    with pytest.raises(ValueError, match="other"):
        model.get_correct_experts_implementation("other")
