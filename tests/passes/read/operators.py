"""The database of operators: for every rule of the reader, samples with operands of a known meaning."""

from __future__ import annotations

from tests.passes.read import operators_of_experts, operators_of_moves, operators_of_routing, operators_of_rows
from tests.passes.read.samples import Database

__all__ = ["OPERATORS", "POINTWISE"]

POINTWISE = operators_of_rows.POINTWISE

OPERATORS: Database = {}
for _module in (operators_of_rows, operators_of_moves, operators_of_routing, operators_of_experts):
    for _target, _samples in _module.OPERATORS.items():
        assert _target not in OPERATORS, f"two lists of samples for {_target}"
        OPERATORS[_target] = _samples
