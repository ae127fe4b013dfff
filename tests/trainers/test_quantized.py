"""Expert tables that bitsandbytes keeps in 4 bits, and LoRA of PEFT on expert tables: the memory of one expert's."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import memfine_fx
from benchmarks.formats import LIST, check
from memfine_fx.demo.tiny import tiny_causal_lm
from memfine_fx.memory.measure import trace_memory
from memfine_fx.models.loops import LoopConfig, LoopMoE
from tests.integration.comparison import BF16_FACTOR, FP32_TOLERANCE, assert_same_step, optimized_copy, relative_error

NUM_EXPERTS, HIDDEN, WIDTH = 32, 64, 64
SIZES = {
    "num_experts": NUM_EXPERTS,
    "num_local_experts": NUM_EXPERTS,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "moe_intermediate_size": WIDTH,
}
TABLE_BYTES = 4 * NUM_EXPERTS * HIDDEN * WIDTH

CPU = torch.device("cpu")

pytestmark = pytest.mark.trainers


def model() -> Any:
    return tiny_causal_lm("qwen3_moe", **SIZES)


def in_4_bits(**settings: Any) -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes.nn.parametrize")
    whole = model().requires_grad_(False)
    whole.model.embed_tokens.weight.requires_grad_(True)
    for layer in whole.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            bitsandbytes.replace_parameter_4bit(layer.mlp.experts, name, **settings)
    return whole  # type: ignore[no-any-return]


def tables_of(whole: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(layer.mlp.experts, name) for layer in whole.model.layers for name in ("gate_up_proj", "down_proj")]  # type: ignore[union-attr]


class OfPackedBlocks(nn.Module):
    """MXFP4 as GPT-OSS's files hold it, made whole by transformers' function when it is read."""

    def __init__(self, scales: Tensor) -> None:
        super().__init__()
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.make_whole = importlib.import_module("transformers.integrations.mxfp4").convert_moe_packed_tensors

    def forward(self, blocks: Tensor) -> Tensor:
        return self.make_whole(blocks, self.scales, dtype=torch.float32)  # type: ignore[no-any-return]


class OfScaledBlocks(nn.Module):
    """FP8 in blocks as DeepSeek-V3's files hold it, made whole by transformers' function when it is read."""

    def __init__(self, scales: Tensor) -> None:
        super().__init__()
        self.register_buffer("scales", scales)
        self.make_whole = importlib.import_module("transformers.integrations.finegrained_fp8")._dequantize_fp8_weight

    def forward(self, floats: Tensor) -> Tensor:
        return self.make_whole(floats, self.scales, (32, 32), torch.float32)  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """W + A B, a matrix each for every expert."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        num_experts, width_in, width_out = table.shape
        self.a = nn.Parameter(torch.randn(num_experts, width_in, 2) / 8)
        self.b = nn.Parameter(torch.randn(num_experts, 2, width_out) / 8)

    def forward(self, table: Tensor) -> Tensor:
        return table + self.a @ self.b


def in_mxfp4() -> Any:
    pytest.importorskip("transformers.integrations.mxfp4")
    whole = tiny_causal_lm("gpt_oss", **SIZES, intermediate_size=WIDTH).requires_grad_(False)
    whole.model.embed_tokens.weight.requires_grad_(True)
    for experts, name in tables_of(whole):
        _, width_in, width_out = getattr(experts, name).shape
        shape = (NUM_EXPERTS, width_out, width_in // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        setattr(experts, name, nn.Parameter(blocks, requires_grad=False))
        scales = torch.randint(118, 123, shape, dtype=torch.uint8)
        parametrize.register_parametrization(experts, name, OfPackedBlocks(scales), unsafe=True)
    return whole


def in_fp8() -> Any:
    pytest.importorskip("transformers.integrations.finegrained_fp8")
    whole = model().requires_grad_(False)
    whole.model.embed_tokens.weight.requires_grad_(True)
    for experts, name in tables_of(whole):
        wide = getattr(experts, name).data
        blocks = wide.unflatten(2, (-1, 32)).unflatten(1, (-1, 32))
        scales = blocks.abs().amax(dim=(2, 4)) / 448
        packed = (blocks / scales[:, :, None, :, None]).reshape(wide.shape).to(torch.float8_e4m3fn)
        setattr(experts, name, nn.Parameter(packed, requires_grad=False))
        parametrize.register_parametrization(experts, name, OfScaledBlocks(scales), unsafe=True)
    return whole


def adapted(whole: Any) -> Any:
    for experts, name in tables_of(whole):
        parametrize.register_parametrization(experts, name, Adapted(getattr(experts, name)))
    return whole


def with_lora(**settings: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings = {"r": 2, "target_modules": [], "target_parameters": targets} | settings
    adapted = peft.get_peft_model(model(), peft.LoraConfig(**settings))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return adapted  # type: ignore[no-any-return]


def experts_in_4_bits(adapted: nn.Module) -> list[nn.Module]:
    """The tables below PEFT's adapters, packed by bitsandbytes; their modules."""
    bitsandbytes = pytest.importorskip("bitsandbytes.nn.parametrize")
    found = [one for one in adapted.modules() if isinstance(one._parameters.get("down_proj"), nn.Parameter)]
    for module in found:
        for name in ("gate_up_proj", "down_proj"):
            bitsandbytes.replace_parameter_4bit(module, name)
    return found


def step(one: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    one.zero_grad()
    loss: Tensor = one(**inputs).loss
    loss.backward()
    return loss


@pytest.mark.parametrize(
    "make",
    [
        lambda: in_4_bits(quant_type="nf4"),
        lambda: in_4_bits(quant_type="fp4"),
        lambda: in_4_bits(compress_statistics=True),
        with_lora,
        lambda: with_lora(use_rslora=True),
        lambda: with_lora(target_modules=["q_proj", "v_proj", "lm_head"]),
        in_mxfp4,
        lambda: adapted(in_mxfp4()),
        in_fp8,
        lambda: adapted(in_fp8()),
        lambda: adapted(in_4_bits()),
    ],
    ids=[
        "nf4",
        "fp4",
        "nf4 twice",
        "LoRA",
        "rsLoRA",
        "LoRA beside",
        "mxfp4",
        "mxfp4 LoRA",
        "fp8",
        "fp8 LoRA",
        "nf4 LoRA",
    ],
)
def test_one_experts_tables_exist_at_a_time(make: Any) -> None:
    eager = make()
    optimized = optimized_copy(copy.deepcopy(eager), rows_per_chunk=16)
    tokens = torch.randint(1, 64, (2, 12))
    inputs = {"input_ids": tokens, "labels": tokens}
    for _ in range(2):
        assert relative_error(step(optimized, inputs), step(eager, inputs)) < FP32_TOLERANCE
        for (name, ours), theirs in zip(optimized.named_parameters(), eager.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None and theirs.grad is not None:
                assert relative_error(ours.grad, theirs.grad) < FP32_TOLERANCE, name
    regions = memfine_fx.report(optimized).regions
    assert [one.status for one in regions] == ["chunked"] * 2
    assert all(one.makes_tables and not one.why_expanded for one in regions)
    cpu = torch.device("cpu")
    assert trace_memory(lambda: step(eager, inputs), cpu).has_allocation_of(TABLE_BYTES)
    assert not trace_memory(lambda: step(optimized, inputs), cpu).has_allocation_of(TABLE_BYTES // 8)
    hooks = [hook for module in optimized.modules() for hook in module._forward_pre_hooks.values()]
    assert "_nothing" not in {getattr(hook, "__name__", "") for hook in hooks}


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_tables_of_a_class_of_their_own_run_as_they_are(name: str) -> None:
    """torchao's tensors have rules for an expert's own matmul only, so the loop over experts must stay what it is."""
    torchao = pytest.importorskip("torchao.quantization")
    eager = tiny_causal_lm("qwen3_moe", num_hidden_layers=1).requires_grad_(False)
    eager.model.embed_tokens.weight.requires_grad_(True)
    eager.set_experts_implementation("eager")
    paths = [
        path for path, _ in eager.named_parameters() if path.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    torchao.quantize_(eager, torchao.FqnToConfig(dict.fromkeys(paths, getattr(torchao, name)())), filter_fn=None)
    optimized = optimized_copy(copy.deepcopy(eager), rows_per_chunk=16)
    tokens = torch.randint(1, 64, (2, 12))
    inputs = {"input_ids": tokens, "labels": tokens}
    with pytest.warns(UserWarning, match="nothing to chunk"):
        assert relative_error(step(optimized, inputs), step(eager, inputs)) < FP32_TOLERANCE
    ours, theirs = (one.get_input_embeddings().weight.grad for one in (optimized, eager))
    assert relative_error(ours, theirs) < FP32_TOLERANCE
    notes = memfine_fx.report(optimized).notes
    assert any("experts stay in their eager loop, because their tables are" in note for note in notes), notes


def test_adapters_of_peft_on_tables_in_4_bits_are_exact_and_small() -> None:
    """Beside PEFT on the same tables made whole: over tables in 4 bits, PEFT 0.21 leaves out an adapter of its own, and
    its second step fails."""
    eager = with_lora()
    quantized = copy.deepcopy(eager)
    packed = experts_in_4_bits(quantized)
    whole = [one for one in eager.modules() if isinstance(one._parameters.get("down_proj"), nn.Parameter)]
    for module, source in zip(whole, packed, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            getattr(module, name).data.copy_(getattr(source, name))
    optimized = optimized_copy(quantized, rows_per_chunk=16)
    tokens = torch.randint(1, 64, (2, 12))
    inputs = {"input_ids": tokens, "labels": tokens}
    theirs = {name: one for name, one in eager.named_parameters() if one.requires_grad}
    for _ in range(2):
        assert relative_error(step(optimized, inputs), step(eager, inputs)) < FP32_TOLERANCE
        ours = {name: one for name, one in optimized.named_parameters() if one.requires_grad}
        assert ours.keys() == theirs.keys() and len(ours) == 8
        for name, parameter in ours.items():
            assert parameter.grad is not None and theirs[name].grad is not None
            assert relative_error(parameter.grad, theirs[name].grad) < FP32_TOLERANCE, name
    regions = memfine_fx.report(optimized).regions
    made = "each expert's tables made when it runs, low-rank terms factor by factor"
    assert [one.makes_tables for one in regions] == [made] * 2
    cpu = torch.device("cpu")
    assert not trace_memory(lambda: step(optimized, inputs), cpu).has_allocation_of(TABLE_BYTES // 8)


def list_in_4_bits(*, dtype: torch.dtype = torch.float32, **settings: Any) -> LoopMoE:
    """A list of experts whose linear layers are bitsandbytes'."""
    modules = pytest.importorskip("bitsandbytes").nn
    layer = LoopMoE(LoopConfig(hidden=HIDDEN, expert_width=WIDTH, num_experts=8, top_k=2))
    for expert in layer.experts:
        for name, linear in list(expert.named_children()):
            packed = modules.Linear4bit(linear.in_features, linear.out_features, bias=False, **settings)
            packed.load_state_dict(linear.state_dict())
            setattr(expert, name, packed.to("cpu"))  # packs it
    return layer.to(dtype)


def with_lora_on_the_list(layer: LoopMoE) -> LoopMoE:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=r"experts\.\d+\.\w+", init_lora_weights=False)
    return peft.inject_adapter_in_model(config, layer)  # type: ignore[no-any-return]


@pytest.mark.parametrize("adapts", [False, True], ids=["frozen", "LoRA"])
@pytest.mark.parametrize(
    "settings",
    [{"quant_type": "nf4"}, {"quant_type": "fp4", "compress_statistics": False}],
    ids=["nf4 twice", "fp4"],
)
def test_experts_of_a_list_in_4_bits_are_made_one_at_a_time(settings: dict[str, Any], adapts: bool) -> None:
    layer = list_in_4_bits(**settings)
    layer = with_lora_on_the_list(layer) if adapts else layer
    optimized = optimized_copy(layer, rows_per_chunk=8)
    hidden = {"hidden": torch.randn(24, HIDDEN)}
    for _ in range(2):
        assert_same_step(optimized, layer, hidden)
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked" and region.makes_tables and not region.why_expanded, str(region)
    optimized(**hidden).sum().backward()  # compiles for tokens without gradients
    trace = trace_memory(lambda: optimized(**hidden).sum().backward(), torch.device("cpu"))
    assert trace.peak_bytes < 8 * 3 * 4 * HIDDEN * WIDTH / 2  # of all experts' matrices
    layer.gate.weight.data.zero_()  # all rows to the same experts, the others empty
    optimized.gate.weight.data.zero_()
    assert_same_step(optimized, layer, hidden)
    assert not any("forward" in vars(one) for one in optimized.experts.modules())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("LoRA (PEFT)", "qwen3_moe"),
        ("NF4 + LoRA (PEFT)", "qwen3_moe"),
        ("NF4 + LoRA", "deepseek_v3"),
        ("MXFP4 + LoRA", "gpt_oss"),
        ("FP8 in blocks + LoRA", "deepseek_v3"),
        ("int8 + LoRA", "mixtral"),
        ("list: NF4 + LoRA (Linear4bit, PEFT)", LIST),
    ],
)
def test_adapters_in_bf16_are_no_further_from_fp32_than_the_model_as_written(name: str, family: str) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    cell = check(name, family)
    assert cell.state == "local" and cell.error < FP32_TOLERANCE, cell
    assert cell.bf16 is not None and cell.bf16 < BF16_FACTOR, cell


def test_the_experts_function_dequantizes_one_expert_at_a_time() -> None:
    eager = in_4_bits()
    chunked = copy.deepcopy(eager)
    eager.set_experts_implementation("eager")
    chunked.set_experts_implementation("memfine")
    tokens = torch.randint(1, 64, (2, 12))

    def step(whole: Any) -> tuple[float, Tensor, int]:
        def run() -> None:
            whole.zero_grad()
            whole(input_ids=tokens, labels=tokens).loss.backward()

        run()
        gradient = whole.model.embed_tokens.weight.grad.clone()
        return whole(input_ids=tokens, labels=tokens).loss.item(), gradient, trace_memory(run, CPU).peak_bytes

    (loss, gradient, peak), (eager_loss, eager_gradient, eager_peak) = step(chunked), step(eager)
    assert loss == pytest.approx(eager_loss, rel=1e-5)
    assert relative_error(gradient, eager_gradient) < FP32_TOLERANCE
    report = memfine_fx.report(chunked)
    assert [region.where.module for region in report.regions] == [f"model.layers.{n}.mlp.experts" for n in range(2)]
    assert all("each expert's tables" in region.makes_tables for region in report.regions)
    assert peak < eager_peak - TABLE_BYTES
