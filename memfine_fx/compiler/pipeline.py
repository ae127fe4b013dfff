"""The pipeline: capture -> read -> check -> plan -> lower -> compile, as one readable function.

Dynamo hands over one torch-level graph at a time, with symbolic shapes; bodies of higher-order ops (gradient
checkpointing) are graphs of their own inside it. Each stage returns records; a refusal at any stage leaves
that region as the user wrote it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from memfine_fx.compiler.captured_graph import CapturedGraph
from memfine_fx.compiler.heads import lower_heads, plan_heads
from memfine_fx.compiler.logs import dump_graph, log_regions, observed_passes
from memfine_fx.compiler.regions import lower_regions, plan_regions
from memfine_fx.compiler.session import Session
from memfine_fx.compiler.verifier import verify_graph
from memfine_fx.errors import MemfineError
from memfine_fx.passes.modes import called_bodies
from memfine_fx.runtime.returned import attaching

__all__ = ["compile_graph"]


def compile_graph(graph_module: fx.GraphModule, example_inputs: Sequence[Any], session: Session) -> Callable[..., Any]:
    """Compile one captured graph.

    Args:
        graph_module: from Dynamo; rewritten in place where regions are raised, untouched elsewhere.
        example_inputs: its fake inputs.
        session: collects what was found, chosen and refused.

    Returns:
        A callable with the graph's signature.
    """
    record = session.add_graph(example_inputs)
    try:
        with observed_passes(session):
            return _compile(graph_module, example_inputs, session, record)
    except MemfineError:
        raise
    except BaseException:  # Dynamo restarts its analysis by exceptions, and will call again for the same code
        session.drop_graph(record)
        raise


def _compile(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], session: Session, record: CapturedGraph
) -> Callable[..., Any]:
    config = session.config
    dump_graph(graph_module, session, "captured")
    instead = session.observer.on_capture(graph_module, example_inputs, session, record)
    if instead is not None:
        return instead
    bodies = list(called_bodies(graph_module))
    outcomes = [
        plan_regions(body, modes, session, record, example_inputs if body is graph_module else (), compile_graph)
        for body, modes in bodies
    ]
    with session.diagnostics.timed("heads"):
        record.heads.extend(plan_heads(graph_module, session, record))
    if config.verify:
        outcomes = verify_graph(graph_module, example_inputs, bodies, outcomes, record)
    record.outcomes.extend(itertools.chain(*outcomes))
    lower_heads(graph_module, record, config)  # first: what they read may be a region's exit
    for (body, _), of_body in zip(bodies, outcomes, strict=True):
        lower_regions(body, of_body, session)
    dump_graph(graph_module, session, "rewritten")
    log_regions(graph_module, session, record)
    run = session.observer.on_lowered(graph_module, example_inputs, session, record)
    if run is None:
        run = _run_of(graph_module, example_inputs, session, record)
    return attaching(run, record.returned)


def _run_of(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], session: Session, record: CapturedGraph
) -> Callable[..., Any]:
    """Return what runs a rewritten graph. What compiles is imported here: an eager graph runs without it."""
    backend = session.config.inner_backend
    if backend == "eager":
        return _noting_callers(graph_module, session, record)
    if not record.lowered:
        from memfine_fx.compiler.inner import compile_plain

        return _noting_callers(compile_plain(graph_module, example_inputs, backend, session.mode), session, record)
    from memfine_fx.compiler.compiled_graph import CompiledGraph

    return CompiledGraph(graph_module, example_inputs, session, record).__call__


def _noting_callers(run: Callable[..., Any], session: Session, record: CapturedGraph) -> Callable[..., Any]:
    """Return a plain graph's run that notes whose parameters it is called with: equal layers share a graph."""

    def noting(*args: Any) -> Any:
        session.hold_graph(record, args)
        return run(*args)

    return noting
