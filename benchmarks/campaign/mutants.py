"""Mutants of rules and checks: one condition is changed, and the tests of its room must fail.

A mutant drops an operand of `and` or `or`, takes out a `not`, or turns one comparison. It is made in a copy of the
tracked files, and the fast tests run there, the quickest first, until one fails.
"""

from __future__ import annotations

import ast
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

__all__ = ["Mutant", "MutantsResult", "mutants_of", "run_mutants"]

_GUARDS = "tests/integration/test_guarded_loops.py"
_WRITTEN = "tests/properties/test_written_layers.py"
ROOMS: dict[str, tuple[str, ...]] = {
    "memfine_fx/capture/source": ("tests/capture", _GUARDS, "tests/integration/test_expert_loops.py", _WRITTEN),
    "passes/read/guards.py": (_GUARDS, "tests/passes/read", _WRITTEN),
    "passes/read/no_rows.py": (_GUARDS, "tests/passes/read", _WRITTEN),
    "passes/read/seeds.py": ("tests/passes/read", "tests/integration/test_spellings.py", _WRITTEN),
    "passes/read/rules/masks.py": ("tests/passes/read", "tests/integration/test_spellings.py", _WRITTEN),
    "passes/read/rules/indices.py": ("tests/passes/read", "tests/integration/test_spellings.py", _WRITTEN),
    "passes/read/rules/reductions.py": ("tests/passes/read", "tests/integration/test_spellings.py", _WRITTEN),
    "passes/read/rules/matmuls.py": ("tests/passes/read", "tests/integration/test_spellings.py", _WRITTEN),
    "passes/verify/forced_choices.py": ("tests/integration/test_own_code.py",),
    "memfine_fx/compiler/own_code.py": ("tests/integration/test_own_code.py", _WRITTEN),
}
"""Files whose conditions are changed, and the tests that must notice."""
_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_MOST_SECONDS = 600


@dataclass(frozen=True)
class Mutant:
    """One changed condition.

    Args:
        file: path from the project's root.
        line: of the condition, from 1.
        before, after: the condition's source.
        source: of the changed file.
        tests: paths of the tests that must notice.
    """

    file: str
    line: int
    before: str
    after: str
    source: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class MutantsResult:
    """How many mutants ran, and those that no test noticed."""

    num_mutants: int
    failures: tuple[Mutant, ...]

    def __str__(self) -> str:
        return f"mutants: {self.num_mutants - len(self.failures)} of {self.num_mutants} were noticed by a test"


def mutants_of(root: Path) -> list[Mutant]:
    """Return all mutants of `ROOMS` in the tree at `root`."""
    mutants: list[Mutant] = []
    for room, tests in ROOMS.items():
        path = root / room
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            source = file.read_text(encoding="utf-8")
            name = str(file.relative_to(root))
            for node in ast.walk(ast.parse(source)):
                for changed in _changed(node):
                    mutants.append(_mutant(name, source, node, changed, tests))
    return mutants


def run_mutants(count: int, seed: int, jobs: int = 2) -> MutantsResult:
    """Run the tests of `count` mutants, drawn by `seed`, `jobs` at a time."""
    root = Path(__file__).parents[2]
    every = mutants_of(root)
    drawn = random.Random(seed).sample(every, min(count, len(every)))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        copies: Queue[Path] = Queue()
        for number in range(jobs):
            copies.put(_copy_of(root, Path(folder) / str(number)))

        def survives(mutant: Mutant) -> bool:
            copy = copies.get()
            try:
                is_alive = not _is_noticed(mutant, copy)
                print("survived" if is_alive else "noticed ", mutant, flush=True)
                return is_alive
            finally:
                copies.put(copy)

        alive = list(pool.map(survives, drawn))
    return MutantsResult(len(drawn), tuple(mutant for mutant, is_alive in zip(drawn, alive, strict=True) if is_alive))


def _changed(node: ast.AST) -> Iterator[ast.expr]:
    """The conditions that may stand in the place of a node."""
    if isinstance(node, ast.BoolOp):
        for place in range(len(node.values)):
            left = [*node.values[:place], *node.values[place + 1 :]]
            yield left[0] if len(left) == 1 else ast.BoolOp(node.op, left)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _TURNED:
        yield ast.Compare(node.left, [_TURNED[type(node.ops[0])]()], node.comparators)


def _mutant(file: str, source: str, node: ast.AST, changed: ast.expr, tests: tuple[str, ...]) -> Mutant:
    assert isinstance(node, ast.expr) and node.end_lineno is not None and node.end_col_offset is not None
    lines = source.encode().splitlines(keepends=True)  # columns count bytes
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    text = source.encode()
    after = ast.unparse(changed)
    mutated = text[:start] + f"({after})".encode() + text[end:]
    return Mutant(file, node.lineno, ast.unparse(node), after, mutated.decode(), tests)


def _copy_of(root: Path, folder: Path) -> Path:
    """A copy of the tracked files, symbolic links as such."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, folder / name, follow_symlinks=False)
    return folder


def _is_noticed(mutant: Mutant, copy: Path) -> bool:
    file = copy / mutant.file
    before = file.read_text(encoding="utf-8")
    file.write_text(mutant.source, encoding="utf-8")
    try:
        return any(_fails(tests, copy) for tests in mutant.tests)
    finally:
        file.write_text(before, encoding="utf-8")


def _fails(tests: str, copy: Path) -> bool:
    chosen = ("-m", "not slow and not campaign and not cuda and not trainers")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *chosen, tests]
    try:
        return subprocess.run(command, cwd=copy, capture_output=True, timeout=_MOST_SECONDS).returncode != 0
    except subprocess.TimeoutExpired:
        return True
