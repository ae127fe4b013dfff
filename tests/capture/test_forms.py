"""The forms in which source is rewritten: each earns the rows that docs/coverage.md lists with it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memfine_fx
from benchmarks.coverage.__main__ import stored_rows
from benchmarks.coverage.forms import FORMS, Form
from benchmarks.coverage.spellings import SPELLINGS
from memfine_fx.capture.source import guards, loops, offsets


def _as_written(self: Any, node: ast.AST) -> ast.AST:
    self.generic_visit(node)
    return node


def _nothing(*_: object) -> None:
    return None


def _changes_nothing(*_: object) -> bool:
    return False


_WORDS: dict[str, list[tuple[object, str, Callable[..., Any]]]] = {
    "Rows are counted": [(loops._Counts, "visit_Call", _as_written)],
    "that were hit": [(loops._Loop, "_run_every_hit_expert", _changes_nothing)],
    "that an index names": [(loops._Loop, "_run_every_named_expert", _changes_nothing)],
    "without rows skip": [(guards.GuardRewriter, "rewrite", _changes_nothing)],
    "Adding zeros": [(loops, "without_zero_terms", lambda loop: list(loop.body))],
    "Places made into a list": [(loops._Loop, "_keep_places_as_tensors", _changes_nothing)],
    "running offsets": [(offsets, "_running", _nothing)],
    "summed up before the loop": [(offsets, "_between_ends", _nothing)],
    "read one by one": [(offsets, "_up_to_ends", _nothing), (offsets._Cutter, "visit_Assign", _as_written)],
}
"""What to switch off, by words of the form's name."""


def switches(form: Form) -> list[tuple[object, str, Callable[..., Any]]]:
    (found,) = [off for words, off in _WORDS.items() if words in form.name]
    return found


def num_chunked(name: str) -> int:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, hidden = SPELLINGS[name]()
    config = memfine_fx.Config(inner_backend="eager", rows_per_chunk=16)
    return memfine_fx.explain(layer, hidden=hidden, config=config).num_chunked


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_form_changes_its_example_and_names_rows_that_are_whole(form: Form) -> None:
    assert form.after != form.before
    rows = stored_rows()
    assert form.rows and all(rows[name].is_whole for name in form.rows)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_without_a_form_its_rows_are_lost(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in form.rows if name in SPELLINGS]
    assert {num_chunked(name) for name in names} == {1}
    for owner, attribute, replacement in switches(form):
        monkeypatch.setattr(owner, attribute, replacement)
    assert {num_chunked(name) for name in names} == {0}
