"""MoE layers as the registry's packages ship them: imported from the package, never copied; one entry a configuration.

An entry names the distribution and the version that was read, the class, how a small one is built and what is
expected of it. What the packages need is in packages.txt beside this file; an entry whose package is not
installed is reported as such. `python -m benchmarks.coverage --packages` checks them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PACKAGED", "PackagedLayer"]

_HIDDEN = 32
_EXPERTS = 4
_WIDTH = 48
_SHAPE = (2, 64, _HIDDEN)


@dataclass(frozen=True)
class PackagedLayer:
    """One layer of a package.

    Args:
        name: package and configuration, unique.
        package: its distribution on the registry.
        version: the one that was read; another that is installed runs too, and is named in the row.
        module: where the layer's class is imported from.
        attribute: the class.
        build: the layer at toy size, given its class.
        is_chunked: whether it is expected to be chunked; else it is expected to be refused.
        shapes: of what it is given, in its order; (batch, sequence, H) where nothing is said.
        is_training: whether it is in training mode.
    """

    name: str
    package: str
    version: str
    module: str
    attribute: str
    build: Callable[[Any], nn.Module]
    is_chunked: bool = True
    shapes: tuple[tuple[int, ...], ...] = (_SHAPE,)
    is_training: bool = True

    @property
    def installed(self) -> str | None:
        """The version that is installed, None where none is."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None

    def made(self) -> nn.Module:
        """The layer, in its mode.

        Raises:
            ImportError: the package is not installed, or something that it needs is not.
        """
        with contextlib.redirect_stdout(io.StringIO()):
            layer = self.build(getattr(importlib.import_module(self.module), self.attribute))
        return layer.train(self.is_training)

    def inputs(self) -> tuple[Tensor, ...]:
        """What it is given, of `shapes`."""
        return tuple(torch.randn(*shape) for shape in self.shapes)


def _feed_forward() -> nn.Module:
    """An expert for packages that take theirs from the user."""
    return nn.Sequential(nn.Linear(_HIDDEN, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _HIDDEN))


def _one_process() -> None:
    """A process group of one, which layers written for expert parallelism ask for."""
    if not torch.distributed.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def _spread(layer: nn.Module) -> nn.Module:
    """Parameters that the package leaves empty for a training loop to fill."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.12)
    return layer


def _torchtitan(layer_class: Any, *, top_k: int = 2, **router: Any) -> nn.Module:
    common = importlib.import_module("torchtitan.models.common.moe")
    linear = importlib.import_module("torchtitan.models.common.linear")
    dispatcher = importlib.import_module("torchtitan.models.common.token_dispatcher")
    config = layer_class.Config(
        num_experts=_EXPERTS,
        router=common.TokenChoiceTopKRouter.Config(
            num_experts=_EXPERTS,
            gate=linear.Linear.Config(in_features=_HIDDEN, out_features=_EXPERTS, bias=False),
            top_k=top_k,
            **router,
        ),
        routed_experts=common.RoutedExperts.Config(
            inner_experts=common.GroupedExperts.Config(dim=_HIDDEN, hidden_dim=_WIDTH, num_experts=_EXPERTS),
            token_dispatcher=dispatcher.LocalTokenDispatcher.Config(num_experts=_EXPERTS, top_k=top_k),
        ),
    )
    return _spread(config.build())


def _litgpt(layer_class: Any, **fields: Any) -> nn.Module:
    config = importlib.import_module("litgpt.config").Config(
        n_embd=_HIDDEN, n_head=2, n_expert=_EXPERTS, n_expert_per_token=2, intermediate_size=_WIDTH,
        moe_intermediate_size=_WIDTH, mlp_class_name="LLaMAMoE", bias=False, **fields,
    )  # fmt: skip
    return _spread(layer_class(config))


def _fairscale(layer_class: Any) -> nn.Module:
    _one_process()
    gate = importlib.import_module("fairscale.nn.moe.top2gate").Top2Gate(_HIDDEN, _EXPERTS)
    return layer_class(gate, nn.ModuleList([_feed_forward() for _ in range(_EXPERTS)]))


def _deepspeed(layer_class: Any, **fields: Any) -> nn.Module:
    return layer_class(_HIDDEN, _feed_forward(), num_experts=_EXPERTS, **fields)


def _torchscale(layer_class: Any, gate: str, **fields: Any) -> nn.Module:
    _one_process()
    routing = importlib.import_module("torchscale.component.xmoe.routing")
    arguments = importlib.import_module("types").SimpleNamespace(moe_expert_count=_EXPERTS, batch_size=_SHAPE[0])
    experts = nn.ModuleList([_feed_forward() for _ in range(_EXPERTS)])
    return layer_class(getattr(routing, gate)(_HIDDEN, _EXPERTS, **fields), experts, arguments)


def _mixtures(layer_class: Any, expert: str) -> nn.Module:
    config = importlib.import_module("pytorch_mixtures").MoEConfig(
        hidden_dim=_HIDDEN, intermediate_dim=_WIDTH, num_experts=_EXPERTS, expert_fn=expert, expert_act="silu",
        router_fn="topk", capacity_factor=1.25, topk=2, dtype=torch.float32,
    )  # fmt: skip
    return layer_class(config)


def _latent_moe(layer_class: Any, way: str) -> nn.Module:
    config = importlib.import_module("latent_moe").LatentMoEConfig(
        d=_HIDDEN, m=_WIDTH, n_experts=_EXPERTS, top_k=2, alpha=2, n_shared=1, variant="eff", impl=way, device="cpu"
    )
    return layer_class(config)


def _uni2ts(layer_class: Any) -> nn.Module:
    return layer_class(_EXPERTS, 2, _HIDDEN, _WIDTH)


def _eulerforge(layer_class: Any) -> nn.Module:
    return layer_class(_feed_forward(), _HIDDEN, _EXPERTS, top_k=2, track_routing=False)


def _qorva(layer_class: Any) -> nn.Module:
    config = importlib.import_module("qorva.model.config").QorvaConfig
    return layer_class(config(hidden_dim=_HIDDEN, num_experts=_EXPERTS, moe_latent_dim=_HIDDEN // 2))


def _omegavit(layer_class: Any) -> nn.Module:
    config = importlib.import_module("omegavit.main").ViTConfig()
    config.hidden_size, config.num_experts = _HIDDEN, _EXPERTS
    return layer_class(config)


def _mixlora(layer_class: Any) -> nn.Module:
    """As `inject_adapter_in_model` does it for one Llama layer; the adapters' weights are the layer's parameters."""
    mixlora = importlib.import_module("mixlora.model")
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    settings = importlib.import_module("transformers").LlamaConfig(hidden_size=_HIDDEN, intermediate_size=_WIDTH)
    names = ("gate_proj", "up_proj", "down_proj")
    config = importlib.import_module("mixlora.config").MixLoraConfig(
        adapter_name_="default", model_type_="llama", dtype_=torch.float32, lora_r_=4, lora_alpha_=8,
        lora_dropout_=0.05, target_modules_=dict.fromkeys(names, True), routing_strategy_="mixlora",
        jitter_noise_=0.0, num_experts_=_EXPERTS, act_fn_="silu", top_k_=2,
    )  # fmt: skip
    base = llama.LlamaMLP(settings)
    layer = layer_class(base, config)
    layer.gate_ = nn.Parameter(torch.randn(_EXPERTS, _HIDDEN))
    held = nn.ModuleDict()
    for name in names:
        projection = getattr(base, name)
        for expert in range(_EXPERTS):
            low = nn.Parameter(torch.randn(4, projection.in_features) * 0.12)
            high = nn.Parameter(torch.randn(projection.out_features, 4) * 0.12)
            adapter = mixlora.LoraLinear(projection, config, (low, high))
            layer.experts_[f"experts.{expert}.{name}"] = adapter
            held[f"{name}_{expert}"] = adapter
    layer.held = held
    return layer


def _peer(layer_class: Any) -> nn.Module:
    return layer_class(_HIDDEN, heads=2, num_experts=64, num_experts_per_head=4)


def _sparrow(layer_class: Any) -> nn.Module:
    config = importlib.import_module("sparrow.config").SparrowConfig
    return layer_class(config(hidden_dim=_HIDDEN, num_experts=_EXPERTS, expert_hidden_size=_WIDTH))


def _nllb(layer_class: Any, **fields: Any) -> nn.Module:
    without_chance = {"activation_dropout": 0.0, "moe_token_dropout": 0.0}
    config = importlib.import_module("transformers").NllbMoeConfig(
        **{"d_model": _HIDDEN, "num_experts": _EXPERTS, **without_chance, **fields}
    )
    return layer_class(config, _WIDTH)


def _entry(*args: Any, shapes: Any = (_SHAPE,), is_training: bool = True, **fields: Any) -> PackagedLayer:
    """An entry; `fields` are further arguments of its builder, or of its class where the builder is None."""
    name, package, version, module, attribute, build = args

    def made(layer_class: Any) -> nn.Module:
        return layer_class(**fields) if build is None else build(layer_class, **fields)

    return PackagedLayer(name, package, version, module, attribute, made, name not in _REFUSED, shapes, is_training)


_TITAN = ("torchtitan", "0.3.0", "torchtitan.models.common.moe", "MoE", _torchtitan)
_LITGPT = ("litgpt", "0.5.13", "litgpt.model", "LLaMAMoE", _litgpt)
_SPARSE = ("mixture-of-experts", "0.2.3", "mixture_of_experts", "MoE", None)
_ST = ("st-moe-pytorch", "0.1.8", "st_moe_pytorch", "MoE", None)
_DEEPSPEED = ("deepspeed", "0.19.8", "deepspeed.moe.layer", "MoE", _deepspeed)
_XMOE = ("torchscale", "0.3.0", "torchscale.component.xmoe.moe_layer", "MOELayer", _torchscale)
_MIXTURES = ("pytorch-mixtures", "0.1.5", "pytorch_mixtures", "TopkMoE", _mixtures)
_LATENT = ("latent-moe", "0.0.3", "latent_moe", "LatentMoE", _latent_moe)
_NLLB = ("transformers", "5.23.0", "transformers.models.nllb_moe.modeling_nllb_moe", "NllbMoeSparseMLP", _nllb)
_SMALL = {"dim": _HIDDEN, "num_experts": _EXPERTS, "hidden_dim": _WIDTH}

_REFUSED = frozenset(
    {
        "mixture-of-experts, both choices",
        "mixture-of-experts, second by chance",
        "mixture-of-experts, hierarchical",
        "st-moe-pytorch",
        "st-moe-pytorch, top 3",
        "fairscale",
        "torchscale X-MoE, top 1",
        "pytorch-mixtures, top 2",
        "pytorch-mixtures, expert choice",
        "latent-moe, loop",
        "latent-moe, grouped",
        "eulerforge",
        "qorva",
        "omegavit",
        "mh-moe",
        "mixlora",
        "PEER",
        "soft-moe-pytorch",
        "esmoe",
        "sparrow-mlp",
        "nllb_moe, capacity 8, tokens dropped",
        "nllb_moe, capacity 8, dropout in experts",
    }
)
"""Exact but not chunked today; docs/coverage.md says why. One that is chunked leaves this list."""

_ENTRIES = (
    _entry("torchtitan, softmax", *_TITAN, score_func="softmax", route_norm=True),
    _entry("torchtitan, sigmoid in groups", *_TITAN, num_expert_groups=2, num_limited_groups=1),
    _entry("litgpt", *_LITGPT),
    _entry(
        "litgpt, router in groups", *_LITGPT, n_expert_groups=2, n_topk_groups=1, n_topk_scores_per_group=2,
        n_shared_expert=1, norm_topk_prob=True, routed_scaling_factor=2.0,
    ),
    _entry("mixture-of-experts, both choices", *_SPARSE, **_SMALL, second_policy_train="all"),
    _entry("mixture-of-experts, second by chance", *_SPARSE, **_SMALL, second_policy_train="random"),
    _entry(
        "mixture-of-experts, hierarchical", *_SPARSE[:3], "HeirarchicalMoE", None, dim=_HIDDEN, num_experts=(2, 2),
        hidden_dim=_WIDTH,
    ),
    _entry("st-moe-pytorch", *_ST, dim=_HIDDEN, num_experts=_EXPERTS, expert_hidden_mult=2),
    _entry("st-moe-pytorch, top 3", *_ST, dim=_HIDDEN, num_experts=_EXPERTS, expert_hidden_mult=2, gating_top_n=3),
    _entry("fairscale", "fairscale", "0.4.13", "fairscale.nn.moe", "MOELayer", _fairscale, shapes=((4, 32, _HIDDEN),)),
    _entry("deepspeed, top 1", *_DEEPSPEED, k=1),
    _entry("deepspeed, top 2", *_DEEPSPEED, k=2),
    _entry("deepspeed, top 2, nothing dropped", *_DEEPSPEED, k=2, drop_tokens=False, top2_2nd_expert_sampling=False),
    _entry("deepspeed, top 3", *_DEEPSPEED, k=3),
    _entry("torchscale X-MoE, top 1", *_XMOE, gate="Top1Gate", use_xmoe=True),
    _entry("pytorch-mixtures, top 2", *_MIXTURES, expert="ff"),
    _entry("pytorch-mixtures, expert choice", *_MIXTURES[:3], "ExpertChoiceMoE", _mixtures, expert="ff"),
    _entry("latent-moe, loop", *_LATENT, way="loop"),
    _entry("latent-moe, grouped", *_LATENT, way="grouped"),
    _entry("uni2ts", "uni2ts", "2.0.0", "uni2ts.module.ffn", "MoEFeedForward", _uni2ts,
           shapes=(_SHAPE, (_EXPERTS, _HIDDEN))),
    _entry("eulerforge", "eulerforge", "0.1.0", "eulerforge.modules.moe", "MoEFFN", _eulerforge),
    _entry("qorva", "qorva", "0.1.0", "qorva.model.architecture", "LatentMoE", _qorva),
    _entry("omegavit", "omegavit", "0.0.1", "omegavit.main", "MixtureOfExperts", _omegavit),
    _entry("mh-moe", "mh-moe", "0.0.2", "mh_moe.main", "SparseMoE", None, dim=_HIDDEN, num_experts=_EXPERTS, top_k=2),
    _entry("mixlora", "mixlora", "0.2.3", "mixlora.model", "MixLoraSparseMoe", _mixlora),
    _entry("PEER", "PEER-pytorch", "0.2.2", "PEER_pytorch", "PEER", _peer),
    _entry(
        "soft-moe-pytorch", "soft-moe-pytorch", "0.1.9", "soft_moe_pytorch", "SoftMoE", None, dim=_HIDDEN,
        num_experts=_EXPERTS, seq_len=64,
    ),
    _entry("esmoe", "esmoe", "1.1.0", "esmoe", "ESMoE", None, num_experts=_EXPERTS, channels=_HIDDEN,
           shapes=((8, _HIDDEN, 6, 6),)),
    _entry("sparrow-mlp", "sparrow-mlp", "3.0.2", "sparrow.layers", "MoELayer", _sparrow, shapes=((128, _HIDDEN),)),
    _entry("nllb_moe, no capacity", *_NLLB, expert_capacity=64),
    _entry("nllb_moe, capacity 8", *_NLLB, expert_capacity=8),
    _entry("nllb_moe, capacity 8, sampling", *_NLLB, expert_capacity=8, second_expert_policy="sampling"),
    _entry("nllb_moe, capacity 8, random", *_NLLB, expert_capacity=8, second_expert_policy="random"),
    _entry("nllb_moe, capacity 8, bf16 router", *_NLLB, expert_capacity=8, router_dtype="bfloat16"),
    _entry("nllb_moe, capacity 8, batch prioritized", *_NLLB, expert_capacity=8, batch_prioritized_routing=True),
    _entry("nllb_moe, capacity of evaluation", *_NLLB, moe_eval_capacity_token_fraction=0.1, is_training=False),
    _entry("nllb_moe, capacity 1", *_NLLB, expert_capacity=1),
    _entry(
        "nllb_moe, capacity 8, normalized first", *_NLLB, expert_capacity=8,
        normalize_router_prob_before_dropping=True,
    ),
    _entry("nllb_moe, capacity 8, tokens dropped", *_NLLB, expert_capacity=8, moe_token_dropout=0.2),
    _entry("nllb_moe, capacity 8, dropout in experts", *_NLLB, expert_capacity=8, activation_dropout=0.1),
)  # fmt: skip

PACKAGED: dict[str, PackagedLayer] = {entry.name: entry for entry in _ENTRIES}
