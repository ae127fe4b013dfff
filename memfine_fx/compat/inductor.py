"""Inductor: compiling, the passes it takes from outside, and the wrapper code that it writes."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files

from memfine_fx.compat.checks import Feature, expect
from memfine_fx.compat.tensors import FakeTensorMode
from memfine_fx.errors import MissingCompiler

__all__ = [
    "COMPILER",
    "INDICES",
    "KERNELS",
    "MUTATIONS",
    "TRACING",
    "WRAPPERS",
    "CustomPartitionerFn",
    "SchedulerPass",
    "captured_copy",
    "captured_inputs",
    "compile_function",
    "compile_inner",
    "compile_on_inductor",
    "compiling_again",
    "get_hash_for_files",
    "identity_options",
    "mark_boxed",
    "mode_options",
    "pass_options",
    "region_operator",
    "wrapper_of",
    "written_code",
]

_INDEX_FUNCTIONS = ("simplify_index_in_vec_range", "stride_at_vec_range")
_MOST_INDICES = 1 << 16
SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)
"""torch 2.11 has no name of its own for it, and caches no graph that was compiled with a pass of another kind."""


def compile_on_inductor(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    inner_compile: Callable[..., Any] | None = None,
) -> Any:
    """A graph compiled by Inductor, forward and backward.

    Args:
        options: settings of Inductor for this graph.
        inner_compile: compiles each graph that AOT autograd makes; `compile_inner` where None.

    Raises:
        MissingCompiler: Inductor has C++ to compile, and the machine has no C++ compiler.
    """
    from torch._inductor.compile_fx import compile_fx

    patches = None if options is None else dict(options)
    try:
        return compile_fx(graph_module, inputs, inner_compile=inner_compile or compile_inner, config_patches=patches)
    except RuntimeError as error:
        cause = _missing_compiler(error)
        if cause is None:
            raise
    # Outside of the handler and without torch's frames, which Python would print in front of the message.
    raise MissingCompiler(str(cause)) from cause.with_traceback(None)


def _missing_compiler(error: BaseException) -> BaseException | None:
    """Return the `InvalidCxxCompiler` that Inductor wrapped in this error, None where the error is about other things.

    The class is known by its name, so that no torch has to have it.
    """
    cause: BaseException | None = error
    while cause is not None and type(cause).__name__ != "InvalidCxxCompiler":
        cause = cause.__cause__ or cause.__context__
    return cause


def compile_inner(graph_module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """One graph of ATen compiled by Inductor, as AOT autograd asks for it."""
    from torch._inductor.compile_fx import compile_fx_inner

    with _remembering_indices(), _renaming_mutations():
        return compile_fx_inner(graph_module, inputs, **options)


@contextlib.contextmanager
def _remembering_indices() -> Iterator[None]:
    """Inductor asks how an index moves with a loop's variable for each kernel, by sympy, and remembers 128 answers.

    A deep model has more of them, which come again in every layer: each is then always the one just forgotten.
    """
    if not INDICES.holds():
        yield
        return
    from torch._inductor import sizevars
    from torch._inductor.codegen import cpp

    with contextlib.ExitStack() as stack:
        for name, function in _index_functions().items():
            for module in (sizevars, cpp):
                if hasattr(module, name):
                    stack.enter_context(unittest.mock.patch.object(module, name, function))
        yield


@contextlib.contextmanager
def _renaming_mutations() -> Iterator[None]:
    """Inductor's scheduler remembers which buffer holds a scatter's result when it works out a kernel's loops again.

    Up to torch 2.13 it forgets (https://github.com/pytorch/pytorch/issues/185509): a kernel that reads the result is
    then fused with the one that fills the buffer with zeros, and runs before the scatter. Routing weights have such
    gradients: what top-k chose, scattered into zeros. In a torch without this error, names are renamed to themselves.
    """
    from torch._inductor.scheduler import SchedulerNode

    recompute = getattr(SchedulerNode, "recompute_size_and_body", None)
    if recompute is None or not MUTATIONS.holds():
        yield
        return

    def recompute_and_rename(kernel: Any, *args: Any, **options: Any) -> None:
        recompute(kernel, *args, **options)
        if kernel.mutation_renames:
            kernel.set_read_writes(kernel.read_writes.rename(kernel.mutation_renames))

    with unittest.mock.patch.object(SchedulerNode, "recompute_size_and_body", recompute_and_rename):
        yield


@functools.cache
def _index_functions() -> dict[str, Callable[..., Any]]:
    """The functions with room for the answers of a deep model."""
    from torch._inductor import sizevars

    return {
        name: functools.lru_cache(maxsize=_MOST_INDICES)(getattr(sizevars, name).__wrapped__)
        for name in _INDEX_FUNCTIONS
    }


def compile_function(
    graph_module: fx.GraphModule,
    fake_mode: FakeTensorMode,
    inputs: Sequence[Any],
    inner_compile: Callable[..., Any],
    options: Mapping[str, Any] | None = None,
) -> Any:
    """A function over rows, compiled on its own fake arguments, outside of any capture."""
    with compiling_again(fake_mode), torch.no_grad():
        return compile_on_inductor(graph_module, inputs, options, inner_compile)


class _Identity(CustomPartitionerFn):
    """In the place of a partitioner where nothing is split: what compiled code is known by beside its graph."""

    def __init__(self, files: Sequence[str], key: str) -> None:
        self._files, self._key = tuple(files), key

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        raise AssertionError("a graph without gradients is not split")

    def uuid(self) -> Any:
        return get_hash_for_files(self._files, self._key)


def identity_options(files: Sequence[str], key: str) -> dict[str, Any]:
    """Options under which caches find compiled code again only while these files of ours and the key are the same."""
    return {"custom_partitioner_fn": _Identity(files, key)}


def compiling_again(fake_mode: FakeTensorMode) -> contextlib.AbstractContextManager[object]:
    """Compilations inside take inputs of this fake mode, outside of the capture that made it."""
    from torch._guards import TracingContext, tracing

    context: contextlib.AbstractContextManager[object] = tracing(TracingContext(fake_mode))
    return context


def captured_inputs(inputs: Sequence[Any]) -> tuple[FakeTensorMode, tuple[Any, ...]] | None:
    """The fake mode of the capture that is under way, and its fake inputs; None where nothing is captured.

    NOTE: the mode has seen the real inputs, so that their fakes are found and not made: symbols stay the same.
    """
    if not TRACING.holds():
        return None
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    fake_mode = None if context is None else context.fake_mode
    if fake_mode is None:
        return None
    return fake_mode, tuple(
        fake_mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in inputs
    )


def captured_copy(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph from Dynamo that AOT autograd takes for one: with what says which inputs are parameters.

    `copy.deepcopy` leaves that behind, and the partitioner then saves views of parameters as if they were results.
    """
    copied = copy.deepcopy(graph_module)
    if hasattr(graph_module, "_param_name_to_source"):
        copied._param_name_to_source = graph_module._param_name_to_source
    for node, other in zip(graph_module.graph.nodes, copied.graph.nodes, strict=True):
        if hasattr(node, "_dynamo_source"):
            other._dynamo_source = node._dynamo_source
    return copied


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor's options that a mode of `torch.compile` stands for."""
    if mode is None:
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def pass_options(partitioner: Any, before_fusion: Any, after_fusion: Any) -> dict[str, Any]:
    """Options under which Inductor takes a partitioner and two passes over its kernels."""
    options = {"custom_partitioner_fn": partitioner}
    if KERNELS.holds():
        options |= {"_pre_fusion_custom_pass": before_fusion, "_post_fusion_custom_pass": after_fusion}
    return options


def wrapper_of(compiled: Any) -> str:
    """The Python that Inductor wrote for a graph, "" where it wrote none."""
    return (getattr(compiled, "source_code", "") or "") if WRAPPERS.holds() else ""


def written_code(graph_module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> str:
    """The Python that Inductor would write for a graph; nothing is built and nothing can run. "" where it wrote none.

    Args:
        options: as AOT autograd gives them to `compile_inner`.
    """
    if not WRAPPERS.holds():
        return ""
    from torch._inductor import config, graph

    written: list[str] = []

    def stop(lowering: Any) -> Any:
        written.append(lowering.codegen()[0].value)
        raise _CodeIsWritten

    with config.patch(fx_graph_cache=False), unittest.mock.patch.object(graph.GraphLowering, "compile_to_module", stop):
        try:
            compile_inner(graph_module, inputs, **options)
        except Exception:  # NOTE: how Inductor wraps what is raised inside differs by version
            if not written:
                raise
    return written[0] if written else ""


class _CodeIsWritten(Exception):
    """Nothing behind the code is wanted."""


def region_operator(kernel: Any) -> str:
    """ "memfine::experts" of a kernel of Inductor's schedule that calls an operator, "" of any other."""
    operation = getattr(getattr(kernel, "node", None), "op_overload", None)
    return "" if operation is None else str(operation.name()).split(".")[0]


def mark_boxed(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Say that a callable takes its arguments as one list, which it may empty."""
    call._boxed_call = True  # type: ignore[attr-defined]  # how AOT autograd knows who frees the arguments
    return call


def _check_compiler() -> None:
    from torch._inductor import config, list_mode_options
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    parameters = inspect.signature(compile_fx).parameters
    expect({"inner_compile", "config_patches"} <= set(parameters), f"compile_fx takes {', '.join(parameters)}")
    expect(callable(compile_fx_inner) and callable(list_mode_options), "nothing compiles one graph")
    expect(hasattr(config, "custom_partitioner_fn"), "Inductor takes no partitioner")


def _check_kernels() -> None:
    from torch._inductor import config, ir
    from torch._inductor.scheduler import BaseSchedulerNode

    for name in ("_pre_fusion_custom_pass", "_post_fusion_custom_pass"):
        expect(hasattr(config, name), f"Inductor takes no {name}")
    known = {*dir(BaseSchedulerNode), *BaseSchedulerNode.__annotations__}
    wanted = {"get_buffer_names", "get_nodes", "unmet_dependencies", "min_order", "max_order", "node"}
    expect(wanted <= known, f"kernels have no {', '.join(sorted(wanted - known))}")
    expect("op_overload" in inspect.signature(ir.ExternKernel.__init__).parameters, "kernels name no operator")


def _check_mutations() -> None:
    from torch._inductor.dependencies import ReadWrites
    from torch._inductor.scheduler import BaseSchedulerNode, SchedulerNode

    if hasattr(SchedulerNode, "recompute_size_and_body"):
        known = {*dir(SchedulerNode), *BaseSchedulerNode.__annotations__}
        expect({"mutation_renames", "set_read_writes"} <= known, "kernels do not rename what they read")
        expect(hasattr(ReadWrites, "rename"), "what a kernel reads cannot be renamed")


def _check_tracing() -> None:
    from torch._guards import TracingContext, tracing

    mode = FakeTensorMode()
    with tracing(TracingContext(mode)):
        context = TracingContext.try_get()
    expect(context is not None and context.fake_mode is mode, "a tracing context does not give its fake mode")


def _check_wrappers() -> None:
    from torch._inductor.graph import GraphLowering
    from torch._inductor.output_code import CompiledFxGraph

    expect("source_code" in CompiledFxGraph.__annotations__, "compiled graphs hold no source")
    for name in ("codegen", "compile_to_module"):
        expect(callable(getattr(GraphLowering, name, None)), f"Inductor's graphs have no {name}")


def _check_indices() -> None:
    from torch._inductor import sizevars
    from torch._inductor.codegen import cpp

    for name in _INDEX_FUNCTIONS:
        function = getattr(sizevars, name, None)
        expect(hasattr(function, "cache_info") and hasattr(function, "__wrapped__"), f"{name} remembers nothing")
    expect(hasattr(cpp, _INDEX_FUNCTIONS[-1]), "C++ kernels are not written by it")


COMPILER = Feature(
    name="torch._inductor.compile_fx.compile_fx",
    package="torch",
    purpose="compiling the graph around the experts, with our partitioner",
    seen=("2.11", "2.15"),
    fallback="Inductor cannot be given a partitioner, so nothing is chunked: models are compiled as without "
    'memfine_fx. Config(inner_backend="aot_eager") works.',
    check=_check_compiler,
)
INDICES = Feature(
    name="torch._inductor.sizevars.simplify_index_in_vec_range",
    package="torch",
    purpose="remembering what Inductor found of index expressions, which come again in every layer of a deep model",
    seen=("2.13", "2.15"),
    fallback="Deep models take longer to compile on a CPU.",
    check=_check_indices,
)
KERNELS = Feature(
    name="torch._inductor.config._post_fusion_custom_pass",
    package="torch",
    purpose="keeping Inductor's kernels in the graph's order, and apart where experts stand between them",
    seen=("2.11", "2.15"),
    fallback="Inductor orders and fuses kernels across chunked layers as it likes, so a step may take more memory; "
    "budgets count it.",
    check=_check_kernels,
)
MUTATIONS = Feature(
    name="torch._inductor.scheduler.SchedulerNode.recompute_size_and_body",
    package="torch",
    purpose="kernels that read a scatter's result run after the scatter, which Inductor up to torch 2.13 forgets",
    seen=("2.13", "2.13"),
    fallback="Up to torch 2.13, Inductor may run a kernel before the scatter whose result it reads: gradients of "
    'routing weights can then be wrong, as with torch.compile alone. Config(inner_backend="aot_eager") is exact.',
    check=_check_mutations,
)
TRACING = Feature(
    name="torch._guards.TracingContext",
    package="torch",
    purpose="compiling outside of any capture: an expert's forward and backward, and a graph again for other bytes",
    seen=("2.11", "2.15"),
    fallback="Experts run their operations one by one, not compiled; the graph around them is compiled. A "
    "memory_budget "
    "that the first call's graph cannot keep later (accumulated gradients, longer sequences) is refused then.",
    check=_check_tracing,
)
WRAPPERS = Feature(
    name="CompiledFxGraph.source_code",
    package="torch",
    purpose="reading from Inductor's Python wrapper what a graph allocates and frees, also of one that is never built",
    seen=("2.11", "2.15"),
    fallback="What such a graph holds is estimated from its operations, not read from its code: predicted peaks may be "
    "off by a few percent, and a memory_budget may be exceeded by as much.",
    check=_check_wrappers,
)
