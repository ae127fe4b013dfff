"""Regions of a compiled model whose experts the kernels run, against the same model in eager."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import memfine_fx
from memfine_fx.compiler.sessions import sessions
from memfine_fx.kernels import choice
from memfine_fx.kernels.experts import KernelExperts
from memfine_fx.memory.liveness import Call
from memfine_fx.memory.measure import trace_memory
from memfine_fx.memory.region_bytes import ChunkSize
from memfine_fx.models.gpt_oss import GptOssConfig, GptOssMoE
from memfine_fx.models.loops import LoopConfig, LoopMoE
from memfine_fx.models.mixtral import MixtralConfig, MixtralMoE
from memfine_fx.models.variants import VariantConfig, VariantMoE
from memfine_fx.records import ChunkPlan
from memfine_fx.runtime.store import LiveRegion, lookup
from tests.kernels.cases import DEVICE, in_kernels, relative_error
from tests.quantized import dequantized

pytestmark = in_kernels


def layer() -> MixtralMoE:
    config = MixtralConfig(hidden=32, expert_width=24, num_experts=4, top_k=2, spelling="gathered")
    return MixtralMoE(config).to(DEVICE)


def step(model: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = hidden.clone().requires_grad_()
    out = model(hidden)
    out.square().sum().backward()
    return out, hidden.grad, *(parameter.grad for parameter in model.parameters())


def compare(eager: torch.nn.Module, inner_backend: str = "eager", **options: Any) -> None:
    """A step of the layer in kernels against one in eager; some variants have parameters that they do not use."""
    eager, config = eager.to(DEVICE), memfine_fx.Config(**options)
    model = memfine_fx.optimize(copy.deepcopy(eager), config=config, inner_backend=inner_backend)
    hidden = torch.randn(11, 32, device=DEVICE)
    for found, expected in zip(step(model, hidden), step(eager, hidden), strict=True):
        assert (found is None) is (expected is None)
        assert found is None or relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("rows_per_chunk", (7, 64))
def test_region_runs_in_kernels_and_is_the_eager_layer(rows_per_chunk: int, launches: list[str]) -> None:
    compare(layer(), rows_per_chunk=rows_per_chunk)
    num_windows = 4 if rows_per_chunk == 7 else 1
    assert launches.count("weight_gradient_kernel") == num_windows


class ReluSquared(torch.nn.Module):
    """Experts without a gate: relu squared between two projections, one expert after the other."""

    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.router = torch.nn.Linear(32, 4, bias=False)
        self.up = torch.nn.Parameter(torch.randn(4, 24, 32) * 0.3)
        self.down = torch.nn.Parameter(torch.randn(4, 32, 24) * 0.3)
        self.up_bias = torch.nn.Parameter(torch.randn(4, 24)) if has_bias else None
        self.down_bias = torch.nn.Parameter(torch.randn(4, 32)) if has_bias else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight, index = self.router(hidden).softmax(-1).topk(2, -1)
        out = torch.zeros_like(hidden)
        for expert in range(4):
            token, choice = torch.where(index == expert)
            rows = hidden[token] @ self.up[expert].t()
            if self.up_bias is not None:
                rows = rows + self.up_bias[expert]
            rows = torch.relu(rows).square() @ self.down[expert].t()
            if self.down_bias is not None:
                rows = rows + self.down_bias[expert]
            out = out.index_add(0, token, rows * weight[token, choice, None])
        return out


class Activated(torch.nn.Module):
    """Experts with any activation: of gate and up in one table, or of one projection."""

    def __init__(self, activation: Callable[..., torch.Tensor], num_projections: int = 2) -> None:
        super().__init__()
        self.activation, self.num_projections = activation, num_projections
        self.router = torch.nn.Linear(32, 4, bias=False)
        self.projections = torch.nn.Parameter(torch.randn(4, 24 * num_projections, 32) * 0.3)
        self.down = torch.nn.Parameter(torch.randn(4, 32, 24) * 0.3)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight, index = self.router(hidden).softmax(-1).topk(2, -1)
        out = torch.zeros_like(hidden)
        for expert in range(4):
            token, choice = torch.where(index == expert)
            products = hidden[token] @ self.projections[expert].t()
            parts = products.chunk(2, dim=-1) if self.num_projections == 2 else (products,)
            rows = self.activation(*parts) @ self.down[expert].t()
            out = out.index_add(0, token, rows * weight[token, choice, None])
        return out


def variant(name: Any) -> VariantMoE:
    return VariantMoE(VariantConfig(name, hidden=32, expert_width=24, num_experts=4))


OTHERS = {
    "geglu": lambda: variant("geglu"),
    "biased": lambda: variant("biased"),
    "clamped": lambda: variant("interleaved"),
    "gpt_oss": lambda: GptOssMoE(GptOssConfig(32, 24, 4, 2, spelling="gathered")),
    "relu2": lambda: ReluSquared(False),
    "relu2 with biases": lambda: ReluSquared(True),
}


EVERY: dict[str, Callable[[], torch.nn.Module]] = {"mixtral": layer, **OTHERS}


def a_list() -> LoopMoE:
    return LoopMoE(LoopConfig(hidden=32, expert_width=24, num_experts=4, top_k=2))


EVERY["list"] = a_list


@pytest.mark.parametrize("name", OTHERS)
def test_other_experts_run_in_kernels_and_are_the_eager_layer(name: str, launches: list[str]) -> None:
    compare(OTHERS[name](), rows_per_chunk=7)
    assert launches.count("weight_gradient_kernel") == 4


@pytest.mark.parametrize("name", EVERY)
def test_kept_products_are_those_of_the_kernels(name: str, launches: list[str]) -> None:
    """With room for all, backward multiplies by gate and up no second time."""
    compare(EVERY[name](), "aot_eager", rows_per_chunk=7, memory_budget="1GiB")
    assert (launches.count("gate_up_kernel"), launches.count("down_backward_kernel")) == (4, 4)
    assert launches.count("place_kernel") == 1  # sorted where the rows are


functional = torch.nn.functional
GATED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "clamped at 0.5": lambda gate, up: functional.silu(gate.clamp(max=0.5)) * up.clamp(-0.5, 0.5),
    "quick gelu": lambda gate, up: up * gate * torch.sigmoid(1.702 * gate),
    "relu2": lambda gate, up: functional.relu(gate).pow(2) * (up + 1),
    "tanh": lambda gate, up: torch.tanh(gate) * up - 0.5 * gate,
    "where": lambda gate, up: torch.where(gate > up, functional.gelu(gate), up / (1 + gate.abs())),
    "exp": lambda gate, up: torch.exp(-gate.square()) * functional.gelu(up, approximate="tanh"),
    "up first": lambda gate, up: functional.leaky_relu(up, 0.1) * gate,
}
UNGATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "silu": functional.silu,
    "relu": functional.relu,
    "rational": lambda products: products / (products * products + 1).sqrt(),
}


@pytest.mark.parametrize("saves", (False, True))
@pytest.mark.parametrize("name", [*GATED, *UNGATED])
def test_any_pointwise_activation_is_written_for_the_kernels(name: str, saves: bool, launches: list[str]) -> None:
    inner = "aot_eager" if saves else "eager"
    eager = Activated(GATED[name]) if name in GATED else Activated(UNGATED[name], 1)
    compare(eager, inner, rows_per_chunk=7, memory_budget="1GiB" if saves else None)
    assert launches.count("gate_up_kernel") == (4 if saves else 8)


@pytest.mark.parametrize(
    "activation",
    (
        lambda gate, up: gate.cumsum(-1) * up,
        lambda gate, up: gate * up.mean(-1, keepdim=True),
        lambda gate, up: torch.lgamma(gate.abs() + 1) * up,
        lambda gate, up: gate + 0 * up.new_tensor([float("inf")]).clamp(max=1.0),
    ),
)
def test_experts_that_cannot_be_written_for_the_kernels_keep_their_bodies(
    activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], launches: list[str]
) -> None:
    compare(Activated(activation), rows_per_chunk=7)
    assert launches == []


def save_of_first(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the plan."""
    plan_for = LiveRegion.plan_for

    def chosen(region: LiveRegion, num_tokens: int) -> ChunkPlan:
        return replace(plan_for(region, num_tokens), num_saved_rows=num_rows)

    monkeypatch.setattr(LiveRegion, "plan_for", chosen)


@pytest.mark.parametrize("name", ["mixtral", "clamped", "relu2 with biases"])
@pytest.mark.parametrize(("num_saved", "num_again"), [(0, 4), (3, 3), (7, 3), (20, 1), (22, 0)])
def test_products_of_the_first_rows_are_kept(
    name: str, num_saved: int, num_again: int, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 22 rows in windows of 7: windows end where what is kept does, and only those behind are multiplied again."""
    save_of_first(num_saved, monkeypatch)
    compare(EVERY[name](), "aot_eager", rows_per_chunk=7, memory_budget="1GiB")
    assert launches.count("down_backward_kernel") == 4
    assert launches.count("gate_up_kernel") == 4 + num_again


@pytest.mark.skipif(DEVICE.type == "cuda", reason="kernels that do nothing take the host's tensors")
@pytest.mark.parametrize(
    "frozen", [(), ("down",), ("gate", "up"), ("down", "gate", "up"), "adapters", "down's", "list"], ids=str
)
@pytest.mark.parametrize(("rows_per_chunk", "num_saved"), [(200, 0), (4096, 0), (200, 1500), (4096, 1500)])
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_windows_hold_what_the_plan_counts(
    dtype: torch.dtype, rows_per_chunk: int, num_saved: int, frozen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside arguments and results; kernels that do nothing hold as much as others."""
    from memfine_fx.kernels.launches import Launch

    if num_saved:
        save_of_first(num_saved, monkeypatch)
    monkeypatch.setattr(choice, "_DEVICES", ("cuda", "cpu"))
    monkeypatch.setenv("MEMFINE_GPU_KERNELS", "1")
    run_kernel, sorts = Launch.run, ("count_kernel", "scan_kernel", "offsets_kernel", "place_kernel")
    monkeypatch.setattr(Launch, "run", lambda self: run_kernel(self) if self.name in sorts else None)
    config = MixtralConfig(hidden=64, expert_width=96, num_experts=4, top_k=2, spelling="gathered")
    model: torch.nn.Module = MixtralMoE(config)
    if frozen == "list":
        model = LoopMoE(LoopConfig(hidden=64, expert_width=96, num_experts=4, top_k=2))
    elif isinstance(frozen, str):
        model = AdaptedExperts(hidden=64, names=("up", "down") if frozen == "adapters" else ("down",))
    else:
        for name, parameter in model.experts.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
    model = model.to(dtype)
    measured = {}

    def tracing(phase: str) -> Any:
        run = getattr(KernelExperts, phase)

        def traced(*args: Any) -> Any:
            results: list[Any] = []
            peak = trace_memory(lambda: results.append(run(*args)), torch.device("cpu")).peak_bytes
            returned = results[0] if isinstance(results[0], list) else results
            measured[phase] = peak - sum(one.untyped_storage().nbytes() for one in returned)
            return results[0]

        return traced

    for phase in ("forward", "backward"):
        monkeypatch.setattr(KernelExperts, phase, tracing(phase))
    budget = "1GiB" if num_saved else None
    options = memfine_fx.Config(rows_per_chunk=rows_per_chunk, memory_budget=budget)
    chunked = memfine_fx.optimize(model, config=options, inner_backend="aot_eager")
    chunked(torch.randn(1000, 64, dtype=dtype, requires_grad=True)).sum().backward()
    ((region_id, memory),) = sessions()[-1].graphs[-1].step.regions.items()
    assert lookup(region_id).stages_gradients is (
        rows_per_chunk < 2000 or num_saved > 0
    )  # of a window's end in an expert
    sizes = ChunkSize(lookup(region_id).plan_for(1000).rows_per_chunk), sessions()[-1]._largest_chunk(region_id, 1000)
    for phase, found in measured.items():
        call = Call(0, region_id, phase, "projections", num_saved)
        planned, ran = (memory.workspace(call, {}, lambda num_tokens, size=size: size) for size in sizes)
        assert found <= planned + 4096, phase  # with an expert's gradients staged, which one window has not
        assert 0.9 * ran <= found <= ran + 4096, phase


@pytest.mark.parametrize("phase", ("forward", "backward"))
def test_windows_are_halved_where_memory_runs_out(
    phase: str, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step's results are those of a step without failures, and later steps begin with what was left."""
    from memfine_fx.kernels import layer as kernels

    run, tried = getattr(kernels, f"run_{phase}"), []

    def failing(*args: Any, **kwargs: Any) -> Any:
        (options,) = (one for one in args if isinstance(one, kernels.LayerOptions))
        tried.append(options.rows_per_window)
        if options.rows_per_window > 6:
            run(*args, **kwargs)  # it wrote what it could
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return run(*args, **kwargs)

    monkeypatch.setattr(kernels, f"run_{phase}", failing)
    eager = layer()
    config = memfine_fx.Config(rows_per_chunk=16, memory_budget="1GiB")
    model = memfine_fx.optimize(copy.deepcopy(eager), config=config, inner_backend="aot_eager")
    hidden = torch.randn(11, 32, device=DEVICE)
    with pytest.warns(RuntimeWarning, match="Rows per chunk go from 16 to 4"):
        found = step(model, hidden)
    for one, expected in zip(found, step(eager, hidden), strict=True):
        assert relative_error(one, expected) < 1e-5
    model.zero_grad()
    step(model, hidden)
    assert tried == [16, 8, 4, 4]


class TwoParts(torch.nn.Module):
    """A layer behind a projection, so that its input wants a gradient."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.first, self.layer = torch.nn.Linear(32, 32), experts

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.layer(self.first(hidden))


@pytest.mark.parametrize("saves", (False, True))
@pytest.mark.parametrize("name", ("mixtral", "gpt_oss", "relu2 with biases", "list"))
def test_micro_batches_add_to_gradients_where_they_are(name: str, saves: bool, launches: list[str]) -> None:
    """In windows that cut experts: no second set of tables is made, and the sums are eager's."""
    eager = TwoParts(EVERY[name]()).to(DEVICE)
    config = memfine_fx.Config(rows_per_chunk=7, memory_budget="1GiB" if saves else None)
    model = memfine_fx.optimize(copy.deepcopy(eager), config=config, inner_backend="aot_eager")
    for one in (model, eager):
        for seed in range(3):
            torch.manual_seed(seed)
            one(torch.randn(11, 32, device=DEVICE)).square().sum().backward()
            if seed == 1:
                held = [parameter.grad for parameter in one.layer.parameters()]
        assert all(there is parameter.grad for there, parameter in zip(held, one.layer.parameters(), strict=True))
    for (told, found), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert found.grad is not None and expected.grad is not None
        assert relative_error(found.grad, expected.grad) < 1e-5, told
    (region,) = memfine_fx.report(model).regions
    assert region.num_added >= 2
    assert "weight_gradient_kernel" in launches


def test_memory_that_runs_out_after_gradients_were_added_to_is_an_error(
    launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run again, the pass would add them twice."""
    from memfine_fx.kernels import layer as kernels

    model = memfine_fx.optimize(
        TwoParts(layer()).to(DEVICE), config=memfine_fx.Config(rows_per_chunk=7), inner_backend="aot_eager"
    )
    hidden = torch.randn(11, 32, device=DEVICE)
    model(hidden).sum().backward()

    def failing(self: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    monkeypatch.setattr(kernels._Backward, "gradients", failing)
    loss = model(hidden).sum()
    with pytest.raises(memfine_fx.ChunkOutOfMemory, match="gradients were added to in place"):
        loss.backward()


class PackedExperts(torch.nn.Module):
    """SwiGLU experts whose tables are in NF4."""

    def __init__(self, experts: int = 4, hidden: int = 32, width: int = 64, block: int = 32) -> None:
        super().__init__()
        self.router = torch.nn.Linear(hidden, experts, bias=False)
        self.shapes = {"up": (experts, 2 * width, hidden), "down": (experts, hidden, width)}
        self.block = block
        for name, shape in self.shapes.items():
            num = math.prod(shape)
            packed = torch.randint(0, 256, (num // 2, 1), dtype=torch.uint8)
            self.register_parameter(name, torch.nn.Parameter(packed, requires_grad=False))
            self.register_buffer(f"{name}_scales", torch.rand(num // block) / 2)

    def table(self, name: str) -> torch.Tensor:
        return dequantized(getattr(self, name), getattr(self, f"{name}_scales"), self.block, self.shapes[name])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight, index = self.router(hidden).softmax(-1).topk(2)
        ids, rows = index.reshape(-1), hidden.repeat_interleave(2, dim=0)
        gate, up = torch.einsum("nh,nfh->nf", rows, self.table("up")[ids]).chunk(2, -1)
        out = torch.einsum("nf,nhf->nh", torch.nn.functional.silu(gate) * up, self.table("down")[ids])
        return (out.view(-1, 2, hidden.shape[1]) * weight[:, :, None]).sum(1)


@pytest.mark.parametrize("rows_per_chunk", (7, 64))
def test_packed_tables_are_made_in_the_kernels(rows_per_chunk: int, launches: list[str]) -> None:
    compare(PackedExperts(), rows_per_chunk=rows_per_chunk)
    assert launches.count("down_backward_kernel") == -(-22 // rows_per_chunk)
    assert "weight_gradient_kernel" not in launches


def test_packed_tables_beside_what_is_trained_keep_their_bodies(launches: list[str]) -> None:
    class Trained(PackedExperts):
        def __init__(self) -> None:
            super().__init__()
            self.dense = torch.nn.Parameter(torch.randn(self.shapes["down"]) / 8)

        def table(self, name: str) -> torch.Tensor:
            return self.dense if name == "down" else super().table(name)

    compare(Trained(), rows_per_chunk=9)
    assert launches == []


class AdaptedExperts(PackedExperts):
    """SwiGLU experts with adapters on their tables, as PEFT writes them; tables frozen, dense or in NF4."""

    def __init__(self, *, hidden: int = 32, is_packed: bool = False, names: tuple[str, ...] = ("up", "down")) -> None:
        super().__init__(hidden=hidden)
        self.names = names
        for (name, (experts, out, width)), rank in zip(self.shapes.items(), (2, 3), strict=True):
            if not is_packed:
                table = torch.nn.Parameter(torch.randn(self.shapes[name]) * 0.2, requires_grad=False)
                self.register_parameter(f"{name}_table", table)
            if name in names:
                self.register_parameter(f"{name}_a", torch.nn.Parameter(torch.randn(rank * experts, width) / 4))
                self.register_parameter(f"{name}_b", torch.nn.Parameter(torch.randn(out, rank * experts) / 4))

    def table(self, name: str) -> torch.Tensor:
        frozen = getattr(self, f"{name}_table", None)
        table = super().table(name) if frozen is None else frozen
        if name not in self.names:
            return table
        experts, out, width = self.shapes[name]
        first = getattr(self, f"{name}_a").reshape(experts, -1, width)
        second = getattr(self, f"{name}_b").reshape(out, -1, experts)
        delta: torch.Tensor = torch.einsum("o r e, e r i -> e o i", second, first) * 0.5
        return table + delta.to(table.dtype)


@pytest.mark.parametrize("is_packed", (False, True))
@pytest.mark.parametrize("names", (("up", "down"), ("up",), ("down",)), ids=str)
@pytest.mark.parametrize("rows_per_chunk", (7, 64))
def test_adapters_are_trained_in_the_kernels(
    rows_per_chunk: int, names: tuple[str, ...], is_packed: bool, launches: list[str]
) -> None:
    """Factor by factor: no gradient of a table is made, and each factor's is."""
    compare(AdaptedExperts(is_packed=is_packed, names=names), rows_per_chunk=rows_per_chunk)
    num_windows = -(-22 // rows_per_chunk)
    assert launches.count("down_backward_kernel") == num_windows
    assert launches.count("weight_gradient_kernel") == 2 * len(names) * num_windows


def test_adapters_beside_tables_that_are_trained(launches: list[str]) -> None:
    eager = AdaptedExperts()
    for name in eager.shapes:
        getattr(eager, f"{name}_table").requires_grad_()
    compare(eager, rows_per_chunk=7)
    assert launches.count("weight_gradient_kernel") == 4 * 5


def test_products_are_kept_with_what_adapters_add(launches: list[str]) -> None:
    compare(AdaptedExperts(), "aot_eager", rows_per_chunk=7, memory_budget="1GiB")
    assert (launches.count("gate_up_kernel"), launches.count("down_backward_kernel")) == (4, 4)


def test_micro_batches_add_to_gradients_of_adapters(launches: list[str]) -> None:
    eager = TwoParts(AdaptedExperts()).to(DEVICE)
    config = memfine_fx.Config(rows_per_chunk=7)
    model = memfine_fx.optimize(copy.deepcopy(eager), config=config, inner_backend="aot_eager")
    for seed in range(3):
        for one in (model, eager):
            torch.manual_seed(seed)
            one(torch.randn(11, 32, device=DEVICE)).square().sum().backward()
    for (told, found), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (found.grad is None) is (expected.grad is None)
        assert found.grad is None or relative_error(found.grad, expected.grad) < 1e-5, told
    assert "narrow_kernel" in launches


@pytest.mark.parametrize("rows_per_chunk", (7, 64))
def test_lists_of_experts_run_in_kernels(rows_per_chunk: int, launches: list[str]) -> None:
    """Each expert's matrices are tensors of their own, and so are their gradients."""
    layer = a_list()
    compare(layer, rows_per_chunk=rows_per_chunk)
    assert launches.count("weight_gradient_kernel") == -(-22 // rows_per_chunk)


def test_products_of_lists_are_kept(launches: list[str]) -> None:
    layer = a_list()
    compare(layer, "aot_eager", rows_per_chunk=7, memory_budget="1GiB")
    assert (launches.count("gate_up_kernel"), launches.count("down_backward_kernel")) == (4, 4)


@pytest.mark.parametrize("frozen", ((), (0, 2), (0, 1, 2, 3)), ids=str)
def test_experts_of_a_list_may_be_frozen(frozen: tuple[int, ...], launches: list[str]) -> None:
    layer = a_list()
    for expert in frozen:
        layer.experts[expert].requires_grad_(False)
    compare(layer, rows_per_chunk=9)
    assert "down_backward_kernel" in launches
    assert ("weight_gradient_kernel" in launches) is (len(frozen) < 4)


def test_frozen_tables_get_no_gradient(launches: list[str]) -> None:
    eager = layer()
    eager.experts.requires_grad_(False)
    model = memfine_fx.optimize(copy.deepcopy(eager), config=memfine_fx.Config(rows_per_chunk=9), inner_backend="eager")
    hidden = torch.randn(6, 32, device=DEVICE)
    found, expected = step(model, hidden), step(eager, hidden)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) is (other is None)
        assert one is None or relative_error(one, other) < 1e-5
    assert "down_backward_kernel" in launches
    assert "weight_gradient_kernel" not in launches


@pytest.mark.parametrize(
    ("asked", "is_measured", "grouped", "dtype", "is_taken"),
    (
        (None, True, 2.0, torch.float16, True),
        (None, True, None, torch.float16, True),
        (None, True, 0.9, torch.float16, False),
        (None, False, 2.0, torch.float16, False),
        (None, True, 2.0, torch.float32, False),
        ("0", True, 2.0, torch.float16, False),
        ("1", False, 0.9, torch.float32, True),
    ),
)
def test_kernels_are_taken_where_they_are_asked_for_or_were_measured_and_are_faster(
    asked: str | None,
    is_measured: bool,
    grouped: float | None,
    dtype: torch.dtype,
    is_taken: bool,
    launches: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from memfine_fx.kernels import tuning
    from memfine_fx.kernels.tiling import target_of

    monkeypatch.setattr(tuning, "times_of", lambda kind, device: tuning.Times(1.0, grouped))
    monkeypatch.delenv("MEMFINE_GPU_KERNELS")
    if asked is not None:
        monkeypatch.setenv("MEMFINE_GPU_KERNELS", asked)
    monkeypatch.setattr(choice, "_MEASURED", (target_of(DEVICE),) if is_measured else ())
    model = memfine_fx.optimize(layer().to(dtype), config=memfine_fx.Config(rows_per_chunk=9), inner_backend="eager")
    step(model, torch.randn(6, 32, device=DEVICE, dtype=dtype))
    assert bool(launches) is is_taken
    (region,) = memfine_fx.report(model).regions
    assert (region.runs_in == "GPU kernels") is is_taken
    assert (", in GPU kernels" in str(region)) is is_taken


def adapted_in_16_bits() -> AdaptedExperts:
    """Adapters in fp32, as PEFT leaves them beside tables in 16 bits."""
    model = AdaptedExperts()
    model.router.half()
    for name in model.shapes:
        table = getattr(model, f"{name}_table")
        table.data = table.data.half()
    return model


@pytest.mark.parametrize(
    ("make", "is_taken"),
    [
        (adapted_in_16_bits, True),
        (AdaptedExperts, False),
        (lambda: a_list().half(), False),
    ],
    ids=["adapters", "adapters in fp32", "list"],
)
def test_without_being_asked_kernels_take_what_was_measured_in_them(
    make: Callable[[], torch.nn.Module], is_taken: bool, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from memfine_fx.kernels import tuning
    from memfine_fx.kernels.tiling import target_of

    monkeypatch.setattr(tuning, "times_of", lambda kind, device: tuning.Times(1.0, 2.0))
    monkeypatch.delenv("MEMFINE_GPU_KERNELS")
    monkeypatch.setattr(choice, "_MEASURED", (target_of(DEVICE),))
    model = memfine_fx.optimize(make().to(DEVICE), config=memfine_fx.Config(rows_per_chunk=9), inner_backend="eager")
    dtype = torch.float32 if make is AdaptedExperts else torch.float16
    out = model(torch.randn(6, 32, device=DEVICE, dtype=dtype).requires_grad_())
    out.square().sum().backward()
    assert [one.status for one in memfine_fx.report(model).regions] == ["chunked"]
    assert bool(launches) is is_taken


def test_where_torch_is_to_be_deterministic_regions_keep_their_bodies(launches: list[str]) -> None:
    model = memfine_fx.optimize(layer(), config=memfine_fx.Config(rows_per_chunk=9), inner_backend="eager")
    torch.use_deterministic_algorithms(True)
    try:
        step(model, torch.randn(6, 32, device=DEVICE))
        assert launches == []
    finally:
        torch.use_deterministic_algorithms(False)
    step(model, torch.randn(6, 32, device=DEVICE))
    assert launches


def test_slices_of_tokens_keep_their_bodies(launches: list[str]) -> None:
    config = memfine_fx.Config(axis="tokens", rows_per_chunk=9)
    model = memfine_fx.optimize(layer(), config=config, inner_backend="eager")
    step(model, torch.randn(6, 32, device=DEVICE))
    assert launches == []


@pytest.mark.parametrize(
    ("asked", "grouped", "why"),
    [
        ("0", None, "MEMFINE_GPU_KERNELS is 0"),
        (None, 0.0005, "grouped products took 0.50 ms of a timed layer, the kernels 1.00"),
        (None, 0.002, ""),
    ],
)
def test_a_region_says_why_it_keeps_its_bodies(
    asked: str | None, grouped: float | None, why: str, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from memfine_fx.compiler import regions
    from memfine_fx.kernels import tuning
    from memfine_fx.kernels.tiling import target_of

    said: list[str] = []
    ask = regions.why_compiled_functions_run
    monkeypatch.setattr(regions, "why_compiled_functions_run", lambda *given: (said.append(ask(*given)), said[-1])[1])
    monkeypatch.setattr(tuning, "times_of", lambda kind, device: tuning.Times(0.001, grouped))
    monkeypatch.setattr(choice, "_MEASURED", (target_of(DEVICE),))
    monkeypatch.delenv("MEMFINE_GPU_KERNELS")
    if asked is not None:
        monkeypatch.setenv("MEMFINE_GPU_KERNELS", asked)
    model = memfine_fx.optimize(layer().half(), inner_backend="eager")
    step(model, torch.randn(6, 32, device=DEVICE).half())
    assert said == [why]
