"""Every feature holds here; broken on purpose, each says once what is lost, and training stays right."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import gc
import importlib.util
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._functorch.config
import torch._functorch.partitioners
import torch._inductor.codegen.cpp
import torch._inductor.config
import torch._inductor.utils
import torch._logging._internal
import torch._prims.rng_prims
import torch.amp.autocast_mode
import torch.utils._python_dispatch
from torch._dynamo import eval_frame
from torch._dynamo.comptime import ComptimeContext
from torch._functorch._aot_autograd.aot_autograd_result import GenericAOTAutogradResult
from torch._inductor.dependencies import ReadWrites
from torch._inductor.graph import GraphLowering
from torch._inductor.output_code import CompiledFxGraph
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parallel import DistributedDataParallel

import memfine_fx
from memfine_fx.compat import (
    accelerate,
    autograd,
    bitsandbytes,
    checks,
    chunking,
    dynamo,
    effects,
    functional,
    functorch,
    inductor,
    interpreter,
    llamafactory,
    nn,
    operators,
    peft,
    settings,
    shapes,
    tensors,
    transformers,
)
from memfine_fx.compat.checks import Feature
from memfine_fx.compat.settings import Setting
from memfine_fx.errors import CompatibilityWarning, MemfineError
from memfine_fx.expert_parallel.shard import shard_experts
from memfine_fx.models.mixtral import MixtralConfig, MixtralMoE
from tests.integration.comparison import FP32_TOLERANCE, relative_error

Break = Callable[[pytest.MonkeyPatch], None]
FEATURES = checks.all_features()
SETTINGS = [feature for feature in FEATURES if isinstance(feature, Setting)]


def lacking(owner: Any, name: str) -> Break:
    return lambda patch: patch.delattr(owner, name)


def having(owner: Any, name: str, value: Any) -> Break:
    return lambda patch: patch.setattr(owner, name, value, raising=False)


def without_module(name: str) -> Break:
    return lambda patch: patch.setitem(sys.modules, name, None)


def lacking_option(setting: Setting) -> Break:
    if setting is settings.DEBUG_LOGGING:
        return having(settings, "logging_option", lambda: "ignored_by_nobody")
    return lambda patch: patch.delattr(setting.config, next(iter(setting.values)))


def blind_to_policies(joint: torch.fx.GraphModule, *args: Any, num_fwd_outputs: int) -> Any:
    for node in joint.graph.nodes:
        node.meta.pop("recompute", None)
    return _partition(joint, *args, num_fwd_outputs=num_fwd_outputs)


def breaks_switchable_experts(patch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("transformers")
    patch.delattr(module.PreTrainedModel, "_can_set_experts_implementation")


def holds_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.autograd.Function, "boxed_grads_call", False, raising=False)  # is none before torch 2.13
    patch.setattr(functorch, "weakref", types.SimpleNamespace(ref=lambda tensor: lambda: tensor))


_partition = torch._functorch.partitioners.min_cut_rematerialization_partition
_autograd: Any = torch._C._autograd
_compile = eval_frame._TorchDynamoContext.__call__
_keeps = "_get_current_graph_task_keep_graph"
_ignores = "_set_params_and_buffers_to_ignore_for_model"
BREAKS: dict[Feature, Break] = {
    accelerate.BACKENDS: having(accelerate, "add_backend", lambda module: None),
    autograd.ACCUMULATED: having(torch._C, "_will_engine_execute_node", lambda node: True),
    autograd.BACKWARD: having(torch._C, "_current_graph_task_id", lambda: -1),
    autograd.KEPT_GRAPHS: having(_autograd, _keeps, lambda: False),
    autograd.SAVED_TENSOR_HOOKS: having(_autograd, "_top_saved_tensors_default_hooks", lambda ignores: None),
    autograd.MODES: lacking(torch.utils._python_dispatch, "_disable_current_modes"),
    autograd.PROFILER: lacking(torch.autograd.profiler, "_is_profiler_enabled"),
    chunking.GRAPHS: without_module("memfine_fx.compat.operators"),
    **{setting: lacking_option(setting) for setting in SETTINGS},
    nn.IGNORED_BY_DDP: having(DistributedDataParallel, _ignores, staticmethod(lambda module, names: None)),
    dynamo.GRAPH_BREAKS: having(
        dynamo, "_utils", lambda: types.SimpleNamespace(counters=collections.defaultdict(collections.Counter))
    ),
    dynamo.SEEN_BACKENDS: having(dynamo, "_seen_backends", dict),
    effects.PYTHON_EFFECTS: lacking(ComptimeContext, "_i_will_not_complain_if_bc_breaks_InstructionTranslator"),
    functorch.CACHED_RECORDS: lacking(GenericAOTAutogradResult, "wrap_post_compile"),
    functorch.DONATED: having(torch._inductor.utils, "get_donated_idxs", lambda: [0, 2]),
    functorch.PARTITIONER: having(
        torch._functorch.partitioners, "min_cut_rematerialization_partition", blind_to_policies
    ),
    functorch.RANDOM_STATES: lacking(torch._prims.rng_prims, "run_with_rng_state"),
    functorch.TANGENTS: holds_gradients,
    inductor.COMPILER: lacking(torch._inductor.config, "custom_partitioner_fn"),
    inductor.INDICES: lacking(torch._inductor.codegen.cpp, "stride_at_vec_range"),
    inductor.KERNELS: lacking(torch._inductor.config, "_post_fusion_custom_pass"),
    inductor.MUTATIONS: lacking(ReadWrites, "rename"),
    inductor.TRACING: having(torch._guards.TracingContext, "try_get", staticmethod(lambda: None)),
    inductor.WRAPPERS: lambda patch: patch.delitem(CompiledFxGraph.__annotations__, "source_code"),
    interpreter.COMPILED_CALLS: having(eval_frame._TorchDynamoContext, "__call__", lambda *args: _compile(*args)),
    interpreter.OBJECTS: having(gc, "get_freeze_count", lambda: 200_000),
    llamafactory.CHECKPOINTING: having(llamafactory, "capture_checkpoints", lambda module: None),
    nn.COMPILED_CALLS: having(torch.nn.Module, "__call__", lambda module, *args: module.forward(*args)),
    bitsandbytes.LAYERS: without_module("bitsandbytes.nn.modules"),
    bitsandbytes.TABLE_CACHE: without_module("bitsandbytes.nn.parametrize"),
    peft.MAGNITUDES: without_module("peft"),
    peft.WRAPPERS: without_module("peft"),
    shapes.HINTS: having(ShapeEnv, "backed_var_to_val", property(lambda env: {}, lambda env, values: None)),
    dynamo.RECORDS: lacking(torch._logging._internal, "trace_structured"),
    transformers.RECORDERS: lambda patch: patch.setitem(
        sys.modules, "transformers.utils.output_capturing", types.ModuleType("output_capturing")
    ),
    transformers.EXPERTS: having(importlib.import_module("transformers.integrations.moe"), "_default_apply_gate", None),
    transformers.SPELLINGS: breaks_switchable_experts,
}


def named(feature: Feature) -> str:
    return feature.name


def losses(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if issubclass(one.category, CompatibilityWarning)]


@pytest.mark.parametrize("feature", FEATURES, ids=named)
def test_a_feature_holds_with_what_is_installed(feature: Feature) -> None:
    if importlib.util.find_spec(feature.package) is None:
        pytest.skip(f"{feature.package} is not installed")
    assert feature.holds()


PARTS: list[tuple[Feature, str, Break]] = [
    (chunking.GRAPHS, "operators", without_module("memfine_fx.compat.operators")),
    (chunking.GRAPHS, "schemas", having(operators, "qualified_name", lambda target: "aten::other")),
    (chunking.GRAPHS, "storages", having(tensors, "storage_id", lambda value: 0)),
    (chunking.GRAPHS, "symbols", lacking(ShapeEnv, "create_symintnode")),
    (chunking.GRAPHS, "functional tensors", having(functional, "functional_value", lambda tensor: tensor.clone())),
    (chunking.GRAPHS, "modes", lacking(torch.amp.autocast_mode, "_enter_autocast")),
    (accelerate.BACKENDS, "models", having(accelerate, "hand_over_models", lambda module, optimize: None)),
    (autograd.ACCUMULATED, "hooks", having(torch.Tensor, "_post_accumulate_grad_hooks", property(lambda tensor: None))),
    (inductor.WRAPPERS, "code", lacking(GraphLowering, "compile_to_module")),
]
"""Features that rest upon several parts, each of which is broken on purpose."""


@pytest.mark.parametrize(
    ("feature", "breaks"), [(feature, breaks) for feature, _, breaks in PARTS], ids=[part for _, part, _ in PARTS]
)
def test_a_feature_does_not_hold_where_any_part_of_it_differs(
    feature: Feature, breaks: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_failures", {})
    breaks(monkeypatch)
    with pytest.warns(CompatibilityWarning) as caught:
        assert not feature.holds()
    assert str(caught[0].message).endswith(feature.fallback)


def test_every_feature_is_broken_on_purpose() -> None:
    assert set(FEATURES) == set(BREAKS)
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)


@pytest.mark.parametrize("feature", FEATURES, ids=named)
def test_a_feature_that_is_broken_says_once_what_is_lost(feature: Feature, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_failures", {})
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        BREAKS[feature](patch)
        assert not feature.holds()
        assert not feature.holds()
    (loss,) = losses(caught)
    assert loss.endswith(feature.fallback)
    assert feature.name in loss
    assert f"{feature.package} {feature.seen[0]} to {feature.seen[1]}" in loss


def test_a_check_in_which_another_feature_is_asked_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage that is collected during a check may do so: once a process waited for itself there."""
    monkeypatch.setattr(checks, "_failures", {})
    inner = dataclasses.replace(dynamo.SEEN_BACKENDS, name="inner")
    outer = dataclasses.replace(inner, name="outer", check=lambda: checks.expect(inner.holds(), "inner"))
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(outer.holds()), daemon=True)
    asking.start()
    asking.join(timeout=30)
    assert answers == [True]


def test_a_session_that_is_garbage_asks_no_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MixtralMoE(MixtralConfig(8, 6, num_experts=4, spelling="gathered"))
    gc.collect()
    before = backends_seen()
    memfine_fx.optimize(model, inner_backend="eager")(torch.randn(5, 8))
    assert backends_seen() - before
    asked: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Feature, "holds", lambda feature: asked.append(feature.name))
        del model
        gc.collect()
    assert backends_seen() <= before
    assert asked == []


def backends_seen() -> set[int]:
    """Keys of Dynamo's list; None is what it keeps there for functions that it leaves alone."""
    return {key for key, one in torch._dynamo.eval_frame.cached_backends.items() if one is not None}


def train(model: torch.nn.Module, hidden: torch.Tensor, *, is_repeated: bool) -> list[torch.Tensor]:
    """A loss and every gradient, those of a second backward through the forward too where it may run again."""
    loss = model(hidden).square().sum()
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True) if is_repeated else ()
    return [loss.detach(), *first, *torch.autograd.grad(loss, parameters)]


ESSENTIAL = [
    (chunking.GRAPHS, "eager"),
    (functorch.PARTITIONER, "aot_eager"),
    (nn.COMPILED_CALLS, "eager"),
    pytest.param(inductor.COMPILER, "inductor", marks=pytest.mark.slow),
]
OPTIONAL = [
    (autograd.SAVED_TENSOR_HOOKS, "eager"),
    (autograd.PROFILER, "eager"),
    (dynamo.RECORDS, "eager"),
    (settings.CAPTURE_FLAGS, "eager"),
    (settings.AUTOGRAD_CACHE, "aot_eager"),
    (functorch.DONATED, "aot_eager"),
    (functorch.RANDOM_STATES, "aot_eager"),
    pytest.param(
        functorch.TANGENTS,
        "aot_eager",
        marks=pytest.mark.skipif(
            not hasattr(torch.autograd.Function, "boxed_grads_call"), reason="never asked before torch 2.13"
        ),
    ),
    (shapes.HINTS, "aot_eager"),
    pytest.param(autograd.KEPT_GRAPHS, "inductor", marks=pytest.mark.slow),
    pytest.param(functorch.DONATED, "inductor", marks=pytest.mark.slow),
    pytest.param(settings.RECOMPUTED_POINTWISE, "inductor", marks=pytest.mark.slow),
    pytest.param(inductor.KERNELS, "inductor", marks=pytest.mark.slow),
    pytest.param(inductor.TRACING, "inductor", marks=pytest.mark.slow),
    pytest.param(inductor.WRAPPERS, "inductor", marks=pytest.mark.slow),
]


def lost_in_training(
    feature: Feature, inner: Any, monkeypatch: pytest.MonkeyPatch, *, is_repeated: bool
) -> tuple[list[str], torch.nn.Module]:
    """What is warned of while a model trains without a feature, and the model; its gradients are right.

    Inductor takes nothing from its caches on disk: what an earlier run compiled lacks nothing.
    """
    monkeypatch.setitem(checks._failures, feature.name, "broken on purpose")
    model = MixtralMoE(MixtralConfig(8, len(feature.name), num_experts=4, top_k=2, spelling="gathered"))
    hidden = torch.randn(13, 8)
    reference = train(copy.deepcopy(model), hidden, is_repeated=is_repeated)
    uncached = torch._inductor.utils.fresh_cache() if inner == "inductor" else contextlib.nullcontext()
    with uncached, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        memfine_fx.optimize(model, dynamic=True, config=memfine_fx.Config(inner_backend=inner, rows_per_chunk=5))
        for _ in range(2):
            for ours, theirs in zip(train(model, hidden, is_repeated=is_repeated), reference, strict=True):
                assert relative_error(ours, theirs) < FP32_TOLERANCE
    lost = [str(one.message) for one in caught if "memfine_fx" in str(one.message)]
    return lost, model


@pytest.mark.parametrize(("feature", "inner"), ESSENTIAL)
def test_nothing_is_chunked_without_what_gradients_rest_upon(
    feature: Feature, inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lost,), model = lost_in_training(feature, inner, monkeypatch, is_repeated=False)
    assert lost.endswith(feature.fallback)
    try:
        assert memfine_fx.report(model).num_chunked == 0
    except MemfineError:
        assert feature is nn.COMPILED_CALLS


@pytest.mark.parametrize(("feature", "inner"), OPTIONAL)
def test_training_goes_on_without_a_feature(feature: Feature, inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, model = lost_in_training(feature, inner, monkeypatch, is_repeated=feature is not functorch.DONATED)
    assert [one.endswith(feature.fallback) for one in lost] == [True]
    assert memfine_fx.report(model).num_chunked == 1


def test_a_second_backward_is_refused_where_donated_tensors_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks._failures, functorch.DONATED.name, "broken on purpose")
    model = MixtralMoE(MixtralConfig(8, 6, num_experts=4, spelling="gathered"))
    memfine_fx.optimize(model, inner_backend="aot_eager")
    with pytest.warns(CompatibilityWarning), pytest.raises(RuntimeError, match="donated buffer"):
        train(model, torch.randn(13, 8), is_repeated=True)


def test_experts_are_not_sharded_where_ddp_would_average_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks._failures, nn.IGNORED_BY_DDP.name, "broken on purpose")
    model = MixtralMoE(MixtralConfig(8, 6, num_experts=4, spelling="gathered"))
    ranks: Any = None
    with pytest.warns(CompatibilityWarning), pytest.raises(MemfineError, match="average different experts"):
        shard_experts(model, ranks)


def test_a_backend_that_accelerate_does_not_take_is_given_up_once() -> None:
    names = types.SimpleNamespace(DynamoBackend=types.SimpleNamespace(__members__={}))
    with pytest.warns(CompatibilityWarning, match="torch_compile_backend") as caught:
        accelerate.add_backend(names)
        accelerate.add_backend(names)
    assert len(caught) == 1


def test_rates_are_measured_with_real_tensors_without_the_feature_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks._failures, autograd.MODES.name, "broken on purpose")
    with tensors.FakeTensorMode(), pytest.warns(CompatibilityWarning, match="thread of their own"):
        made = autograd.run_without_modes(lambda: torch.ones(2))
    assert not isinstance(made, tensors.FakeTensor)


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0", "2.16.0.dev20260101+cpu", "3.0"])
def test_an_optimized_model_under_another_torch_warns_once_and_runs(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    model = torch.nn.Linear(2, 2)
    with pytest.warns(CompatibilityWarning, match=r"tested with torch>=2\.11,<2\.16; this is torch") as caught:
        for _ in range(2):
            memfine_fx.optimize(model, inner_backend="eager")
    assert len(caught) == 1
    assert version in str(caught[0].message)


@pytest.mark.parametrize("version", ["2.11.0", "2.15.1+cu130", "2.15.0a0+git1"])
def test_a_tested_torch_warns_of_nothing(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    checks.warn_outside_tested_range()


def test_features_are_all_asked_in_a_process_that_made_no_fake_tensor() -> None:
    """torch 2.11 crashed in the second thread that made one, where the first had ended."""
    asked = subprocess.run([sys.executable, "-m", "memfine_fx.compat"], capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stdout + asked.stderr
    *features, summary = asked.stdout.splitlines()
    assert {line.split()[0] for line in features} <= {"holds", "absent"} and len(features) == len(FEATURES)
    assert summary == "all hold that are needed here"
