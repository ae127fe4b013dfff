"""A traced function, compiled at its first call or found in a cache, and what its code holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from memfine_fx.compat.functorch import CacheHit, compile_through_cache, run_boxed, store_record
from memfine_fx.compat.inductor import (
    TRACING,
    compile_function,
    compile_inner,
    identity_options,
    wrapper_of,
    written_code,
)
from memfine_fx.compat.settings import AUTOGRAD_CACHE
from memfine_fx.config import InnerBackend
from memfine_fx.memory.graph_peak import live_peaks, tensor_bytes
from memfine_fx.memory.liveness import GraphMemory
from memfine_fx.memory.machine import measurement_key
from memfine_fx.memory.sizes import GROUPS, ROWS
from memfine_fx.memory.wrapper_code import READER_FILES, read_wrapper
from memfine_fx.passes.tracing import TracedFunction

__all__ = ["CompiledFunction", "making", "num_compilations", "outputs_of", "set_outputs"]

making = threading.RLock()
"""Held while a compiled function is traced or compiled."""
_num_compilations = 0


def num_compilations() -> int:
    """Return how many functions this process has compiled: it grows with distinct functions, not with layers."""
    return _num_compilations


def outputs_of(graph_module: fx.GraphModule) -> list[fx.Node]:
    result: Any = next(iter(reversed(graph_module.graph.nodes))).args[0]
    nodes = list(result) if isinstance(result, (tuple, list)) else [result]
    assert all(isinstance(node, fx.Node) for node in nodes), "a traced function returns tensors"
    return nodes


def set_outputs(graph_module: fx.GraphModule, results: list[fx.Node]) -> None:
    graph = graph_module.graph
    output = next(iter(reversed(graph.nodes)))
    output.args = (tuple(results),)
    graph.eliminate_dead_code()
    graph_module.recompile()


def _peak(traced: TracedFunction, inner: InnerBackend) -> sympy.Expr:
    """Peak of one call in R (and G): the maximum over its program points, as one expression."""
    peaks = live_peaks(traced.graph_module.graph, is_fused=inner == "inductor")
    renamed = [peak.subs({traced.rows: ROWS, traced.groups: GROUPS}) for peak in peaks]
    assert all(peak.free_symbols <= {ROWS, GROUPS} for peak in renamed), (
        "a compiled function's sizes are R, G and numbers"
    )
    return sympy.Max(sympy.Integer(0), *_undominated(renamed))


def _of_up_to_all_rows(peak: sympy.Expr) -> sympy.Expr:
    """A call has any number of rows up to R: what a kernel takes at some numbers alone counts from each of them on."""
    return peak.replace(sympy.Equality, lambda rows, number: rows >= number)


def _results(traced: TracedFunction) -> sympy.Expr:
    """Bytes of what a call returns, in R (and G)."""
    total = sum((tensor_bytes(node) for node in set(outputs_of(traced.graph_module))), sympy.Integer(0))
    return sympy.expand(total).subs({traced.rows: ROWS, traced.groups: GROUPS})


def _undominated(peaks: list[sympy.Expr]) -> list[sympy.Expr]:
    """Drop affine peaks that another one exceeds in every coefficient."""
    rows = {
        (
            peak.coeff(ROWS, 1).coeff(GROUPS, 0),
            peak.coeff(GROUPS, 1),
            peak.coeff(ROWS, 0).coeff(GROUPS, 0),
        ): peak
        for peak in peaks
    }
    return [
        peak
        for key, peak in rows.items()
        if not any(other != key and all(b >= a for a, b in zip(key, other, strict=True)) for other in rows)
    ]


def _device_of(traced: TracedFunction) -> str:
    return next(
        str(fake_input.device.type) for fake_input in traced.fake_inputs if isinstance(fake_input, torch.Tensor)
    )


@dataclass(frozen=True)
class _Record:
    """Record stored with a compiled function: the memory that its code holds, None where that could not be read."""

    memory: GraphMemory | None


class CompiledFunction:
    """A traced function, compiled at its first call; its results come as a sequence.

    `peak_bytes` is an estimate from the graph, and read from the compiled code once that exists.
    """

    def __init__(self, traced: TracedFunction, inner: InnerBackend, note_read: Callable[[], None]) -> None:
        set_outputs(traced.graph_module, outputs_of(traced.graph_module))
        self._traced = traced
        self._inner = inner
        self._note_read = note_read
        self.peak_bytes = _peak(traced, inner)
        self.results_bytes = _results(traced)
        self._compiled: Callable[..., Sequence[torch.Tensor]] | None = None
        self._is_read = False

    @property
    def graph_module(self) -> fx.GraphModule:
        return self._traced.graph_module

    def __call__(self, *args: torch.Tensor) -> Sequence[torch.Tensor]:
        if self._compiled is None:
            with making:
                self._compiled = self._compiled or self._compile()
        return self._compiled(*args)

    def _compile(self) -> Callable[..., Sequence[torch.Tensor]]:
        global _num_compilations
        _num_compilations += 1
        graph_module = self._traced.graph_module
        if self._inner != "inductor" or not TRACING.holds():
            return graph_module
        return self._compile_with(self._compile_and_read)

    def read_code(self) -> None:
        """Take `peak_bytes` from the code that Inductor would write, unless it was read before."""
        if self._is_read or self._inner != "inductor" or not TRACING.holds():
            return
        self._is_read = True
        self._compile_with(self._read_alone, is_read_alone=True)

    def _compile_with(
        self, inner_compile: Callable[..., Any], *, is_read_alone: bool = False
    ) -> Callable[..., Sequence[torch.Tensor]]:
        traced = self._traced

        def compiled() -> Callable[..., Sequence[torch.Tensor]]:
            result: Callable[..., Sequence[torch.Tensor]] = compile_function(
                traced.graph_module,
                traced.fake_mode,
                list(traced.fake_inputs),
                inner_compile,
                identity_options(READER_FILES, measurement_key(_device_of(traced))),
            )
            return result

        if is_read_alone:  # a hit in AOT autograd's cache would read nothing
            with AUTOGRAD_CACHE.applied():
                return compiled()
        return compile_through_cache(compiled, self._take_learned)

    def _take_learned(self, found: CacheHit) -> bool:
        if not isinstance(found.record, _Record):
            return False
        self._take(found.record.memory)
        return True

    def _read_alone(self, graph_module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        self._take(read_wrapper(written_code(graph_module, inputs, **kwargs), graph_module.graph))
        return run_boxed(graph_module, inputs)

    def _compile_and_read(self, graph_module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        compiled = compile_inner(graph_module, inputs, **kwargs)
        memory = read_wrapper(wrapper_of(compiled), graph_module.graph)
        store_record(_Record(memory))
        self._take(memory)
        return compiled

    def _take(self, memory: GraphMemory | None) -> None:
        sizes = {str(self._traced.rows): ROWS, str(self._traced.groups): GROUPS}
        if memory is not None and all(str(symbol) in sizes for symbol in memory.symbols):
            peak = memory.peak_expression(lambda call: 0)
            self.peak_bytes = _of_up_to_all_rows(peak.subs({symbol: sizes[str(symbol)] for symbol in memory.symbols}))
            self._is_read = True
            self._note_read()
