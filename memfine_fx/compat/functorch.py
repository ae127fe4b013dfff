"""AOT autograd: its settings, its partitioner, and the tensors that a backward may write over or drop."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import unittest.mock
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memfine_fx.compat.checks import Feature, expect
from memfine_fx.compat.operators import OpOverload
from memfine_fx.compat.settings import AUTOGRAD_CACHE

__all__ = [
    "CACHED_RECORDS",
    "DONATED",
    "PARTITIONER",
    "RANDOM_STATES",
    "TANGENTS",
    "CacheHit",
    "compile_on_aot_autograd",
    "compile_through_cache",
    "frees_tangents",
    "min_cut_partition",
    "random_state_ops",
    "run_boxed",
    "store_record",
    "take_donated",
]

ResultT = TypeVar("ResultT")


@dataclass
class CacheHit:
    """The result of looking up the graph that is compiled in AOT autograd's cache.

    Args:
        record: the record that `store_record` left with the cached graph; None where nothing was found.
        is_hit: whether the graph came from the cache, so that no partitioner was asked.
        backward: its compiled backward, None without one.
    """

    record: Any = None
    is_hit: bool = False
    backward: Any = None


def compile_through_cache(compiled: Callable[[], ResultT], take: Callable[[CacheHit], bool]) -> ResultT:
    """Compile one graph, or take it from AOT autograd's cache with what `store_record` left there.

    Args:
        compiled: compiles it; called again where a hit is of no use.
        take: called with a hit; returns False where it lacks its record.
    """
    if AUTOGRAD_CACHE.holds() and CACHED_RECORDS.holds():
        with _reading_cache() as hit:
            result = compiled()
        if not hit.is_hit or take(hit):
            return result
    with AUTOGRAD_CACHE.applied():
        return compiled()


@contextlib.contextmanager
def _reading_cache() -> Iterator[CacheHit]:
    """Says of the one graph that is compiled inside whether AOT autograd's cache had it."""
    from torch._functorch._aot_autograd.aot_autograd_result import GenericAOTAutogradResult
    from torch._inductor.output_code import CompiledFxGraph

    hit = CacheHit()
    build, finish = GenericAOTAutogradResult.wrap_post_compile, CompiledFxGraph.post_compile

    def built(entry: Any, *args: Any, **kwargs: Any) -> Any:
        def finished(compiled: Any, inputs: Any, constants: Any, options: Any) -> None:
            finish(compiled, inputs, constants, options)
            if options["is_backward"]:
                hit.backward = compiled

        with unittest.mock.patch.object(CompiledFxGraph, "post_compile", finished):
            result = build(entry, *args, **kwargs)
        hit.record, hit.is_hit = getattr(_inner_metadata(entry), _RECORD, None), True
        return result

    with unittest.mock.patch.object(GenericAOTAutogradResult, "wrap_post_compile", built):
        yield hit


_RECORD = "memfine_record"


def store_record(record: object) -> None:
    """Leave something with the graph that is being compiled, for the process that finds it in AOT autograd's cache.

    The graph's metadata is pickled into its entry after backward is compiled, and what is stored last with it.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is not None:
        setattr(metadata, _RECORD, record)


def _inner_metadata(entry: Any) -> Any:
    """Return the metadata that the tracing context had: that of the plain tensors, where inputs are subclasses."""
    inner = entry.maybe_subclass_meta
    return entry.runtime_metadata if inner is None else inner.fw_metadata


def take_donated() -> tuple[int, ...]:
    """Positions of the saved tensors that the backward being compiled may write over.

    AOT autograd's list is emptied, because a backward that keeps the graph is refused while it names any.
    """
    if not DONATED.holds():
        return ()
    shared = _donated_idxs()
    donated = tuple(shared or ())
    if shared:
        shared.clear()
    return donated


def _donated_idxs() -> list[int] | None:
    """AOT autograd's own list for the graph being compiled."""
    from torch._inductor.utils import get_donated_idxs

    return get_donated_idxs()


def frees_tangents() -> bool:
    """Whether a backward may drop its tangents, the gradients of its graph's results, while it runs.

    Since torch 2.13 autograd hands them over in a list, which compiled code empties (`boxed_grads_call`). Before, it
    holds them until the backward returns, also those that are zeros for a result whose gradient nobody gave.
    """
    return hasattr(torch.autograd.Function, "boxed_grads_call") and TANGENTS.holds()


def min_cut_partition(
    joint: fx.GraphModule, inputs: Sequence[object], **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint graph by functorch's partitioner, which obeys `meta["recompute"]`."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
    return forward, backward


def random_state_ops() -> tuple[Any, ...]:
    """Higher-order operators that run another one and save its random state (the first), or run it from a saved one."""
    if not RANDOM_STATES.holds():
        return ()
    from torch._prims.rng_prims import graphsafe_run_with_rng_state, run_and_save_rng_state, run_with_rng_state

    return run_and_save_rng_state, run_with_rng_state, graphsafe_run_with_rng_state


def call_under_random_state(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the operator that a node calls, and its arguments.

    Where a higher-order operator that saves or restores the random state calls it, these are those of the inner call.
    """
    operators = () if isinstance(node.target, OpOverload) else random_state_ops()
    if node.target not in operators:
        return node.target, tuple(node.args)
    _, running, _ = operators
    first = 1 if node.target is running else 0  # behind the state that it runs from
    return node.args[first], tuple(node.args[first + 1 :])


def compile_on_aot_autograd(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    partitioner: Any,
    backward_call: Callable[[Callable[[list[Any]], Any]], Any],
) -> Any:
    """A graph partitioned and run as it is, forward and backward.

    Args:
        backward_call: backward -> what is called in its place.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def backward_nop(backward: fx.GraphModule, saved: list[Any]) -> Any:
        take_donated()  # nothing here writes over a saved tensor
        return backward_call(boxed_nop(backward, saved))

    compiler = aot_autograd(fw_compiler=boxed_nop, bw_compiler=backward_nop, partition_fn=partitioner)
    return compiler(graph_module, list(inputs))


def run_boxed(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """A graph as AOT autograd calls compiled code: one operator at a time, arguments in one list, which it empties."""
    from torch._dynamo.backends.debugging import boxed_nop

    call: Callable[[list[Any]], Any] = boxed_nop(graph_module, list(inputs))
    return call


def _check_donated() -> None:
    from types import SimpleNamespace

    from torch._guards import TracingContext, tracing

    expect(AUTOGRAD_CACHE.config.donated_buffer in (True, False), "donated_buffer is no switch")
    positions = [0, 2]
    context: Any = TracingContext(None)
    context.fw_metadata = SimpleNamespace(bw_donated_idxs=positions)
    with tracing(context):
        expect(_donated_idxs() is positions, "the list that is given is not AOT autograd's own")


def _check_cached_records() -> None:
    """Check that a record in a graph's metadata is pickled with it, and that a cache hit calls what reads it."""
    from torch._functorch._aot_autograd.aot_autograd_result import GenericAOTAutogradResult
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
    from torch._inductor.output_code import CompiledFxGraph

    fields = GenericAOTAutogradResult.__dataclass_fields__
    for name in ("runtime_metadata", "maybe_subclass_meta", "compiled_bw"):
        expect(name in fields, f"an entry has no {name}")
    expect(callable(getattr(GenericAOTAutogradResult, "wrap_post_compile", None)), "nothing rebuilds an entry's graph")
    parameters = list(inspect.signature(CompiledFxGraph.post_compile).parameters)
    expect(
        parameters == ["self", "example_inputs", "constants", "graph_kwargs"],
        f"post_compile takes {', '.join(parameters)}",
    )
    metadata: Any = ViewAndMutationMeta([], [], 0, True, [], [], [], [], [])
    setattr(metadata, _RECORD, "stored")
    expect(getattr(pickle.loads(pickle.dumps(metadata)), _RECORD, "") == "stored", "metadata loses its record")


def _check_tangents() -> None:
    """A gradient that is taken out of the list is gone, where autograd gives a list."""
    dropped: list[bool] = []

    class Doubled(torch.autograd.Function):
        boxed_grads_call = True

        @staticmethod
        def forward(context: Any, factor: torch.Tensor) -> torch.Tensor:
            return factor * 2

        @staticmethod
        def backward(context: Any, *given: Any) -> Any:
            (gradients,) = given
            gradient = gradients.pop()
            result, reference = gradient * 2, weakref.ref(gradient)
            del gradient
            dropped.append(reference() is None)
            return result

    if not hasattr(torch.autograd.Function, "boxed_grads_call"):
        return  # nothing is relied upon: tangents count to the end of backward
    probe = torch.ones(1, requires_grad=True)
    (Doubled.apply(probe) * 3).backward()  # type: ignore[no-untyped-call]
    expect(dropped == [True], "autograd holds a gradient that a backward has dropped")


def _check_partitioner() -> None:
    """Check that the partitioner saves what is marked to be saved and recomputes what is marked to be recomputed."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    expect("num_fwd_outputs" in inspect.signature(min_cut_rematerialization_partition).parameters, "other arguments")
    for policy, is_saved in ((CheckpointPolicy.MUST_SAVE, True), (CheckpointPolicy.MUST_RECOMPUTE, False)):
        joint = _joint_of_exp(policy)
        forward, backward = min_cut_partition(joint, [], num_fwd_outputs=1)
        saved = [node.name for node in next(iter(reversed(forward.graph.nodes))).args[0]]
        again = any(node.target is torch.ops.aten.exp.default for node in backward.graph.nodes)
        expect(("exp" in saved[1:], again) == (is_saved, not is_saved), f"{policy.name} saves {saved[1:]}")


def _joint_of_exp(policy: CheckpointPolicy) -> fx.GraphModule:
    """forward: sin(exp(x)), backward: tangent * exp(x); exp(x) stands under a policy."""
    from memfine_fx.compat.tensors import FakeTensorMode

    graph = fx.Graph()
    primal, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    exp_node = graph.call_function(torch.ops.aten.exp.default, (primal,), name="exp")
    value = graph.call_function(torch.ops.aten.sin.default, (exp_node,))
    gradient = graph.call_function(torch.ops.aten.mul.Tensor, (tangent, exp_node))
    graph.output((value, gradient))
    with FakeTensorMode():
        fake = torch.empty(4)
    for node in (primal, tangent, exp_node, value, gradient):
        node.meta["val"] = fake
    exp_node.meta["recompute"], exp_node.meta["ac_graph_id"] = policy, 0
    return fx.GraphModule(torch.nn.Module(), graph)


def _check_random_states() -> None:
    from torch._ops import HigherOrderOperator
    from torch._prims import rng_prims

    for name in ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state"):
        expect(isinstance(getattr(rng_prims, name), HigherOrderOperator), f"{name} is no operator")


CACHED_RECORDS = Feature(
    name="torch._functorch._aot_autograd.aot_autograd_result.GenericAOTAutogradResult.wrap_post_compile",
    package="torch",
    purpose="taking graphs from AOT autograd's cache with what our partitioner learned of them",
    seen=("2.13", "2.13"),
    fallback="A new process traces and partitions its graphs again although their kernels are cached: a warm start "
    "takes longer.",
    check=_check_cached_records,
)
DONATED = Feature(
    name="torch._inductor.utils.get_donated_idxs",
    package="torch",
    purpose="compiled backwards that may run again (retain_graph=True, two losses)",
    seen=("2.11", "2.15"),
    fallback="A second backward through one forward (retain_graph=True, two losses) is refused by torch, with an "
    "error; a single one is as before.",
    check=_check_donated,
)
TANGENTS = Feature(
    name="torch.autograd.Function.boxed_grads_call",
    package="torch",
    purpose="counting the gradients of a graph's results no longer than backward needs them, since torch 2.13",
    seen=("2.11", "2.15"),
    fallback="The gradients of a graph's results count until its backward ends, so a memory_budget may compute more "
    "again, or ask for smaller chunks, than it has to.",
    check=_check_tangents,
)
PARTITIONER = Feature(
    name="torch._functorch.partitioners.min_cut_rematerialization_partition",
    package="torch",
    purpose="deciding what backward finds saved; routing is, so that backward never chooses other experts",
    seen=("2.11", "2.15"),
    fallback="What backward computes again cannot be decided, so nothing is chunked: models are compiled as without "
    'memfine_fx. Config(inner_backend="eager") works.',
    check=_check_partitioner,
)
RANDOM_STATES = Feature(
    name="torch._prims.rng_prims.run_and_save_rng_state",
    package="torch",
    purpose="counting the results of operations that run from a saved random state",
    seen=("2.11", "2.15"),
    fallback="Predicted peaks leave out results of random operations that backward repeats, so a memory_budget may be "
    "exceeded where checkpointed layers use dropout.",
    check=_check_random_states,
)
