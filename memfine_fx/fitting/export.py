"""Export an analysis as data that needs no Python: expressions in batch, sequence and rows, and what uses them.

Terms
    expression    a number, "b", "s" or "r" (sequences, tokens of each, rows of a chunk), or a list: operation, operands
    memory        one graph's allocations [expression, start, stop, part] and calls; a part is one of `stretch.PARTS`
    run           the memories of its forward and backward, bytes that earlier runs saved, and later gradients

Equal expressions and equal memories are stored once, by number. The page's script evaluates them as `Analysis` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import sympy

from memfine_fx.config import Config
from memfine_fx.errors import ConfigError
from memfine_fx.fitting.analysis import Analysis
from memfine_fx.fitting.recording import RecordedStep
from memfine_fx.fitting.stretch import PARTS, part_of, places_of
from memfine_fx.memory.liveness import Call, GraphMemory
from memfine_fx.memory.region_bytes import ChunkSize, RegionBytes, workspace_expression
from memfine_fx.memory.sizes import ROWS
from memfine_fx.memory.step import RunMemory
from memfine_fx.plan.budget import MARGIN_PERCENT, SCALAR_BYTES
from memfine_fx.plan.rows import DEVIATIONS, KNEE_ROWS, LEAST_ROWS, LEAST_TOKENS, knee_tokens

__all__ = ["OPERATIONS", "Exported"]

_BATCH, _SEQ = (sympy.Symbol(name, integer=True, positive=True) for name in ("b", "s"))
_NAMES = {_BATCH: "b", _SEQ: "s", ROWS: "r"}
OPERATIONS = {
    "Add": "+",
    "Mul": "*",
    "Pow": "^",
    "Max": "max",
    "Min": "min",
    "floor": "floor",
    "ceiling": "ceiling",
    "FloorDiv": "floordiv",
    "CleanDiv": "floordiv",
    "Mod": "mod",
    "PythonMod": "mod",
    "ModularIndexing": "modular",
    "CeilToInt": "ceiling",
    "FloorToInt": "floor",
    "TruncToInt": "trunc",
    "IntTrueDiv": "/",
    "FloatTrueDiv": "/",
    "ToFloat": "+",
    "GreaterThan": ">=",
    "StrictGreaterThan": ">",
    "LessThan": "<=",
    "StrictLessThan": "<",
    "Equality": "==",
    "Unequality": "!=",
    "And": "and",
    "Or": "or",
    "Not": "not",
}
"""Classes of sympy and of torch's sizes -> the page's operations."""


class Exported:
    """A collector of exported analyses, which share tables of expressions and memories.

    Raises:
        ConfigError: something in an analysis has no counterpart on a page.
    """

    def __init__(self) -> None:
        self._expressions: dict[str, int] = {}
        self._memories: dict[str, int] = {}
        self._known: dict[sympy.Basic, int] = {}

    @property
    def tables(self) -> dict[str, Any]:
        """Return the shared expressions and memories, by number, and the names of parts."""
        return {
            "parts": PARTS,
            "expressions": [json.loads(text) for text in self._expressions],
            "memories": [json.loads(text) for text in self._memories],
        }

    def add(self, analysis: Analysis, plans: tuple[str, ...]) -> dict[str, Any]:
        """Add an analysis with these of its plans to the tables, and return its own data."""
        if analysis.config.axis != "rows":
            raise ConfigError(f"a page is written of chunks of rows only, and axis={analysis.config.axis!r}")
        static, setup = analysis.static, analysis.setup
        least = analysis.least_plans if "least" in plans else ()
        most = analysis.most_plans if "most" in plans else ()
        needed = dict.fromkeys((*(plan for plan in plans if plan != "least"), *least, *most))
        optimizer = static.optimizer
        return {
            "static": {
                name: getattr(static, name)
                for name in (
                    "parameters", "trained", "layer", "trained_layer", "root", "experts", "trained_experts",
                )
            },
            "optimizer": {"state": optimizer.state, "masters": optimizer.masters, "working": optimizer.working},
            "fsdp": setup.fsdp,
            "expertParallel": setup.expert_parallel,
            "earlierGradients": analysis.earlier_gradients,
            "more": analysis.more,
            "isAskedKnown": analysis.is_asked_known,
            "leastPlans": least,
            "mostPlans": most,
            "estimated": analysis.records[0].estimated,
            "marginPercent": MARGIN_PERCENT,
            "constantInputs": analysis.constant_inputs,
            "scalars": SCALAR_BYTES,
            "leastRows": LEAST_ROWS,
            "hasBatch": analysis.has_batch,
            "hasSeq": analysis.has_seq,
            "plans": {plan: [self._runs(analysis, record, plan) for record in analysis.records] for plan in needed},
            "alike": {plan: analysis.alike(plan) for plan in needed if len(analysis.records) > 1},
        }  # fmt: skip

    def _runs(self, analysis: Analysis, record: RecordedStep, plan: str) -> list[dict[str, Any]]:
        exported_runs: list[dict[str, Any]] = []
        saved: sympy.Expr = sympy.Integer(0)
        for run in analysis.in_micro_batch(record.runs[plan]):
            sizes = _Sizes({**run.values, **record.in_sizes(run, _BATCH, _SEQ)})
            memories = {
                where: None if memory is None else self._memory(analysis, run, memory, where, sizes)
                for where, memory in (("forward", run.forward), ("backward", run.backward))
            }
            exported_runs.append({**memories, "saved": self._number(saved), "later": run.later_gradient_bytes})
            if run.forward is not None and run.step.backward is not None:
                saved += sizes.of(run.forward.left_bytes)
        return exported_runs

    def _memory(self, analysis: Analysis, run: RunMemory, memory: GraphMemory, where: str, sizes: _Sizes) -> int:
        allocations = [
            [
                self._number(sizes.of(allocation.num_bytes)),
                allocation.start,
                allocation.stop,
                part_of(allocation, where),
            ]
            for allocation in memory.allocations
        ]
        calls = [
            [call.position, PARTS.index("working set of the head" if call.phase == "head" else PARTS[2]), *workspace]
            for call in memory.calls
            if (workspace := self._workspace(analysis, run, call, sizes)) is not None
        ]
        shown = {
            "positions": memory.num_positions,
            "allocations": allocations,
            "calls": calls,
            "places": places_of(memory),
        }
        return _numbered(self._memories, json.dumps(shown))

    def _workspace(self, analysis: Analysis, run: RunMemory, call: Call, sizes: _Sizes) -> list[Any] | None:
        """Return the data of a call's working set, with and without a bound of rows; None for a call without one."""
        head, region = run.step.heads.get(call.region_id), run.step.regions.get(call.region_id)
        if head is not None:
            tokens = sizes.of(head.num_tokens)
            knee = analysis.config.tokens_per_head_chunk or knee_tokens(head.terms)
            workspaces = (head.terms.workspace(sympy.Min(tokens, rows)) for rows in (knee, LEAST_TOKENS))
            return ["head", *(self._number(sympy.sympify(workspace)) for workspace in workspaces)]
        if region is None or (call.phase != "forward" and call.phase != "backward"):
            return None
        ((policy, _),) = region.parts(call, run.values)  # a record saves something of all rows, or of none
        tokens, terms = sizes.of(region.num_tokens), region.terms_now(policy)
        free, staged = (
            workspace_expression(terms, tokens, ChunkSize(1, is_staged), region.axis, call.phase, rows=ROWS)
            for is_staged in (False, True)
        )
        chosen = _chunk_rules(region.terms("nothing"), analysis.config, analysis.has_even_routing)
        numbers = [self._number(sympy.sympify(expression)) for expression in (tokens, free, staged)]
        return ["region", *numbers, chosen]

    def _number(self, expr: sympy.Basic) -> int:
        if expr not in self._known:
            self._known[expr] = _numbered(self._expressions, json.dumps(_plain(expr)))
        return self._known[expr]


class _Sizes:
    """A substitution of values and page symbols for a graph's symbols."""

    def __init__(self, values: Mapping[str, int | sympy.Symbol]) -> None:
        self._values = values
        self._known: dict[sympy.Expr, sympy.Expr] = {}

    def of(self, expr: sympy.Expr) -> sympy.Expr:
        if expr not in self._known:
            values = {symbol: sympy.sympify(self._values[str(symbol)]) for symbol in expr.free_symbols}
            self._known[expr] = expr.xreplace(values)
        return self._known[expr]


def _chunk_rules(terms: RegionBytes, config: Config, has_even_routing: bool) -> dict[str, Any]:
    """Return the rules for how many rows a region's chunks have, as `Analysis` chooses them."""
    knee = config.rows_per_chunk or terms.knee_rows or KNEE_ROWS.get(terms.device_type, KNEE_ROWS["cuda"])
    return {
        "topK": terms.top_k,
        "experts": terms.num_experts,
        "knee": knee,
        "followsExperts": config.rows_per_chunk is None and terms.knee_rows is not None,
        "leastRows": LEAST_ROWS,
        "deviations": DEVIATIONS,
        "takesGroup": terms.takes_group,
        "isEven": has_even_routing,
    }


def _plain(expr: sympy.Basic) -> Any:
    """Return an expression of sympy as nested lists."""
    if expr in _NAMES:
        return _NAMES[expr]
    if expr is sympy.true or expr is sympy.false:
        return bool(expr)
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Rational):
        return ["/", int(expr.p), int(expr.q)]
    if isinstance(expr, sympy.Float):
        return float(expr)
    if isinstance(expr, sympy.Piecewise):
        return ["piecewise", *([_plain(value), _plain(condition)] for value, condition in expr.args)]
    if isinstance(expr, sympy.ITE):  # a condition of cases, as sympy folds one piecewise size into another
        condition, first, second = map(_plain, expr.args)
        return ["or", ["and", condition, first], ["and", ["not", condition], second]]
    name = OPERATIONS.get(type(expr).__name__)
    if name is None:
        raise ConfigError(f"a size of the step has no counterpart on a page: {expr}")
    return [name, *map(_plain, expr.args)]


def _numbered(table: dict[str, int], key: str) -> int:
    return table.setdefault(key, len(table))
