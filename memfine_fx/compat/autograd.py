"""Modes of a thread (autocast, dispatch, saved-tensor hooks, profiler) and what a running backward was asked for."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch._dispatch.python import enable_python_dispatcher

from memfine_fx.compat.checks import Feature, expect

__all__ = [
    "ACCUMULATED",
    "BACKWARD",
    "KEPT_GRAPHS",
    "MODES",
    "PROFILER",
    "SAVED_TENSOR_HOOKS",
    "autocast_devices",
    "enable_python_dispatcher",
    "has_gradient_hooks",
    "is_accumulated",
    "is_graph_kept",
    "is_in_backward",
    "is_profiling",
    "run_without_modes",
    "without_autocast",
    "without_gradient_hooks",
    "without_saved_tensor_hooks",
]

ResultT = TypeVar("ResultT")


def without_autocast() -> contextlib.AbstractContextManager[object]:
    """Return a context manager without autocast inside, on the CPU and the accelerator."""
    stack = contextlib.ExitStack()
    for device_type in autocast_devices():
        stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


@functools.cache
def autocast_devices() -> tuple[str, ...]:
    """Return the types of device of this machine that autocast may be on for."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def is_graph_kept() -> bool:
    """Whether the backward that runs was asked to keep its graph, so that it may run again; yes where none can tell."""
    return not KEPT_GRAPHS.holds() or bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def has_gradient_hooks(leaf: Any) -> bool:
    """Return whether a leaf has hooks that run before or after its gradient is accumulated."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


@contextlib.contextmanager
def without_gradient_hooks(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, no hook that the user registered on a leaf is called with its gradients."""
    hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for leaf in leaves:
        registered: Any = leaf._backward_hooks
        if registered:
            hooks.append((registered, dict(registered)))
            registered.clear()
    try:
        yield
    finally:
        for registered, before in hooks:
            registered.update(before)


def is_accumulated(leaf: torch.Tensor) -> bool:
    """Whether the backward that runs will add to this leaf's `.grad`; no where none can tell.

    Not for `torch.autograd.grad`, which returns what would be added, and not for leaves that `backward(inputs=...)`
    leaves out.
    """
    return ACCUMULATED.holds() and leaf.requires_grad and _will_run(leaf)


def _will_run(leaf: torch.Tensor) -> bool:
    """Whether the backward that runs comes to the node that accumulates a leaf's gradient."""
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # of torch.autograd.grad: the leaf is among its inputs
        return False


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """No hooks on saved tensors inside: functorch refuses to trace under a user's, e.g. `save_on_cpu`."""
    if not SAVED_TENSOR_HOOKS.holds():
        yield
        return
    autograd: Any = torch._C._autograd
    hooks = []
    # True: also while AOT autograd traces, when hooks are hidden but `torch.func` still refuses to run under them.
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def run_without_modes(function: Callable[[], ResultT]) -> ResultT:
    """Call a function outside of every dispatch mode, such as that of a compilation's fake tensors."""
    if MODES.holds():
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            return function()
    results: list[ResultT] = []
    thread = threading.Thread(target=lambda: results.append(function()))  # modes belong to a thread
    thread.start()
    thread.join()
    return results[0]


def is_profiling() -> bool:
    """Whether a profiler is on."""
    return PROFILER.holds() and bool(torch.autograd.profiler._is_profiler_enabled)


def _check_kept_graphs() -> None:
    answers: list[bool] = []
    probe = torch.ones(1, requires_grad=True)
    result = probe * 2
    is_kept = torch._C._autograd._get_current_graph_task_keep_graph
    probe.register_hook(lambda gradient: answers.append(is_kept()))  # type: ignore[no-untyped-call]
    torch.autograd.grad(result, probe, retain_graph=True)
    torch.autograd.grad(result, probe)
    expect(answers == [True, False], f"a backward that keeps its graph and one that does not say {answers}")


def _check_backward() -> None:
    answers = [is_in_backward()]
    probe = torch.ones(1, requires_grad=True)
    probe.register_hook(lambda gradient: answers.append(is_in_backward()))  # type: ignore[no-untyped-call]
    torch.autograd.grad(probe * 2, probe)
    expect(answers == [False, True], f"outside and inside of a backward autograd says {answers}")


def _check_accumulated() -> None:
    answers: list[bool] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
            ctx.leaf = leaf
            return leaf * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> None:
            answers.append(_will_run(ctx.leaf))

    leaf, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    leaf.grad = torch.ones(1)
    probe: Any = Probe.apply
    probe(leaf).backward()
    torch.autograd.grad(probe(leaf), leaf, allow_unused=True)
    (probe(leaf) * other).backward(inputs=[other])
    expect(
        answers in ([True, False], [True, False, False]),
        f"backwards into a gradient, beside it and without it: {answers}",
    )
    expect(bool(leaf.grad == 1), "a backward that hands over nothing changes a gradient")
    expect(not has_gradient_hooks(leaf), "a leaf without hooks has some")
    leaf.register_hook(lambda gradient: None)  # type: ignore[no-untyped-call]
    other.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[no-untyped-call]
    expect(has_gradient_hooks(leaf) and has_gradient_hooks(other), "hooks of a leaf are not seen")


def _check_saved_tensor_hooks() -> None:
    autograd: Any = torch._C._autograd
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        pack, unpack = autograd._top_saved_tensors_default_hooks(False)
        autograd._pop_saved_tensors_default_hooks()
        is_empty = autograd._top_saved_tensors_default_hooks(False) is None
        autograd._push_saved_tensors_default_hooks(pack, unpack)
    expect(is_empty, "hooks that were taken off are still there")


def _check_modes() -> None:
    from torch.utils._python_dispatch import _disable_current_modes

    from memfine_fx.compat.tensors import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        with _disable_current_modes():
            inside = torch.ones(1)
        outside = torch.ones(1)
    expect(not isinstance(inside, FakeTensor), "tensors are fake without modes")
    expect(isinstance(outside, FakeTensor), "modes do not come back")


def _check_profiler() -> None:
    expect(torch.autograd.profiler._is_profiler_enabled in (True, False), "the profiler is neither on nor off")


ACCUMULATED = Feature(
    name="torch._C._will_engine_execute_node",
    package="torch",
    purpose="adding to gradients that exist where they are, where autograd would",
    seen=("2.13", "2.15"),
    fallback="A micro-batch that accumulates holds a second set of the experts' gradients, which a memory_budget "
    "counts; results are the same. memfine_fx.explain(measure=True) runs hooks of "
    "register_post_accumulate_grad_hook, which may step an optimizer.",
    check=_check_accumulated,
)
BACKWARD = Feature(
    name="torch._C._current_graph_task_id",
    package="torch",
    purpose="telling a layer that a checkpoint recomputes from one that runs, for record_routing and replay_routing",
    seen=("2.11", "2.15"),
    fallback="memfine_fx.record_routing and memfine_fx.replay_routing raise MemfineError.",
    check=_check_backward,
)
KEPT_GRAPHS = Feature(
    name="torch._C._autograd._get_current_graph_task_keep_graph",
    package="torch",
    purpose="copying saved tensors that a compiled backward writes over, where it may run again",
    seen=("2.11", "2.15"),
    fallback="Compiled backwards copy every saved tensor that they write over, which takes memory that a memory_budget "
    "does not count; results are the same.",
    check=_check_kept_graphs,
)
SAVED_TENSOR_HOOKS = Feature(
    name="torch._C._autograd._top_saved_tensors_default_hooks",
    package="torch",
    purpose="tracing expert functions and comparing them with the user's code while hooks on saved tensors are on",
    seen=("2.11", "2.15"),
    fallback="Layers that are first compiled under torch.autograd.graph.saved_tensors_hooks stay as they were, and a "
    "layer inside torch.utils.checkpoint may raise CheckpointError in the step that compiles it.",
    check=_check_saved_tensor_hooks,
)
MODES = Feature(
    name="torch.utils._python_dispatch._disable_current_modes",
    package="torch",
    purpose="measuring the device's rates with real tensors while a graph is compiled on fake ones",
    seen=("2.11", "2.15"),
    fallback="Rates of this device are measured in a thread of their own, which may show them lower than they are.",
    check=_check_modes,
)
PROFILER = Feature(
    name="torch.autograd.profiler._is_profiler_enabled",
    package="torch",
    purpose="naming layers and chunks in profiles, at no cost where nobody profiles",
    seen=("2.11", "2.15"),
    fallback="Profiles show no ranges of chunked layers and their chunks.",
    check=_check_profiler,
)
