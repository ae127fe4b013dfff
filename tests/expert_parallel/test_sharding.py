"""What one rank sees: sharding in place, refusals and bad input, in a group of one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import memfine_fx
from memfine_fx.compat.checks import Feature
from memfine_fx.compat.peft import WRAPPERS
from memfine_fx.errors import ConfigError
from memfine_fx.expert_parallel.bandwidth import Links, bandwidth_of, links_of, measure_bandwidth
from memfine_fx.expert_parallel.groups import ExpertGroup, expert_group
from memfine_fx.expert_parallel.shard import shard_experts, sharded_parameters
from memfine_fx.expert_parallel.state import whole_state_dict
from memfine_fx.models import DeepseekConfig, DeepseekMoE
from memfine_fx.passes.lower.sharded import OWN_EXCHANGE


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mesh() -> Any:
    return dist.device_mesh.init_device_mesh("cpu", (1,))


def small_model() -> DeepseekMoE:
    return DeepseekMoE(DeepseekConfig(hidden=8, expert_width=4, num_experts=8, top_k=2, spelling="gathered"))


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    return memfine_fx.optimize(model, inner_backend="eager", expert_parallel=mesh(), **options)


def test_type_names_and_objects_of_parameters_stay() -> None:
    model = small_model()
    before = dict(model.named_parameters())
    sharded(model)
    assert type(model.experts).__name__ == "GatedExperts" and isinstance(model, DeepseekMoE)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert set(sharded_parameters(model)) == {"experts.gate_up_proj", "experts.down_proj"}


def test_state_dicts_hold_dtensors_and_load_whole_tensors() -> None:
    model, other = small_model(), small_model()
    whole = copy.deepcopy(other.state_dict())
    sharded(model)
    state = model.state_dict()
    assert state.keys() == whole.keys()
    table = state["experts.down_proj"]
    assert isinstance(table, DTensor) and table.shape == whole["experts.down_proj"].shape
    model.load_state_dict(whole)
    assert torch.equal(model.experts._parameters["down_proj"], whole["experts.down_proj"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ranks, local, node",
    [
        (range(8), "4", 4),
        (range(8, 16), "4", 4),
        (range(8), "", 8),
        (range(4), "8", 4),
        (range(0, 16, 2), "4", 8),  # every other rank
        (range(2, 10), "4", 8),  # begins within a node
        (range(6), "4", 6),
    ],
)
def test_ranks_lie_on_nodes_as_torchrun_says(
    ranks: range, local: str, node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(ranks))
    assert ExpertGroup(mesh(), 0).node_ranks == node


def test_links_of_one_node_are_those_of_all() -> None:
    rate = measure_bandwidth(ranks := expert_group(mesh()))
    assert links_of(ranks) == Links(rate, rate, 1) and rate == bandwidth_of(ranks) > 0


@pytest.mark.parametrize(
    "budget, dtype, slots",
    [
        (None, torch.float32, 0),
        ("least", torch.float32, 0),
        (20 * 1152 - 1, torch.float32, 0),
        (20 * 1152, torch.float32, 1),  # 96 numbers in a slot; in fp32 their gradient, and one that returned
        (20 * 1920, torch.float32, 2),
        ("1GiB", torch.float32, 2),
        (0.5, torch.float32, 2),
        (
            20 * 4032 - 1,
            torch.bfloat16,
            0,
        ),  # 96 numbers of two bytes, and ten gradients: this rank's eight are open too
        (20 * 4032, torch.bfloat16, 1),
    ],
)
def test_slots_follow_from_the_budget_where_they_are_left_open(budget: Any, dtype: torch.dtype, slots: int) -> None:
    model = small_model().to(dtype)
    (one, *_) = shard_experts(model, expert_group(mesh()), memfine_fx.Config(memory_budget=budget))
    assert one.ranks.slots == slots
    (one, *_) = shard_experts(small_model(), expert_group(mesh(), slots=1), memfine_fx.Config(memory_budget=budget))
    assert one.ranks.slots == 1


def test_fsdp_is_refused_where_it_would_shard_the_experts_once_more() -> None:
    model = small_model()
    sharded(model)
    with pytest.raises(
        ConfigError, match=r"experts\.gate_up_proj holds other experts on each rank .* ignored_params=\{"
    ):
        fully_shard(model, mesh=mesh())
    other = small_model()
    sharded(other)
    experts = {one.parameter for one in sharded_parameters(other).values()}
    fully_shard(other, mesh=mesh(), ignored_params=experts)
    assert {name for name, one in other.named_parameters() if not isinstance(one, DTensor)} == set(
        sharded_parameters(other)
    )


def test_a_layer_that_is_not_chunked_gathers_its_experts_and_is_right() -> None:
    model = small_model()
    hidden = torch.randn(6, 8)
    expected = model(hidden)
    sharded(model)
    with pytest.warns(RuntimeWarning, match="reads the whole table of sharded experts"):
        out = type(model).forward(model, hidden)  # no call of the model that is compiled
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert model.experts._parameters["down_proj"].grad is not None  # type: ignore[union-attr]


class OwnExchange(nn.Module):
    """A layer that sends its rows to experts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(8, 8, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight, index = self.gate(hidden).softmax(-1).max(-1)
        rows = hidden[index.argsort(stable=True)]
        size = [rows.shape[0]]
        back = all_to_all_single_autograd(self.up(rows), size, size, dist.group.WORLD)
        return back * weight.unsqueeze(-1)


def test_a_model_with_an_exchange_of_its_own_is_refused_with_the_reason() -> None:
    report = memfine_fx.explain(OwnExchange(), torch.randn(6, 8))
    assert OWN_EXCHANGE in {region.reason for region in report.regions}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": True}, "verify the model before expert_parallel"),
        ({"config": memfine_fx.Config(axis="tokens", tokens_per_chunk=8)}, "instead of tokens_per_chunk"),
    ],
)
def test_options_that_need_all_experts_here_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sharded(small_model(), **options)


def test_a_model_without_experts_and_a_second_sharding_are_refused() -> None:
    with pytest.raises(ConfigError, match="no experts were found to shard"):
        sharded(nn.Linear(8, 8))
    model = sharded(small_model())
    with pytest.raises(ConfigError, match="sharded already"):
        sharded(model)


def test_only_a_mesh_or_a_group_is_accepted() -> None:
    with pytest.raises(ConfigError, match="must be a DeviceMesh or a ProcessGroup, got int"):
        memfine_fx.optimize(small_model(), expert_parallel=2)  # type: ignore[arg-type]
    assert sharded_parameters(memfine_fx.optimize(small_model(), expert_parallel=dist.group.WORLD))


def test_a_deep_copy_shares_its_experts_among_the_same_ranks() -> None:
    model, reference = small_model(), small_model()
    reference.load_state_dict(model.state_dict())
    optimized, hidden = sharded(model), torch.randn(6, 8)
    optimized(hidden)
    copied = copy.deepcopy(optimized)
    with torch.no_grad():
        for parameter in (*copied.parameters(), *reference.parameters()):
            parameter.mul_(2)
    torch.testing.assert_close(copied(hidden), reference(hidden))
    assert memfine_fx.report(copied).num_chunked == 1
    assert isinstance(copied.state_dict()["experts.down_proj"], DTensor)
    own, other = (sharded_parameters(one)["experts.down_proj"].module for one in (copied, optimized))
    assert own is not other


def test_a_pickle_of_one_rank_is_refused_with_what_saves_the_model() -> None:
    with pytest.raises(memfine_fx.MemfineError, match="TrainingState"):
        pickle.dumps(sharded(small_model()))


def test_none_once_the_group_exists_means_that_no_ranks_share_the_experts() -> None:
    model = memfine_fx.optimize(small_model(), inner_backend="eager", expert_parallel=None)
    assert not sharded_parameters(model)


def adapted_model(*others: str) -> nn.Module:
    peft = pytest.importorskip("peft")
    tables = ["experts.gate_up_proj", "experts.down_proj", *others]
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=tables, init_lora_weights=False)
    model: nn.Module = peft.get_peft_model(small_model(), config)
    return model


@pytest.mark.trainers
def test_adapters_stand_with_experts_first_in_state_dicts_and_load_as_peft_writes_them() -> None:
    model, other = adapted_model(), adapted_model()
    whole = copy.deepcopy(other.state_dict())
    sharded(model)
    factors = {name: one for name, one in model.state_dict().items() if "lora_" in name}
    shapes = {(name.split("lora_")[1][0], tuple(one.shape)) for name, one in factors.items()}
    assert shapes == {("A", (8, 2, 8)), ("B", (8, 8, 2)), ("A", (8, 2, 4))}
    model.load_state_dict(whole)
    exported = whole_state_dict(model)
    assert exported.keys() == whole.keys()
    assert all(torch.equal(exported[name], value) for name, value in whole.items())


@pytest.mark.trainers
@pytest.mark.filterwarnings("ignore:a layer reads the whole table")
def test_adapters_of_shared_tables_are_added_outside_of_graphs_and_left_out_where_they_are_disabled() -> None:
    model, hidden = adapted_model(), torch.randn(5, 8)
    reference = copy.deepcopy(model)
    shard_experts(model, expert_group(mesh()))
    torch.testing.assert_close(model(hidden), reference(hidden))
    with model.disable_adapter(), reference.disable_adapter():
        torch.testing.assert_close(model(hidden), reference(hidden))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in (*copied.parameters(), *reference.parameters()):
            parameter.mul_(1.5)
    torch.testing.assert_close(copied(hidden), reference(hidden))
    assert all(one.is_here for one in sharded_parameters(copied).values())


@pytest.mark.trainers
def test_adapters_of_a_router_stay_whole_on_every_rank() -> None:
    model, hidden = adapted_model("gate.weight"), torch.randn(5, 8)
    reference = copy.deepcopy(model)
    sharded(model)
    torch.testing.assert_close(model(hidden), reference(hidden))
    assert memfine_fx.report(model).num_chunked == 1
    assert not any(".gate." in name for name in sharded_parameters(model))


@pytest.mark.trainers
def test_adapters_are_not_merged_into_tables_that_ranks_share() -> None:
    model = sharded(adapted_model())
    with pytest.raises(ConfigError, match="whole_state_dict"):
        model.merge_adapter()
    (outer, _) = (one for one in model.modules() if type(one).__name__ == "ParamWrapper")
    with pytest.raises(ConfigError, match="adapter_names"):
        outer(torch.randn(5, 8), adapter_names=["default"] * 5)


@pytest.mark.trainers
def test_adapters_of_tables_in_other_dtypes_or_of_an_unknown_peft_are_refused_before_anything_is_cut() -> None:
    model = adapted_model()
    before = {name: one.shape for name, one in model.named_parameters()}
    for name, one in model.named_parameters():
        if "lora_" not in name and "experts" in name:
            one.requires_grad_(False).data = one.data.to(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match="PEFT does not add in its dtype"):
        sharded(model)
    assert {name: one.shape for name, one in model.named_parameters()} == before
    is_known = mock.patch.object(Feature, "holds", lambda feature: feature is not WRAPPERS)
    with is_known, pytest.raises(ConfigError, match="version of PEFT"):
        sharded(adapted_model())
