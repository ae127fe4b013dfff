"""Every reference layer against a dense loop over tokens and experts, written without its code."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memfine_fx.models import (
    DeepseekConfig,
    DeepseekMoE,
    GptOssConfig,
    GptOssMoE,
    MixtralConfig,
    MixtralMoE,
    NaiveConfig,
    NaiveMoE,
    SwitchConfig,
    SwitchMoE,
)

DenseLoop = Callable[[Any, Tensor], Tensor]


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def best(scores: list[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:count]


def softmax_route(logits: Tensor, top_k: int) -> dict[int, Tensor]:
    """Softmax over the chosen logits equals the renormalised softmax over all."""
    chosen = best(logits.tolist(), top_k)
    total = sum((logits[e].exp() for e in chosen), start=torch.zeros((), dtype=logits.dtype))
    return {e: logits[e].exp() / total for e in chosen}


def weighted_sum(x: Tensor, route: dict[int, Tensor], expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    return sum((weight * expert(e, x) for e, weight in route.items()), start=torch.zeros_like(x))


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gated = gate @ x
    return down @ (gated * sigmoid(gated) * (up @ x))


def stacked_expert(experts: Any, e: int, x: Tensor) -> Tensor:
    width = experts.down_proj.shape[-1]
    gate_up = experts.gate_up_proj[e]
    return swiglu(x, gate_up[:width], gate_up[width:], experts.down_proj[e])


def mixtral_loop(model: MixtralMoE, tokens: Tensor) -> Tensor:
    def one(x: Tensor) -> Tensor:
        route = softmax_route(model.gate.weight @ x, model.config.top_k)
        return weighted_sum(x, route, lambda e, x: stacked_expert(model.experts, e, x))

    return torch.stack([one(x) for x in tokens])


def naive_loop(model: NaiveMoE, tokens: Tensor) -> Tensor:
    def expert(e: int, x: Tensor) -> Tensor:
        mlp: Any = model.experts[e]
        return swiglu(x, mlp.w1.weight, mlp.w3.weight, mlp.w2.weight)

    def one(x: Tensor) -> Tensor:
        return weighted_sum(x, softmax_route(model.gate.weight @ x, model.config.top_k), expert)

    return torch.stack([one(x) for x in tokens])


def deepseek_loop(model: DeepseekMoE, tokens: Tensor) -> Tensor:
    config = model.config
    size = config.num_experts // config.num_groups

    def route(x: Tensor) -> dict[int, Tensor]:
        scores = sigmoid(model.gate.weight @ x)
        biased = (scores + model.gate.e_score_correction_bias).tolist()
        groups = [biased[g * size : (g + 1) * size] for g in range(config.num_groups)]
        open_groups = best([sum(sorted(group)[-2:]) for group in groups], config.num_limited_groups)
        open_experts = [e for e in range(config.num_experts) if e // size in open_groups]
        chosen = sorted(open_experts, key=lambda e: -biased[e])[: config.top_k]
        total = scores[chosen].sum()
        return {e: config.routed_scale * scores[e] / total for e in chosen}

    def one(x: Tensor) -> Tensor:
        shared = model.shared_experts
        routed = weighted_sum(x, route(x), lambda e, x: stacked_expert(model.experts, e, x))
        return routed + swiglu(x, shared.w1.weight, shared.w3.weight, shared.w2.weight)

    return torch.stack([one(x) for x in tokens])


def gpt_oss_loop(model: GptOssMoE, tokens: Tensor) -> Tensor:
    experts, width = model.experts, model.config.expert_width

    def expert(e: int, x: Tensor) -> Tensor:
        gate_up = (x @ experts.gate_up_proj[e] + experts.gate_up_proj_bias[e]).view(width, 2)
        gate = gate_up[:, 0].minimum(torch.full((), model.config.limit, dtype=x.dtype))
        up = gate_up[:, 1].clamp(-model.config.limit, model.config.limit)
        activated = (up + 1) * (gate * sigmoid(model.config.alpha * gate))
        return activated @ experts.down_proj[e] + experts.down_proj_bias[e]

    def one(x: Tensor) -> Tensor:
        logits = model.router.weight @ x + model.router.bias
        return weighted_sum(x, softmax_route(logits, model.config.top_k), expert)

    return torch.stack([one(x) for x in tokens])


def switch_loop(model: SwitchMoE, tokens: Tensor) -> Tensor:
    free_slots = [model.config.capacity(len(tokens))] * model.config.num_experts

    def one(x: Tensor) -> Tensor:
        logits = model.router.weight @ x
        e = best(logits.tolist(), 1)[0]
        free_slots[e] -= 1
        if free_slots[e] < 0:
            return torch.zeros_like(x)
        weight = logits[e].exp() / logits.exp().sum()
        return weight * ((x @ model.wi[e]).relu() @ model.wo[e])

    return torch.stack([one(x) for x in tokens])


@dataclass(frozen=True)
class Case:
    name: str
    layer: Callable[[Any], nn.Module]
    config: Any
    dense_loop: DenseLoop

    def build(self, *, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
        torch.manual_seed(0)
        layer = self.layer(replace(self.config, **changes)).to(dtype)
        if isinstance(layer, DeepseekMoE):
            nn.init.normal_(layer.gate.e_score_correction_bias, std=0.1)
        return layer


MIXTRAL = Case("mixtral", MixtralMoE, MixtralConfig(16, 24, 4, 2, "gathered"), mixtral_loop)
DEEPSEEK = Case("deepseek", DeepseekMoE, DeepseekConfig(16, 24, 8, 3, 4, 2, spelling="gathered"), deepseek_loop)
GPT_OSS = Case("gpt_oss", GptOssMoE, GptOssConfig(16, 24, 4, 2, limit=0.7, spelling="gathered"), gpt_oss_loop)
SWITCH = Case("switch", SwitchMoE, SwitchConfig(16, 24, 4, capacity_factor=1.25), switch_loop)
NAIVE = Case("naive", NaiveMoE, NaiveConfig(16, 24, 4, 2), naive_loop)
CASES = (MIXTRAL, DEEPSEEK, GPT_OSS, SWITCH, NAIVE)
STACKED_CASES = (MIXTRAL, DEEPSEEK, GPT_OSS)

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_stacked_case = pytest.mark.parametrize("case", STACKED_CASES, ids=lambda case: case.name)


def tokens_of(num_tokens: int, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(num_tokens, 16).to(dtype).requires_grad_()


def outputs_and_gradients(model: nn.Module, forward: Callable[[Tensor], Tensor], tokens: Tensor) -> dict[str, Tensor]:
    """The output and all gradients of a loss that weighs every output element differently."""
    out = forward(tokens)
    torch.manual_seed(2)
    loss = (out * torch.randn(out.shape).to(out.dtype)).sum()
    wanted = {"tokens": tokens, **dict(model.named_parameters())}
    gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), **dict(zip(wanted, gradients, strict=True))}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (actual[name].double() - tensor.double()).norm() / tensor.double().norm().clamp_min(1e-30)
        assert error <= relative, f"{name}: relative error {error:.2e}"


@every_case
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_output_and_gradients_are_those_of_the_dense_loop(case: Case, num_tokens: int) -> None:
    model, tokens = case.build(), tokens_of(num_tokens)
    expected = outputs_and_gradients(model, lambda x: case.dense_loop(model, x), tokens)
    assert_same(outputs_and_gradients(model, model, tokens), expected, relative=1e-12)
    assert num_tokens < 33 or all(gradient.any() for gradient in expected.values()), "every parameter is reached"
    assert torch.equal(model(tokens.view(1, num_tokens, 16)), model(tokens).view(1, num_tokens, 16))


@pytest.mark.parametrize("case", [MIXTRAL, GPT_OSS, NAIVE], ids=lambda case: case.name)
def test_every_expert_for_every_token_is_the_dense_loop(case: Case) -> None:
    model, tokens = case.build(top_k=case.config.num_experts), tokens_of(7)
    expected = outputs_and_gradients(model, lambda x: case.dense_loop(model, x), tokens)
    assert_same(outputs_and_gradients(model, model, tokens), expected, relative=1e-12)


@pytest.mark.parametrize("num_groups", [1, 8])
def test_deepseek_with_all_groups_open_takes_every_expert(num_groups: int) -> None:
    model = DEEPSEEK.build(top_k=8, num_groups=num_groups, num_limited_groups=num_groups)
    tokens = tokens_of(7)
    expected = outputs_and_gradients(model, lambda x: DEEPSEEK.dense_loop(model, x), tokens)
    assert_same(outputs_and_gradients(model, model, tokens), expected, relative=1e-12)


@every_case
@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)], ids=["flat", "batched"])
def test_no_tokens_give_no_output_and_zero_gradients(case: Case, shape: tuple[int, ...]) -> None:
    model = case.build()
    out = model(torch.zeros(shape, dtype=torch.float64))
    assert out.shape == shape
    out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@every_stacked_case
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_spellings_agree(case: Case, num_tokens: int, dtype: torch.dtype, relative: float) -> None:
    gathered = case.build(dtype=dtype, spelling="gathered")
    grouped = case.build(dtype=dtype, spelling="grouped")
    assert all(map(torch.equal, gathered.parameters(), grouped.parameters()))
    tokens = tokens_of(num_tokens, dtype)
    expected = outputs_and_gradients(gathered, gathered, tokens)
    assert_same(outputs_and_gradients(grouped, grouped, tokens), expected, relative)


@every_stacked_case
def test_combine_in_bfloat16_sums_in_float32(case: Case) -> None:
    """The output is the float32 sum rounded once, so its error stays near bfloat16's own 2**-9."""
    model = case.build(dtype=torch.bfloat16)
    exact = copy.deepcopy(model).double()
    tokens = tokens_of(16, torch.bfloat16).detach()
    out = model(tokens)
    assert out.dtype == torch.bfloat16
    error = (out.double() - exact(tokens.double())).norm() / out.double().norm()
    assert error < 1e-2


def test_switch_drops_tokens_beyond_capacity() -> None:
    model = SWITCH.build(capacity_factor=1.0)
    tokens = tokens_of(1).detach().expand(8, 16)  # equal tokens all choose one expert with 8 / 4 = 2 slots
    assert model(tokens).any(dim=-1).tolist() == [True] * 2 + [False] * 6


def test_switch_with_capacity_for_all_drops_nothing() -> None:
    model = SWITCH.build(capacity_factor=4.0)
    assert model(tokens_of(8).detach().expand(8, 16)).any(dim=-1).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MixtralConfig(num_experts=4, top_k=5), "top_k must be in 1..num_experts=4, got 5"),
        (lambda: NaiveConfig(top_k=0), "top_k must be in 1..num_experts=8, got 0"),
        (lambda: GptOssConfig(spelling="loop"), 'spelling must be "grouped" or "gathered", got \'loop\''),
        (lambda: DeepseekConfig(num_groups=3), "num_groups must divide num_experts=16, got 3"),
        (
            lambda: DeepseekConfig(num_limited_groups=5),
            "num_limited_groups must be in 1..num_groups=4, got 5",
        ),
        (lambda: SwitchConfig(capacity_factor=0), "capacity_factor must be positive, got 0"),
    ],
)
def test_impossible_sizes_are_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == message
