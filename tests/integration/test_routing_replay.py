"""Routing that is recorded and replayed: exact, with the router's own weights, in every way in which a model runs."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import memfine_fx
from memfine_fx.errors import ConfigError, RoutingReplayError
from memfine_fx.models.capacity import CapacityConfig, CapacityMoE
from memfine_fx.models.hashed import HashedConfig, HashedMoE
from memfine_fx.models.zero_experts import ZeroExpertsConfig, ZeroExpertsMoE
from memfine_fx.passes.verify.forced_choices import ForcedChoices, by_routing
from memfine_fx.runtime import routing_hooks, routing_replay
from memfine_fx.runtime.routing import sort_assignments

_E, _K, _LAYERS, _VOCABULARY = 8, 2, 3, 96
Tensors = dict[str, Tensor]
CONFIG = memfine_fx.Config(inner_backend="eager", rows_per_chunk=16)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MEMFINE_OPTIONS", "rows_per_chunk=16")
    yield
    torch._dynamo.reset()


def qwen(implementation: str = "grouped_mm") -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=_VOCABULARY, hidden_size=32, num_hidden_layers=_LAYERS, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, moe_intermediate_size=24, num_experts=_E, num_experts_per_tok=_K, use_cache=False,
    )  # fmt: skip
    model: PreTrainedModel = Qwen3MoeForCausalLM._from_config(config, experts_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    return model


def optimized(inner: Any = "eager") -> PreTrainedModel:
    return memfine_fx.optimize(qwen(), inner_backend=inner, config=CONFIG)


def by_name() -> PreTrainedModel:
    model = qwen()
    model.compile(backend="memfine", options={"inner_backend": "eager", "rows_per_chunk": 16})
    step(model)  # what it was compiled with is known by then
    return model


def with_function() -> PreTrainedModel:
    return qwen("memfine")


WAYS = [optimized, by_name, with_function]


def tokens(batch: int = 2, length: int = 12, seed: int = 1) -> Tensor:
    return torch.randint(0, _VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def step(model: torch.nn.Module, *batches: Tensor) -> Tensors:
    """Return the sum of losses and gradients of a step, backward after each batch."""
    model.zero_grad()
    losses = []
    for batch in batches or (tokens(),):
        output = model(input_ids=batch, labels=batch)
        output.loss.backward()
        losses.append(output.loss.detach())
    gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    return {"loss": torch.stack(losses).sum(), **gradients}


def other_ids(num_tokens: int = 24, num_layers: int = _LAYERS) -> Tensor:
    scores = torch.rand(num_tokens, num_layers, _E, generator=torch.Generator().manual_seed(2))
    return scores.topk(_K, dim=-1).indices


class _Forced:
    """Gives each choice among experts the next layer's ids, below the autograd of an eager model."""

    def __init__(self, ids: Tensor) -> None:
        self.columns = iter(ids.unbind(1))

    def __call__(self, scores: Tensor, own: Tensor) -> Tensor:
        return next(self.columns).long().view(own.shape)


def eager(ids: Tensor, *batches: Tensor) -> Tensors:
    """Return the step of the unmodified model whose choices are forced."""
    with ForcedChoices(_Forced(ids), _E):
        return step(qwen("eager"), *batches)


def assert_same(results: Tensors, expected: Tensors) -> None:
    assert results.keys() == expected.keys()
    differing = [name for name in expected if not torch.equal(results[name], expected[name])]
    assert not differing


def assert_close(results: Tensors, expected: Tensors) -> None:
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        error = (results[name] - value).norm() / value.norm().clamp_min(1e-6)
        assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("build", WAYS)
def test_its_own_routing_gives_the_same_bits_and_another_one_what_the_unmodified_model_would(build: Any) -> None:
    model = build()
    before = step(model)
    with memfine_fx.record_routing(model) as record:
        assert_same(step(model), before)
    assert record.ids.shape == (24, _LAYERS, _K) and record.ids.dtype is torch.uint8
    with memfine_fx.replay_routing(model, record.ids):
        assert_same(step(model), before)
    with memfine_fx.replay_routing(model, other_ids()), memfine_fx.record_routing(model) as record:
        results = step(model)
    assert torch.equal(record.ids.long(), other_ids())
    assert_close(results, eager(other_ids()))
    assert results["model.layers.0.mlp.gate.weight"].any()
    assert_same(step(model), before)


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("build", [optimized, with_function])
def test_layers_that_a_checkpoint_recomputes_get_the_ids_of_their_forward(build: Any, is_reentrant: bool) -> None:
    model = build()
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    model.train()
    with memfine_fx.replay_routing(model, other_ids()), memfine_fx.record_routing(model) as record:
        results = step(model)
    assert record.ids.shape == (24, _LAYERS, _K)  # what is recomputed is not recorded
    assert_close(results, eager(other_ids()))


@pytest.mark.slow
def test_compiled_code_replays() -> None:
    model = optimized("inductor")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with memfine_fx.replay_routing(model, other_ids()):
        assert_close(step(model), eager(other_ids()))


@pytest.mark.parametrize("build", [optimized, with_function])
def test_micro_batches_take_their_tokens_one_after_the_other(build: Any) -> None:
    model, ids = build(), other_ids(24 + 30)
    batches = tokens(), tokens(3, 10, seed=5)
    expected = step(model)  # compiles
    first, second = eager(ids[:24], batches[0]), eager(ids[24:], batches[1])
    expected = {name: first[name] + second[name] for name in first}
    for given in (ids, ids.to(torch.uint8), iter([ids[:24], ids[24:].to(torch.uint16)])):
        with memfine_fx.replay_routing(model, given):
            assert_close(step(model, *batches), expected)


@pytest.mark.parametrize("in_order", [True, False])
def test_of_micro_batches_in_flight_each_is_recomputed_with_its_own_ids(in_order: bool) -> None:
    model, ids = with_function(), other_ids(24 + 24)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    batches = tokens(), tokens(seed=5)
    first, second = eager(ids[:24], batches[0]), eager(ids[24:], batches[1])
    model.zero_grad()
    with memfine_fx.replay_routing(model, ids):
        losses = [model(input_ids=batch, labels=batch).loss for batch in batches]
        for loss in losses if in_order else losses[::-1]:
            loss.backward()
    results = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    expected = {name: first[name] + second[name] for name in results}
    assert_close(results, expected)


@pytest.mark.parametrize("build", [optimized, with_function])
def test_tokens_without_ids_choose_for_themselves(build: Any) -> None:
    model, mask = build(), torch.ones(2, 12, dtype=torch.bool)
    mask[0, :5] = False
    with memfine_fx.record_routing(model) as record:
        step(model)
    given = other_ids(24)[mask.flatten()]
    with memfine_fx.replay_routing(model, given, mask=mask), memfine_fx.record_routing(model) as masked:
        results = step(model)
    assert torch.equal(masked.ids.long()[mask.flatten()], given)
    # The padding's own choices in the first layer, which no other token has changed.
    assert torch.equal(masked.ids[:5, 0], record.ids[:5, 0])
    outside = other_ids(24).masked_fill(~mask.flatten()[:, None, None], 255)
    with memfine_fx.replay_routing(model, outside):
        assert_same(step(model), results)


def test_ids_of_all_layers_are_read_where_the_moe_layers_are() -> None:
    model, ids = with_function(), other_ids()
    of_all = torch.zeros(24, 5, _K, dtype=torch.long)
    of_all[:, [1, 2, 4]] = ids
    with memfine_fx.replay_routing(model, of_all, layers=[1, 2, 4]):
        assert_close(step(model), eager(ids))


def test_record_of_a_generation_has_every_forward_and_forgets_what_is_taken() -> None:
    model = with_function()
    with memfine_fx.record_routing(model) as record, torch.no_grad():
        model(input_ids=tokens())
        model(input_ids=tokens(2, 1))
        assert [len(forward) for forward in record.take()] == [24, 2]
        model(input_ids=tokens(1, 3))
    assert len(record.ids) == 3


@pytest.mark.parametrize(
    "ids, options, message",
    [
        (other_ids()[:, 0], {}, "ids must be integers"),
        (other_ids().float(), {}, "ids must be integers"),
        (torch.zeros(24, _LAYERS, _K, dtype=torch.long), {}, "one expert twice for token 0 of a layer"),
        (other_ids(), {"mask": torch.zeros(24)}, "as many true entries"),
        ([other_ids()], {"mask": torch.ones(24)}, "ids must be one tensor"),
    ],
)
def test_malformed_ids_are_refused(ids: Any, options: dict[str, Any], message: str) -> None:
    model = with_function()
    with pytest.raises(ConfigError, match=message), memfine_fx.replay_routing(model, ids, **options):
        step(model)


@pytest.mark.parametrize(
    "ids, options, message",
    [
        (other_ids(20), {}, "for 3 layers, 2 experts and 20 tokens"),
        (other_ids(30), {}, "ids of 6 tokens were not used"),
        (other_ids(24, 2), {}, "MoE layer 2 chooses 2 experts"),
        (other_ids(24, 4), {}, "ids are for 4 MoE layers, and 3 of the model are chunked"),
        (other_ids(), {"layers": [0, 1]}, "MoE layer 2"),
        ([], {}, "all parts were used"),
    ],
)
@pytest.mark.parametrize("build", [optimized, with_function])
def test_ids_of_another_model_or_batch_are_refused(build: Any, ids: Any, options: Any, message: str) -> None:
    model = build()
    with pytest.raises(RoutingReplayError, match=message), memfine_fx.replay_routing(model, ids, **options):
        step(model)


def test_what_is_not_replayed_says_so() -> None:
    model = qwen("eager")
    with (
        pytest.raises(RoutingReplayError, match="no routing was replayed"),
        memfine_fx.replay_routing(model, other_ids()),
    ):
        step(model)
    with memfine_fx.record_routing(model) as record:
        step(model)
    with pytest.raises(RoutingReplayError, match="no routing was recorded"):
        record.ids  # noqa: B018  # it raises
    compiled = qwen()
    compiled.compile(backend="memfine", options={"inner_backend": "eager"})
    with (
        pytest.raises(RoutingReplayError, match="chose its experts itself"),
        memfine_fx.replay_routing(compiled, other_ids()),
    ):
        step(compiled)
    model = optimized()
    again = memfine_fx.record_routing(model)
    with memfine_fx.record_routing(model), pytest.raises(ConfigError, match="already"), again:
        pass
    with pytest.raises(ConfigError, match="expects a torch"), memfine_fx.record_routing(step):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_backward_outside_runs_as_it_was_compiled_and_a_checkpoint_there_is_refused(is_reentrant: bool) -> None:
    model = optimized()
    with memfine_fx.replay_routing(model, other_ids()):
        loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    results = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    assert_close({"loss": loss.detach(), **results}, eager(other_ids()))
    model = with_function()
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    model.train()
    with memfine_fx.replay_routing(model, other_ids()):
        loss = model(input_ids=tokens(), labels=tokens()).loss
    with pytest.raises(RoutingReplayError, match="run backward inside"):
        loss.backward()
    # What runs plainly on the same tokens, with a checkpoint too, is not taken for it.
    assert_close(step(model), step(qwen("eager")))


def test_another_model_inside_keeps_its_own_routing() -> None:
    model, sampler = with_function(), with_function()
    with memfine_fx.record_routing(sampler) as record:
        expected = step(sampler)
    own = record.ids
    with memfine_fx.replay_routing(model, other_ids()), memfine_fx.record_routing(sampler) as record:
        step(model)
        assert_same(step(sampler), expected)
    assert torch.equal(record.ids, own)


def test_a_table_of_experts_by_token_is_replaced_too() -> None:
    torch.manual_seed(0)
    layer = memfine_fx.optimize(HashedMoE(HashedConfig(hidden=16, expert_width=24, num_experts=4)), config=CONFIG)
    batch = torch.randint(0, 64, (2, 10))
    with memfine_fx.record_routing(layer) as record:
        expected = layer(batch)
    with memfine_fx.replay_routing(layer, record.ids):
        assert torch.equal(layer(batch), expected)
    with memfine_fx.replay_routing(layer, (record.ids + 1) % 4), memfine_fx.record_routing(layer) as moved:
        layer(batch)
    assert torch.equal(moved.ids, (record.ids + 1) % 4)


class _OwnWeights(torch.nn.Module):
    """Switch's router: an arg-max chooses, and a maximum of its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(16, 4, bias=False)
        self.up, self.down = (torch.nn.Parameter(0.2 * torch.randn(4, *shape)) for shape in ((16, 24), (24, 16)))

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.gate(hidden).softmax(-1)
        index = scores.argmax(-1)
        rows = torch.bmm(torch.bmm(hidden[:, None], self.up[index]).relu(), self.down[index])[:, 0]
        return rows * scores.max(-1, keepdim=True).values


def test_weights_that_are_not_those_of_the_chosen_experts_are_refused() -> None:
    torch.manual_seed(0)
    layer, rows = memfine_fx.optimize(_OwnWeights(), config=CONFIG), torch.randn(20, 16)
    with memfine_fx.record_routing(layer) as record:
        layer(rows)
    replay = memfine_fx.replay_routing(layer, record.ids)
    with pytest.raises(RoutingReplayError, match="another max finds"), replay:
        layer(rows)


def test_ids_that_are_computed_of_choices_are_refused() -> None:
    """Experts that do nothing: their tokens reach expert 0 with weight 0, so that a recorded 0 is no choice."""
    torch.manual_seed(0)
    layer = memfine_fx.optimize(ZeroExpertsMoE(ZeroExpertsConfig(16, 24, 4, 4, 2)), config=CONFIG)
    rows = torch.randn(40, 16)
    with memfine_fx.record_routing(layer) as record:
        layer(rows)
    with (
        pytest.raises(RoutingReplayError, match="computed of what the router chooses"),
        memfine_fx.replay_routing(layer, record.ids),
    ):
        layer(rows)
    model = with_function()
    for block in model.model.layers:
        block.mlp.gate.register_forward_hook(lambda gate, args, result: (*result[:2], result[2].clamp(max=_E - 2)))
    with (
        pytest.raises(RoutingReplayError, match="computed of what the router chooses"),
        memfine_fx.record_routing(model),
    ):
        step(model)


def test_dropped_and_undefined_places_have_no_expert() -> None:
    index = torch.tensor([[0, 5], [3, -1], [2, 2]])
    order, offsets = sort_assignments(index, 4)
    order[int(offsets[-1]) :] = 2**30  # as kernels leave it
    ids = routing_hooks._ids_of(order, offsets, 4).view(3, 2)
    assert ids.tolist() == [[0, 4], [3, 4], [2, 2]]


@pytest.mark.parametrize("num_experts, dtype, mark", [(255, torch.uint8, 255), (256, torch.uint16, 65535)])
def test_ids_take_as_few_bytes_as_the_experts_need(num_experts: int, dtype: torch.dtype, mark: int) -> None:
    record = routing_replay.RoutingRecord(routing_replay.Scope(frozenset(), None))
    record.note("layer", torch.tensor([[0, num_experts - 1], [num_experts, -1]]), num_experts)
    assert record.ids.dtype is dtype
    assert record.ids[:, 0].tolist() == [[0, num_experts - 1], [mark, mark]]


def test_the_forced_reference_chooses_in_turn() -> None:
    with ForcedChoices(by_routing("in turn"), 4):
        assert torch.rand(5, 4).topk(2).indices.tolist() == [[0, 1], [1, 2], [2, 3], [3, 0], [0, 1]]


def test_experts_that_choose_tokens_are_refused() -> None:
    torch.manual_seed(0)
    layer = memfine_fx.optimize(CapacityMoE(CapacityConfig(16, 24, 4, 2)), config=CONFIG)
    rows = torch.randn(20, 16)
    layer(rows)
    assert memfine_fx.report(layer).num_chunked
    for context in (memfine_fx.record_routing(layer), memfine_fx.replay_routing(layer, other_ids(20, 1) % 4)):
        with pytest.raises(RoutingReplayError, match="experts choose tokens"), context:
            layer(rows)


def test_a_batch_without_tokens_is_recorded() -> None:
    model = with_function()
    with memfine_fx.record_routing(model) as record, torch.no_grad():
        model.model.layers[0].mlp(torch.zeros(1, 0, 32))
    assert record.ids.shape == (0, 1, _K)


def test_forwards_without_backward_hold_little_and_a_plain_step_after_them_is_right() -> None:
    model = with_function()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    expected = step(qwen("eager"))
    with memfine_fx.replay_routing(model, [other_ids()] * 70), torch.no_grad():
        for _ in range(70):
            model(input_ids=tokens())
    (ended,) = routing_hooks._ended[-1:]
    assert all(len(forwards) <= 64 for forwards in ended._forwards.values())
    for _ in range(70):
        assert_close(step(model), expected)
    assert ended not in routing_hooks._ended


def test_a_model_that_was_compiled_by_name_and_replayed_is_freed() -> None:
    model = by_name()
    with memfine_fx.replay_routing(model, other_ids()):
        step(model)
    gone = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


def test_a_thread_records_while_another_runs() -> None:
    """What one layer runs with is noted by its call; that says nothing of layers of other threads."""
    with routing_hooks.noted():
        results: list[bool] = []
        thread = threading.Thread(target=lambda: results.append(routing_hooks._is_noted.get()))
        thread.start()
        thread.join()
    assert results == [False]
