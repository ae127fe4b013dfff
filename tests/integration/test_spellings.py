"""Every dense, indexed and capacity spelling of the reference layers: raised, exact in outputs and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memfine_fx
from memfine_fx.models import (
    VARIANTS,
    CapacityConfig,
    CapacityMoE,
    DenseConfig,
    DenseLoopConfig,
    DenseLoopMoE,
    DenseMoE,
    HandwrittenConfig,
    HandwrittenMoE,
    IndexedConfig,
    IndexedMoE,
    ListedSlotsConfig,
    ListedSlotsMoE,
    Llama4Config,
    Llama4MoE,
    PaddedConfig,
    PaddedMoE,
    PublishedConfig,
    PublishedMoE,
    SwitchConfig,
    SwitchMoE,
    TorchtitanConfig,
    TorchtitanMoE,
    VariantConfig,
    VariantExperts,
    VariantMoE,
)
from memfine_fx.models.dense import Weighting
from memfine_fx.models.dense_loop import LoopSpelling
from memfine_fx.models.handwritten import HandwrittenSpelling
from memfine_fx.models.listed_slots import ListedSlotsSpelling
from memfine_fx.models.padded import PaddedSpelling
from memfine_fx.models.published import PublishedSpelling
from tests.integration.comparison import (
    assert_no_worse_than_eager,
    assert_same_step,
    assert_same_step_up_to_zeros,
    optimized_copy,
    run_step,
)

with contextlib.suppress(ImportError):  # at the top: torch 2.11 breaks the graph at an import
    import transformers.integrations.moe  # noqa: F401  # registers transformers::grouped_mm_fallback

H, F, E = 16, 24, 4
SIZES = dict(hidden=H, expert_width=F, num_experts=E)


def fp32_grouped_mm(rows: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
    """transformers' stand-in for the grouped matmul: torch's own takes only bfloat16 under compile."""
    return torch.ops.transformers.grouped_mm_fallback(rows, weight, offs)  # type: ignore[no-any-return]  # an op


def torchtitan(**fields: object) -> TorchtitanMoE:
    config = TorchtitanConfig(**SIZES, compute_dtype=None, grouped_mm=fp32_grouped_mm, **fields)  # type: ignore[arg-type]  # fields
    return TorchtitanMoE(config)


LAYERS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "torchtitan, scores before": ("grouped", torchtitan),
    "torchtitan, scores after": ("grouped", lambda: torchtitan(scores_before_experts=False)),
    "torchtitan, nothing shared": ("grouped", lambda: torchtitan(has_shared_expert=False, top_k=3)),
    "llama4": ("dense", lambda: Llama4MoE(Llama4Config(**SIZES))),
    "llama4, two experts": ("dense", lambda: Llama4MoE(Llama4Config(**SIZES, top_k=2))),
    "indexed einsum": ("einsum", lambda: IndexedMoE(IndexedConfig(**SIZES))),
    "indexed matmul": ("gathered", lambda: IndexedMoE(IndexedConfig(**SIZES, uses_matmul=True))),
    "capacity buffer": ("slots", lambda: CapacityMoE(CapacityConfig(**SIZES))),
    "switch einsum": ("slots", lambda: SwitchMoE(SwitchConfig(**SIZES))),
    "switch einsum, biases": ("slots", lambda: SwitchMoE(SwitchConfig(**SIZES, has_biases=True))),
    **{
        f"dense einsum, {weighting}": ("einsum", lambda w=weighting: DenseMoE(DenseConfig(**SIZES, weighting=w)))
        for weighting in get_args(Weighting)
    },
    **{
        f"dense matmul, {weighting}": (
            "dense",
            lambda w=weighting: DenseMoE(DenseConfig(**SIZES, weighting=w, uses_einsum=False)),
        )
        for weighting in get_args(Weighting)
    },
    **{
        f"dense loop, {spelling}": (
            "loops",
            lambda s=spelling: DenseLoopMoE(DenseLoopConfig(**SIZES, spelling=s)),
        )
        for spelling in get_args(LoopSpelling)
    },
    **{
        f"list of experts, {spelling}": (
            "loops",
            lambda s=spelling: HandwrittenMoE(HandwrittenConfig(**SIZES, spelling=s)),
        )
        for spelling in get_args(HandwrittenSpelling)
    },
    **{
        f"list of experts, {spelling}": (
            "loops",
            lambda s=spelling: PublishedMoE(PublishedConfig(**SIZES, spelling=s)),
        )
        for spelling in get_args(PublishedSpelling)
    },
    **{
        f"slots, {spelling}": ("slots", lambda s=spelling: PaddedMoE(PaddedConfig(**SIZES, spelling=s)))
        for spelling in get_args(PaddedSpelling)
    },
    **{
        f"slots, list of experts, {spelling}": (
            "slots",
            lambda s=spelling: ListedSlotsMoE(ListedSlotsConfig(**SIZES, spelling=s)),
        )
        for spelling in get_args(ListedSlotsSpelling)
    },
    **{
        f"experts: {variant}": ("gathered", lambda v=variant: VariantMoE(VariantConfig(v, **SIZES)))
        for variant in VARIANTS
    },
}


class ListedChoice(nn.Module):
    """Experts in a list that choose their tokens (Zhou et al., arXiv:2202.09368)."""

    num_chosen = 4
    """Tokens that each expert takes; fewer there cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(nn.Linear(H, H) for _ in range(E))

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.reshape(-1, H)
        weight, token = self.gate(tokens).softmax(dim=-1).t().topk(self.num_chosen, dim=-1)
        rows = tokens[token]
        results = torch.stack([expert(rows[e]) for e, expert in enumerate(self.experts)]) * weight.unsqueeze(-1)
        return torch.zeros_like(tokens).index_add_(0, token.reshape(-1), results.reshape(-1, H)).view_as(hidden)


LAYERS["slots, list of experts that choose"] = ("slots", ListedChoice)


def one_of_each_family(names: list[str]) -> list[object]:
    """The first layer of each family; of the others every third is a slow test, the rest are of the campaign."""
    firsts = {LAYERS[name][0]: name for name in reversed(names)}.values()
    others = [name for name in names if name not in firsts]
    return [
        *firsts,
        *(pytest.param(name, marks=pytest.mark.slow) for name in others[::3]),
        *(pytest.param(name, marks=pytest.mark.campaign) for name in others if name not in others[::3]),
    ]


def tokens(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randn(batch, length, H)


def family_of(model: nn.Module) -> str | None:
    (region,) = memfine_fx.report(model).regions
    assert region.status == "chunked", str(region)
    return region.family


def all_to_one(gate: Tensor) -> None:
    gate.zero_()[2] = 5.0


def ties(gate: Tensor) -> None:
    gate.zero_()


def empty_experts(gate: Tensor) -> None:
    gate[1] = -50.0
    gate[3] = -50.0


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_equal_eager_whatever_the_routing(name: str) -> None:
    """Compiled once: other sizes and extreme routing run the same code."""
    family, make = LAYERS[name]
    layer = make()
    optimized = optimized_copy(layer, rows_per_chunk=5)
    for batch, length in ((2, 9), (3, 4)):
        assert_same_step_up_to_zeros(optimized, layer, {"hidden": tokens(batch, length)})
    for routing in (empty_experts, all_to_one, ties):
        for model in (layer, optimized):
            with torch.no_grad():
                routing(model.gate.weight if hasattr(model, "gate") else model.router.weight)  # type: ignore[arg-type]
        assert_same_step_up_to_zeros(optimized, layer, {"hidden": tokens().abs()})
    assert family_of(optimized) == family


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.norm = nn.LayerNorm(H)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + checkpoint(lambda x: self.layer(self.norm(x)), hidden, use_reentrant=False)


@pytest.mark.parametrize("name", one_of_each_family(list(LAYERS)))
def test_gradients_inside_a_checkpoint_equal_eager(name: str) -> None:
    family, make = LAYERS[name]
    model = Checkpointed(make())
    optimized = optimized_copy(model, inner="aot_eager", rows_per_chunk=5)
    assert_same_step(optimized, model, {"hidden": tokens()})
    assert family_of(optimized) == family


@pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")  # one token's capacity is an odd symbol
@pytest.mark.parametrize("name", one_of_each_family([name for name in LAYERS if not name.startswith("experts:")]))
def test_one_token_keeps_gradients_equal(name: str) -> None:
    layer = LAYERS[name][1]()
    fewest = layer.num_chosen if isinstance(layer, ListedChoice) else 1
    assert_same_step_up_to_zeros(optimized_copy(layer), layer, {"hidden": tokens(1, fewest)})


@pytest.mark.parametrize("variant", list(VARIANTS)[::4])
def test_experts_compiled_alone_are_chunked_exactly(variant: str) -> None:
    experts = VariantExperts(VariantConfig(variant, **SIZES))  # type: ignore[arg-type]  # a Variant
    optimized = optimized_copy(experts, rows_per_chunk=5)
    inputs = {
        "hidden": torch.randn(11, H),
        "expert_index": torch.rand(11, E).topk(2, dim=-1).indices,
        "routing_weight": torch.rand(11, 2),
    }
    assert_same_step(optimized, experts, inputs)
    assert family_of(optimized) == "gathered"


def test_torchtitan_in_bf16_with_casts_inside_is_no_further_from_fp32_than_eager() -> None:
    sizes = dict(hidden=32, expert_width=64, num_experts=4)
    layer = TorchtitanMoE(TorchtitanConfig(**sizes))  # type: ignore[arg-type]  # sizes
    reference = TorchtitanMoE(TorchtitanConfig(**sizes, compute_dtype=None))  # type: ignore[arg-type]  # sizes
    reference.load_state_dict(layer.state_dict())
    optimized = optimized_copy(layer, rows_per_chunk=12)
    assert_no_worse_than_eager(optimized, layer, reference, {"hidden": torch.randn(2, 24, 32)})
    assert family_of(optimized) == "grouped"


def test_load_counters_outside_the_region_keep_counting() -> None:
    layer = torchtitan()
    optimized = optimized_copy(layer)
    for _ in range(2):
        run_step(optimized, {"hidden": tokens()})
    assert float(optimized.tokens_per_expert.sum()) == 2 * 18 * 2  # type: ignore[operator]  # a buffer


def test_dropped_tokens_of_a_capacity_layer_come_out_as_in_eager() -> None:
    layer = SwitchMoE(SwitchConfig(**SIZES, capacity_factor=0.5))
    hidden = torch.randn(40, H)
    expected = layer(hidden)
    is_dropped = (expected == 0).all(dim=-1)
    assert 0 < int(is_dropped.sum()) < 40
    output = optimized_copy(layer, rows_per_chunk=3)(hidden)
    assert torch.equal((output == 0).all(dim=-1), is_dropped)


@pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")
def test_unmasked_weights_are_not_raised_to_the_routed_form() -> None:
    """Weights of unchosen experts that are not zero: routing would drop what they add."""

    class Leaky(DenseMoE):
        def _weights(self, logits: Tensor) -> Tensor:
            index = logits.topk(2, dim=-1).indices
            return torch.softmax(logits, dim=-1) + torch.zeros_like(logits).scatter(1, index, 1.0)

    layer = Leaky(DenseConfig(**SIZES, uses_einsum=False))
    optimized = optimized_copy(layer, rows_per_chunk=5)
    assert_same_step(optimized, layer, {"hidden": tokens()})
    assert all(region.family != "dense" for region in memfine_fx.report(optimized).regions)
