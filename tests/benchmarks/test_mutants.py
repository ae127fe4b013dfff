"""Mutants change one condition each, and their tests fail where a rule breaks."""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks.campaign.mutants import FILES, mutants_of

ROOT = Path(__file__).parents[2]


def test_every_room_has_mutants_that_are_python() -> None:
    mutants = mutants_of(ROOT)
    for room in FILES:
        own = [mutant for mutant in mutants if mutant.file.startswith(room)]
        assert len(own) > 10, room
        for mutant in own[:: max(1, len(own) // 5)]:
            before = (ROOT / mutant.file).read_text(encoding="utf-8")
            assert ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(before)), str(mutant)


def test_a_mutant_drops_an_operand_takes_out_a_not_or_turns_a_comparison(tmp_path: Path) -> None:
    for room in FILES:
        path = tmp_path / room
        (path.parent if path.suffix else path).mkdir(parents=True, exist_ok=True)
        if path.suffix:
            path.touch()
    rules = tmp_path / "passes" / "read" / "guards.py"
    rules.write_text("def is_odd(a, b):\n    return a and not b or a < b\n")
    changed = {(mutant.before, mutant.after) for mutant in mutants_of(tmp_path)}
    assert changed == {
        ("a and (not b) or a < b", "a < b"),
        ("a and (not b) or a < b", "a and (not b)"),
        ("a and (not b)", "not b"),
        ("a and (not b)", "a"),
        ("not b", "b"),
        ("a < b", "a <= b"),
    }
