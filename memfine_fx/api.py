"""`optimize`, `explain`, `verify`, `report`: thin; the pipeline is in `backend`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from memfine_fx.capture.adapters import TracedAdapters
from memfine_fx.capture.buckets import kept_whole
from memfine_fx.capture.flags import CapturingCall
from memfine_fx.capture.implementation import switch_experts, switched_experts
from memfine_fx.capture.ranks import capture_on_ranks
from memfine_fx.capture.recorded import RecordedOutputs
from memfine_fx.compat.nn import COMPILED_CALLS, compiled_call, plain_call, set_compiled_call
from memfine_fx.config import Config, InnerBackend, MemoryBudget
from memfine_fx.errors import ConfigError, MemfineError
from memfine_fx.memory.measure import MemoryTrace, trace_memory
from memfine_fx.report import Report
from memfine_fx.verification import VerifyReport

if TYPE_CHECKING:  # what plans imports sympy, which would be most of the package's import time
    from memfine_fx.expert_parallel.groups import ExpertGroup, MeshOrGroup
    from memfine_fx.session import Session

__all__ = ["explain", "optimize", "report", "verify"]

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
_sessions_by_model: weakref.WeakKeyDictionary[torch.nn.Module, Session] = weakref.WeakKeyDictionary()


def optimize(
    model: ModuleT,
    *,
    memory_budget: MemoryBudget = None,
    inner_backend: InnerBackend = "inductor",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    verify: bool = False,
    expert_parallel: MeshOrGroup | ExpertGroup | None = None,
    config: Config | None = None,
) -> ModuleT:
    """Compile an MoE model in place so that its experts train chunk by chunk, recomputing in backward.

    The type, parameters, `state_dict` keys and methods of the model stay as they were.

    Args:
        model: any `nn.Module`; nothing in it needs to know of memfine_fx.
        memory_budget: peak bytes of a training step on this device: None (automatic), "20GiB", an int of
            bytes, or a float in (0, 1] of the device's memory.
        inner_backend: "inductor", or "aot_eager" / "eager" for debugging.
        fullgraph: as in `torch.compile`.
        dynamic: as in `torch.compile`.
        verify: at first compile, check every region's rewritten form against its original, forward and backward,
            on the inputs at hand and on adversarial routings; one that fails stays as it was and is reported.
        expert_parallel: ranks that share the experts, as a `DeviceMesh` or a process group: each keeps its own experts
            only and rows travel to them in rounds of bounded size (docs/expert_parallel.md). A collective call.
        config: further options; `memory_budget` and `inner_backend` given here override its fields.

    Returns:
        The same model.

    Raises:
        ConfigError: an argument is malformed.
        BudgetInfeasible: at the first step, when no plan fits; names the smallest budget that would.

    Source: MemFine (arXiv 2511.21431); the rows axis is described in docs/design.md.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"optimize expects a torch.nn.Module, got {type(model).__name__}")
    chosen = _merged(config, memory_budget, inner_backend)
    if verify:
        chosen = dataclasses.replace(chosen, verify=True)
    if not COMPILED_CALLS.holds():
        return model
    if expert_parallel is not None:
        _shard(model, expert_parallel, chosen)
        dynamic = dynamic is None or dynamic  # ranks have their own numbers of tokens
    session = _open_session(chosen)
    _sessions_by_model[model] = session
    if chosen.captures_loops:
        session.notes.extend(switch_experts(model))
    set_compiled_call(model, _captured(model, plain_call(model), session, fullgraph=fullgraph, dynamic=dynamic))
    _warn_after_first_call(model, session)
    if expert_parallel is not None:
        capture_on_ranks(model)
    return model


def explain(
    model: torch.nn.Module, *args: Any, measure: bool = False, config: Config | None = None, **kwargs: Any
) -> Report:
    """What memfine_fx finds in one call of a model, what it would choose, what it refuses and why.

    The model is not compiled in place and its parameters are not changed. Its forward does run once (buffers
    that it updates, it updates), and with `measure` its backward too; gradients are put back afterwards.

    Args:
        model: any `nn.Module`, optimized or not.
        *args: one call's inputs.
        **kwargs: its inputs by name.
        measure: also run one optimized forward and backward and measure its peak bytes.
        config: options to explain under.

    Returns:
        The report; `str(report)` and `report.to_json()`.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"explain expects a torch.nn.Module, got {type(model).__name__}")
    session = _open_session(config or Config(), is_dry=not measure)
    with contextlib.ExitStack() as stack:
        if session.config.captures_loops:
            session.notes.extend(stack.enter_context(switched_experts(model)))
        compiled = _captured(model, model.forward, session, fullgraph=False, dynamic=True)
        if measure:
            return session.report(_measured_step(model, functools.partial(compiled, *args, **kwargs)))
        compiled(*args, **kwargs)
        _plan_dry_run(session)
        return session.report()


def verify(model: torch.nn.Module, *args: Any, config: Config | None = None, **kwargs: Any) -> VerifyReport:
    """Check every rewrite that memfine_fx would make in one call of a model against what it replaces.

    Each region's original and rewritten form run forward and backward on the call's own inputs and on adversarial
    routings; outputs and every gradient are measured against the original in fp64. The model is not compiled in
    place and its parameters are not changed; its forward runs as `explain` runs it.

    Args:
        model: any `nn.Module`, optimized or not.
        *args: one call's inputs.
        **kwargs: its inputs by name.
        config: options to verify under; bodies are compiled by its `inner_backend`.

    Returns:
        The report; `has_passed`, `worst_error`, `str(report)`, `to_json()`.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"verify expects a torch.nn.Module, got {type(model).__name__}")
    session = _open_session(dataclasses.replace(config or Config(), verify=True), is_dry=True)
    with contextlib.ExitStack() as stack:
        if session.config.captures_loops:
            session.notes.extend(stack.enter_context(switched_experts(model)))
        _captured(model, model.forward, session, fullgraph=False, dynamic=True)(*args, **kwargs)
        return session.verify_report()


def report(model: torch.nn.Module | Callable[..., Any]) -> Report:
    """The report of a model that was optimized (or compiled with backend="memfine") and has run.

    Raises:
        MemfineError: memfine_fx has compiled nothing of this model.
    """
    if isinstance(model, torch.nn.Module) and model in _sessions_by_model:
        return _sessions_by_model[model].report()
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    from memfine_fx.session import sessions

    for session in reversed(sessions()):
        of_model = None if session.is_dry else session.restricted_to(parameters)
        if of_model is not None:
            return of_model.report()
    raise MemfineError(
        "nothing of this model has been compiled by memfine_fx: call memfine_fx.optimize(model) or "
        "torch.compile(model, backend='memfine') and run one step first"
    )


def _open_session(config: Config, *, is_dry: bool = False) -> Session:
    from memfine_fx.session import open_session

    return open_session(config, is_dry=is_dry)


def _merged(config: Config | None, memory_budget: MemoryBudget, inner_backend: InnerBackend) -> Config:
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"config must be a memfine_fx.Config, got {type(config).__name__}")
    base = config or Config()
    changes: dict[str, Any] = {}
    if memory_budget is not None:
        changes["memory_budget"] = memory_budget
    if inner_backend != "inductor":
        changes["inner_backend"] = inner_backend
    return dataclasses.replace(base, **changes)


def _shard(model: torch.nn.Module, expert_parallel: MeshOrGroup | ExpertGroup, config: Config) -> None:
    from memfine_fx.expert_parallel.groups import ExpertGroup, expert_group
    from memfine_fx.expert_parallel.shard import shard_experts

    if config.verify:
        raise ConfigError("verify=True runs regions on one rank's own inputs; verify the model before expert_parallel")
    if config.tokens_per_chunk is not None:
        raise ConfigError(
            "expert_parallel agrees upon token slices in each step, from the rows that come: "
            "give Config.rows_per_chunk (s'_max) instead of tokens_per_chunk"
        )
    ranks = expert_parallel if isinstance(expert_parallel, ExpertGroup) else expert_group(expert_parallel)
    shard_experts(model, ranks, config)


def _backend_of(session: Session) -> Callable[..., Any]:
    def memfine(graph_module: Any, example_inputs: Any, **_: Any) -> Callable[..., Any]:
        from memfine_fx.entry import compile_in_session

        return compile_in_session(graph_module, example_inputs, session)

    return memfine


def _captured(
    model: torch.nn.Module, call: Callable[..., Any], session: Session, *, fullgraph: bool, dynamic: bool | None
) -> Callable[..., Any]:
    """`call` compiled in a session, under the capture flags that help."""

    def compile_with(capture_flags: tuple[str, ...]) -> Callable[..., Any]:
        session.start_attempt(capture_flags)
        return torch.compile(call, backend=_backend_of(session), fullgraph=fullgraph, dynamic=dynamic)

    def note(capture_flags: tuple[str, ...], failure: str | None) -> None:
        if capture_flags and any(one.region.family == "loops" for one in session.lowered):
            session.notes.append(f"expert loops captured with torch._dynamo.config.{', '.join(capture_flags)}")
        elif failure is not None and not capture_flags:
            session.notes.append(
                f"code with data-dependent shapes stays outside the graph: {failure}. If that is a loop over experts, "
                "let it take each expert's rows with torch.where(index == expert) and add them back with index_add_"
            )

    compiled = CapturingCall(model, compile_with, note) if session.config.captures_loops else compile_with(())
    recorded, adapters = RecordedOutputs(model), TracedAdapters(model)

    @functools.wraps(compiled)
    def call_prepared(*args: Any, **kwargs: Any) -> Any:
        with recorded.prepared(kwargs), adapters.installed(), kept_whole():
            return compiled(*args, **kwargs)

    return call_prepared


def _warn_after_first_call(model: torch.nn.Module, session: Session) -> None:
    compiled = compiled_call(model)

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = compiled(*args, **kwargs)
        if not session.has_warned and not session.has_chunked:
            from memfine_fx.backend import warn_without_regions

            warn_without_regions(session)
        return result

    set_compiled_call(model, call)


def _plan_dry_run(session: Session) -> None:
    """Plans for the sizes of this call, where the capture knows T."""
    for lowered in session.lowered:
        hint = lowered.num_tokens_hint
        if hint is not None:
            lowered.live.plan, lowered.live.num_tokens = lowered.live.plan_for(hint), hint
    for head in session.lowered_heads:
        if head.num_tokens_hint is not None:
            head.live.plan = head.live.plan_for(head.num_tokens_hint)
            head.live.num_tokens = head.num_tokens_hint


def _measured_step(model: torch.nn.Module, call: Callable[[], Any]) -> MemoryTrace:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def step() -> None:
        loss = _scalar_of(call())
        if loss.requires_grad:
            torch.autograd.backward(loss)

    gradients = {p: p.grad for p in model.parameters()}
    step()
    for parameter in gradients:
        parameter.grad = None
    trace = trace_memory(step, device)
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    return trace


def _scalar_of(output: Any) -> torch.Tensor:
    """A scalar to differentiate: the loss where there is one, else the sum of the first tensor."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    from memfine_fx.compat.tensors import tree_leaves

    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    if not leaves:
        warnings.warn("the model returned no tensor; only its forward was measured", stacklevel=3)
        return torch.zeros(())
    return leaves[0].float().sum()
