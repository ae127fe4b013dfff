"""Mutants of rules and checks: one condition is changed, and a fast test must fail.

A mutant drops an operand of `and` or `or`, takes out a `not`, or turns one comparison. It is made in a copy of the
tracked files. Only the tests that run the changed lines are run, until one fails: a run of all fast tests under
coverage.py says which these are.
"""

from __future__ import annotations

import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import coverage

__all__ = ["FILES", "Mutant", "MutantsResult", "mutants_of", "run_mutants"]

FILES = (
    "memfine_fx/capture/source",
    "passes/read/guard_proof.py",
    "passes/read/guards.py",
    "passes/read/no_rows.py",
    "passes/read/seeds.py",
    "passes/read/rules/masks.py",
    "passes/read/rules/indices.py",
    "passes/read/rules/reductions.py",
    "passes/read/rules/matmuls.py",
    "passes/verify/forced_choices.py",
    "memfine_fx/compiler/own_code.py",
    "memfine_fx/compiler/own_code_runs.py",
)
"""Files and folders whose conditions are changed."""
_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_FAST = ("-m", "not slow and not campaign and not cuda and not trainers")
_MOST_SECONDS = 900
_NEAREST = (
    "tests/capture",
    "tests/passes/read",
    "tests/integration/test_guarded_loops",
    "tests/integration/test_own_code",
)
_FIRST, _MOST = 40, 120
"""Numbers of tests of a mutant: the nearest, and all of them."""

TestsByLine = dict[str, dict[int, list[str]]]
"""By file, from the project's root, and line: the tests that run it; "" is what imports it."""


@dataclass(frozen=True)
class Mutant:
    """One changed condition.

    Args:
        file: path from the project's root.
        line, last_line: of the condition, from 1.
        before, after: the condition's source.
        source: of the changed file.
    """

    file: str
    line: int
    last_line: int
    before: str
    after: str
    source: str

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
    """Return all mutants of `FILES` in the tree at `root`."""
    mutants: list[Mutant] = []
    for room in FILES:
        path = root / room
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            source = file.read_text(encoding="utf-8")
            name = str(file.relative_to(root))
            for node in ast.walk(ast.parse(source)):
                for changed in _changed(node):
                    mutants.append(_mutant(name, source, node, changed))
    return mutants


def run_mutants(count: int, seed: int, covered: Path | None = None, jobs: int = 2) -> MutantsResult:
    """Run the tests of `count` mutants, drawn by `seed`, `jobs` at a time.

    Args:
        covered: data of coverage.py from an earlier run of the fast tests in this tree; None to run them now.
    """
    root = Path(__file__).parents[2]
    every = mutants_of(root)
    drawn = random.Random(seed).sample(every, min(count, len(every)))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        copies: Queue[Path] = Queue()
        for number in range(jobs):
            copies.put(_copy_of(root, Path(folder) / str(number)))
        tests = _tests_by_line(covered or _cover(root, Path(folder) / "covered"), root)

        def survives(mutant: Mutant) -> bool:
            copy = copies.get()
            try:
                is_alive = not _is_noticed(mutant, tests, copy)
                print("survived" if is_alive else "noticed ", mutant, flush=True)
                return is_alive
            finally:
                copies.put(copy)

        alive = list(pool.map(survives, drawn))
    return MutantsResult(len(drawn), tuple(mutant for mutant, is_alive in zip(drawn, alive, strict=True) if is_alive))


def _cover(root: Path, data: Path) -> Path:
    """Run all fast tests under coverage.py.

    Returns:
        Its data, with the names of the tests as contexts.
    """
    settings = data.with_suffix(".ini")
    settings.write_text("[run]\ninclude =\n" + "".join(f"    {name}{'/*' * (name[-3:] != '.py')}\n" for name in FILES))
    options = ("--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report=")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *_FAST, *options]
    environment = os.environ | {"COVERAGE_FILE": str(data), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=root, env=environment, check=True)
    return data


def _tests_by_line(covered: Path, root: Path) -> TestsByLine:
    data = coverage.CoverageData(str(covered))
    data.read()
    tests: TestsByLine = {}
    for file in data.measured_files():
        lines = data.contexts_by_lineno(file)
        tests[str(Path(file).relative_to(root))] = {
            line: [context.rpartition("|")[0] for context in contexts] for line, contexts in lines.items()
        }
    return tests


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


def _mutant(file: str, source: str, node: ast.AST, changed: ast.expr) -> Mutant:
    assert isinstance(node, ast.expr) and node.end_lineno is not None and node.end_col_offset is not None
    lines = source.encode().splitlines(keepends=True)  # columns count bytes
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    text = source.encode()
    after = ast.unparse(changed)
    mutated = text[:start] + f"({after})".encode() + text[end:]
    return Mutant(file, node.lineno, node.end_lineno, ast.unparse(node), after, mutated.decode())


def _copy_of(root: Path, folder: Path) -> Path:
    """A copy of the tracked files, symbolic links as such."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, folder / name, follow_symlinks=False)
    return folder


def _is_noticed(mutant: Mutant, tests: TestsByLine, copy: Path) -> bool:
    lines = range(mutant.line, mutant.last_line + 1)
    by_line = tests.get(mutant.file, {})
    chosen = {test for line in lines for test in by_line.get(line, ()) if test}
    num_lines = Counter(test for contexts in by_line.values() for test in contexts)
    ordered = sorted(chosen, key=lambda test: (not test.startswith(_NEAREST), num_lines[test], test))
    file = copy / mutant.file
    before = file.read_text(encoding="utf-8")
    file.write_text(mutant.source, encoding="utf-8")
    try:
        rest = ordered[_FIRST:]
        return _fails(ordered[:_FIRST], copy) or _fails(rest[:: 1 + len(rest) // (_MOST - _FIRST)], copy)
    finally:
        file.write_text(before, encoding="utf-8")


def _fails(tests: Sequence[str], copy: Path) -> bool:
    if not tests:
        return False
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *_FAST, *tests]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        finished = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=_MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    if finished.returncode in (4, 5):  # what pytest answers where a named test does not exist
        raise RuntimeError(finished.stdout.decode()[-2000:])
    return finished.returncode != 0
