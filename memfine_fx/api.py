"""`optimize`, `explain`, `fit`, `verify`, `report`, `scalars`: thin; the pipeline is in `compiler.pipeline`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from memfine_fx.capture.forward_wrappers import original_forward
from memfine_fx.capture.implementation import switched_experts
from memfine_fx.capture.undo import ModelState
from memfine_fx.compat.nn import COMPILED_CALLS, hooks_after_gradient
from memfine_fx.compiler.optimized import Options, captured, optimize_in_place, optimized_call
from memfine_fx.config import Config, InnerBackend, MemoryBudget
from memfine_fx.errors import ConfigError, MemfineError
from memfine_fx.memory.measure import MemoryTrace, trace_memory
from memfine_fx.progress import working
from memfine_fx.records.verification import VerifyReport
from memfine_fx.report.reports import Report
from memfine_fx.report.training_log import ScalarWriter, scalars_of

if TYPE_CHECKING:  # what plans imports sympy, which would be most of the package's import time
    from memfine_fx.compiler.session import Session
    from memfine_fx.expert_parallel.groups import ExpertGroup, MeshOrGroup
    from memfine_fx.fitting.report import FitReport
    from memfine_fx.fitting.setup import OptimizerName, Train

__all__ = ["explain", "fit", "log_scalars", "optimize", "report", "scalars", "verify"]

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)


def optimize(
    model: ModuleT,
    *,
    memory_budget: MemoryBudget = None,
    inner_backend: InnerBackend | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    verify: bool | None = None,
    expert_parallel: MeshOrGroup | ExpertGroup | Literal[False] | None = False,
    config: Config | None = None,
) -> ModuleT:
    """Compile an MoE model in place so that its experts train chunk by chunk, recomputing in backward.

    The type, parameters, `state_dict` keys and methods of the model stay as they were. Copies by `copy.deepcopy` and by
    pickle (`torch.save(model)`, a process that is spawned) are optimized in the same way, each in a session of its own
    that opens at its first call; reading such a pickle needs memfine_fx.

    Args:
        model: any `nn.Module`; nothing in it needs to know of memfine_fx.
        memory_budget: peak bytes of a training step on this device: "20GiB", an int of bytes, or a float in (0, 1] of
            the device's memory. "least" is no limit: regions save nothing of routed rows. None leaves it to `config`,
            whose default saves what leaves the step's peak where it is, or on a CUDA device what that has memory for.
        inner_backend: "inductor", or "aot_eager" / "eager" for debugging; None leaves it to `config`, whose default
            is "inductor".
        fullgraph: as in `torch.compile`.
        dynamic: as in `torch.compile`.
        verify: at first compile, check every region's rewritten form against its original, forward and backward,
            on the inputs at hand and on adversarial routings; one that fails stays as it was and is reported. None
            leaves it to `config`, whose default is False.
        expert_parallel: ranks that share the experts, as a `DeviceMesh` or a process group: each keeps its own experts
            only and rows travel to them in rounds of bounded size (docs/expert_parallel.md). A collective call. False
            keeps every expert on each rank; so does None once torch.distributed is initialized. Before, None is an
            error, because `torch.distributed.group.WORLD` is None then.
        config: further options; `memory_budget`, `inner_backend` and `verify` given here override its fields. Without
            one, the options are those of the environment variable MEMFINE_OPTIONS.

    Returns:
        The same model.

    Raises:
        ConfigError: an argument is malformed.
        BudgetInfeasible: at the first step, when no plan fits; names the smallest budget that would.

    Source: MemFine (arXiv 2511.21431); the rows axis is described in docs/design/runtime.md.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"optimize expects a torch.nn.Module, got {type(model).__name__}")
    chosen = _merged(config, memory_budget=memory_budget, inner_backend=inner_backend, verify=verify)
    if not COMPILED_CALLS.holds():
        return model
    if expert_parallel is None:
        _check_no_group_is_meant()
    if expert_parallel is not None and expert_parallel is not False:
        _shard(model, expert_parallel, chosen)
        options = Options(chosen, fullgraph, dynamic is None or dynamic, on_ranks=True)  # ranks' own numbers of tokens
    else:
        options = Options(chosen, fullgraph, dynamic)
    optimize_in_place(model, options)
    return model


def explain(
    model: torch.nn.Module, *args: Any, measure: bool = False, config: Config | None = None, **kwargs: Any
) -> Report:
    """Report what memfine_fx finds in one call of a model, what it would choose, and what it refuses and why.

    The model is not compiled in place and nothing of it is changed. Its forward runs once, with `measure` twice and its
    backward too; parameters' gradients, generators of random numbers, buffers, inputs written to and attributes of
    modules (hooks among them) are put back afterwards, after an error too. Hooks run as in a step, except those that
    run after a gradient was accumulated, because such hooks step optimizers.

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
    from memfine_fx.compiler.reporting import report_of

    _check_inputs(model, kwargs, "explain")
    session = _open_session(config or Config.from_environment(), is_dry=not measure)
    runs = "it is compiled and a step is measured" if measure else "its forward runs once"
    says_so = working(f"explaining {type(model).__name__}: {runs}", "explained")
    with says_so, _unchanged(model, args, kwargs), contextlib.ExitStack() as stack:
        if session.config.captures_loops:
            session.diagnostics.notes.extend(stack.enter_context(switched_experts(model)))
        compiled = functools.partial(_captured_forward(model, session), 0)
        if measure:
            return report_of(session, _measured_step(model, compiled, args, kwargs))
        compiled(*args, **kwargs)
        _plan_dry_run(session)
        return report_of(session)


def fit(
    model_or_config: object,
    *,
    memory: MemoryBudget = None,
    gpu: str | None = None,
    batch: int = 1,
    seq: int = 4096,
    train: Train = "full",
    lora_r: int = 16,
    targets: Sequence[str] = (),
    dtype: str = "bf16",
    optimizer: OptimizerName = "adamw",
    master_weights: bool = False,
    checkpointing: bool = False,
    memory_budget: MemoryBudget = None,
    fsdp: int = 1,
    expert_parallel: int = 1,
    device: Literal["cpu", "cuda"] = "cpu",
    has_even_routing: bool = False,
    alternatives: bool = False,
    accumulate: int = 1,
    config: Config | None = None,
) -> FitReport:
    """Whether a causal language model trains within so many bytes, from its config: nothing is allocated or run.

    The model is made of fake tensors and goes the way of a real one; what would be compiled is read and not built.
    Sizes of kernels are those of a CPU; with device="cuda" what the device takes beside a step is added as stated
    constants, which nobody of us has measured.

    Args:
        model_or_config: a transformers config; a folder with one, a config.json, a model type with its default sizes,
            a name on the hub; a callable that makes a module which takes input_ids and labels; or such a module.
        memory: bytes of the device, as "80GiB" or an int; None asks for the bytes alone.
        gpu: the device's name instead, such as "h100"; `memfine_fx.fitting.devices` has the table.
        batch, seq: sequences, and tokens of each.
        train: "full"; "lora" by PEFT; "qlora", with frozen weights in 4 bits (NF4) by bitsandbytes.
        lora_r, targets: rank of the adapters, and names of the linear layers or of the expert weights with one, such
            as "q_proj" or "mlp.experts.gate_up_proj"; () for all linear layers but the head.
        dtype: of parameters: "fp32", "bf16" or "fp16". A module, or what a callable makes, keeps its own.
        optimizer: "adamw", "adafactor" or "sgd" (without momentum), as torch has them, or bitsandbytes' "adamw8bit".
        master_weights: fp32 copies of low-precision parameters, which the optimizer works on.
        checkpointing: gradient checkpointing of the layers.
        memory_budget: what `optimize` would be given; without one, a step that saves nothing of routed rows is
            described on a device, where `optimize` saves what that has memory for.
        fsdp, expert_parallel: ranks; bytes are those of one rank, and estimates.
        device: where the model would train.
        has_even_routing: experts get equal numbers of rows; otherwise one expert may get a row of every token.
        alternatives: also record the same step without us (plain, with gradient checkpointing, under torch.compile's
            `activation_memory_budget`), and with LoRA and QLoRA where nothing fits; takes two to four times as long.
        accumulate: micro-batches of `batch` sequences whose gradients are added before the optimizer steps.
        config: options of `optimize`.

    Returns:
        The answer; `fits`, `least`, `most`, `line`, `str(report)`, `to_json()`.

    Raises:
        ConfigError: the config cannot be read, lacks a field or has sizes that cannot be.
        MissingPackage: transformers, PEFT or bitsandbytes is needed and not installed.
    """
    from memfine_fx.fitting.answer import Question, answer
    from memfine_fx.fitting.setup import Setup

    setup = Setup(
        batch,
        seq,
        train,
        lora_r,
        tuple(targets),
        dtype,
        optimizer,
        master_weights,
        checkpointing,
        memory_budget,
        fsdp,
        expert_parallel,
        device,
        accumulate,
    )
    question = Question(memory, gpu, device, has_even_routing, alternatives)
    with working("analysing whether a model fits: nothing is allocated or run", "analysed"):
        return answer(model_or_config, setup, question, _merged(config))


def verify(model: torch.nn.Module, *args: Any, config: Config | None = None, **kwargs: Any) -> VerifyReport:
    """Check every rewrite that memfine_fx would make in one call of a model against what it replaces.

    Each region's original and rewritten form run forward and backward on the call's own inputs and on adversarial
    routings; outputs and every gradient are measured against the original in fp64. The model is not compiled in
    place and nothing of it is changed; its forward runs as `explain` runs it.

    Args:
        model: any `nn.Module`, optimized or not.
        *args: one call's inputs.
        **kwargs: its inputs by name.
        config: options to verify under; compiled functions are compiled by its `inner_backend`.

    Returns:
        The report; `has_passed`, `worst_error`, `str(report)`, `to_json()`.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"verify expects a torch.nn.Module, got {type(model).__name__}")
    from memfine_fx.compiler.reporting import verify_report_of

    _check_inputs(model, kwargs, "verify")
    session = _open_session(dataclasses.replace(config or Config.from_environment(), verify=True), is_dry=True)
    says_so = working(f"verifying {type(model).__name__}: rewrites are compared with it in fp64", "verified")
    with says_so, _unchanged(model, args, kwargs), contextlib.ExitStack() as stack:
        if session.config.captures_loops:
            session.diagnostics.notes.extend(stack.enter_context(switched_experts(model)))
        _captured_forward(model, session)(0, *args, **kwargs)
        return verify_report_of(session)


def _check_inputs(model: torch.nn.Module, inputs: Mapping[str, Any], function: str) -> None:
    """Refuse options among a call's inputs: a forward that takes any keyword would swallow them without a word."""
    options = [field.name for field in dataclasses.fields(Config) if field.name in inputs]
    parameters = inspect.signature(model.forward).parameters if options else {}
    swallowed = next((name for name in options if name not in parameters), None)
    if swallowed is not None:
        raise ConfigError(
            f"{swallowed} is an option, not an input of {type(model).__name__}: give "
            f"memfine_fx.{function}(model, ..., config=Config({swallowed}={inputs[swallowed]!r}))"
        )


_OF_EVERY_MODEL = (
    "graphs of every model that was compiled by the backend's name with these options: FSDP2 hands them other tensors "
    "than the model holds between its steps"
)


def report(model: torch.nn.Module | Callable[..., Any]) -> Report:
    """The report of a model that was optimized, or compiled with backend="memfine" and has run.

    Of an optimized model that has not run yet it says just that: regions are found at the first call.

    Raises:
        MemfineError: memfine_fx has compiled nothing of this model.
    """
    from memfine_fx.compiler.reporting import report_of

    call = optimized_call(model)
    if call is not None:
        return Report((), 0, has_run=False) if call.session is None else report_of(call.session, has_run=call.has_run)
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    from memfine_fx.capture.ranks import is_fully_sharded
    from memfine_fx.compiler.sessions import sessions

    for session in reversed(sessions()):
        of_model = session.restricted_to(parameters) if session.observer.compiles else None
        if of_model is not None:
            if not of_model.models and isinstance(model, torch.nn.Module):  # its layers were called one by one
                of_model.models.add(model)
            return report_of(of_model)
    named = [session for session in sessions() if session.observer.compiles and not session.holds_compiled]
    if named and isinstance(model, torch.nn.Module) and is_fully_sharded(model):
        latest = report_of(named[-1])
        return dataclasses.replace(latest, notes=(*latest.notes, _OF_EVERY_MODEL))
    raise MemfineError(
        "nothing of this model has been compiled by memfine_fx: call memfine_fx.optimize(model) or "
        "torch.compile(model, backend='memfine') and run one step first"
    )


def scalars(model: torch.nn.Module | Callable[..., Any]) -> dict[str, float]:
    """Named numbers of the latest steps.

    Args:
        model: optimized, or compiled with backend="memfine", and run.

    Returns:
        Per chunked layer `memfine/LAYER/...`: chunks, largest_chunk_rows, tokens, imbalance (rows of the fullest expert
        over the mean) and its p50, p95 and max over the latest steps; of the step `memfine/predicted_peak_bytes`, and
        on CUDA `memfine/measured_peak_bytes`, the allocator's peak since it was last reset.

    Raises:
        MemfineError: memfine_fx has compiled nothing of this model.
    """
    return scalars_of(report(model))


def log_scalars(writer: ScalarWriter, model: torch.nn.Module | Callable[..., Any], step: int) -> None:
    """Write `scalars(model)`, e.g. with `torch.utils.tensorboard.SummaryWriter`.

    Raises:
        MemfineError: memfine_fx has compiled nothing of this model.
    """
    for name, value in scalars(model).items():
        writer.add_scalar(name, value, step)


def _open_session(config: Config, *, is_dry: bool = False) -> Session:
    from memfine_fx.compiler.session import DryRun, Observer
    from memfine_fx.compiler.sessions import open_session

    return open_session(config, holds_compiled=True, observer=DryRun() if is_dry else Observer())


def _captured_forward(model: torch.nn.Module, session: Session) -> Callable[..., Any]:
    """The forward that a model would run without us, compiled in a session."""
    return captured(model, [functools.partial(original_forward, model)], session, fullgraph=False, dynamic=True)


def _merged(config: Config | None, **given: Any) -> Config:
    """The config with the fields that were given beside it; None is not given."""
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"config must be a memfine_fx.Config, got {type(config).__name__}")
    changes = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(config or Config.from_environment(), **changes)


def _check_no_group_is_meant() -> None:
    """None as a group: once torch.distributed is initialized, it can only mean that there is none."""
    if torch.distributed.is_available() and not torch.distributed.is_initialized():
        raise ConfigError(
            "expert_parallel=None before torch.distributed is initialized, when torch.distributed.group.WORLD is None: "
            "call torch.distributed.init_process_group first, or pass False (or leave it out) to keep all experts here"
        )


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


def _measured_step(
    model: torch.nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> MemoryTrace:
    """A step that compiles, and one that is measured.

    NOTE: inputs are cut off from what computed them, and backward is told which leaves may get a gradient. Through the
    inputs' own graph, or into a tensor that is no parameter of the model, it would change what is not the model's.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    from memfine_fx.compat.tensors import tree_map

    args, kwargs = tree_map(_cut_off, (args, kwargs))
    inputs = [leaf for leaf in _tensors_in((args, kwargs)) if leaf.requires_grad]
    wanted = [*(parameter for parameter in model.parameters() if parameter.requires_grad), *inputs]

    def step() -> None:
        loss = _scalar_of(call(*args, **kwargs))
        if loss.requires_grad and wanted:
            torch.autograd.backward(loss, inputs=wanted)

    with _gradients_aside(model):
        step()
        for leaf in wanted:
            leaf.grad = None
        return trace_memory(step, device)


@contextlib.contextmanager
def _unchanged(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Restore, at the end of the context, the state that a forward inside it changes."""
    state = ModelState(model, _tensors_in((args, kwargs)))
    try:
        yield
    finally:
        state.restore()


@contextlib.contextmanager
def _gradients_aside(model: torch.nn.Module) -> Iterator[None]:
    """No parameter has a gradient, or a hook that runs once it has one; the same tensors and hooks come back."""
    parameters = list(model.parameters())
    saved = [(parameter, parameter.grad, dict(hooks_after_gradient(parameter))) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
            hooks_after_gradient(parameter).clear()
        yield
    finally:
        for parameter, gradient, hooks in saved:
            parameter.grad = gradient
            hooks_after_gradient(parameter).update(hooks)


def _cut_off(value: Any) -> Any:
    return value.detach().requires_grad_() if isinstance(value, torch.Tensor) and value.requires_grad else value


def _tensors_in(tree: object) -> list[torch.Tensor]:
    from memfine_fx.compat.tensors import tree_leaves  # what it stands beside would be most of the import time

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _scalar_of(output: Any) -> torch.Tensor:
    """A scalar to differentiate: the loss where there is one, else the sum of the first tensor."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    leaves = _tensors_in(output)
    if not leaves:
        warnings.warn("the model returned no tensor; only its forward was measured", stacklevel=3)
        return torch.zeros(())
    return leaves[0].float().sum()
