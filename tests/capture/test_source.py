"""Which loops are rewritten, and into what."""

from __future__ import annotations

import ast
import textwrap

import pytest

from memfine_fx.capture.source.loops import rewrite_function


def rewritten(body: str) -> str | None:
    """The function with this body after rewriting, or None where it stays as written."""
    tree = ast.parse("def forward(self, x, index):\n" + textwrap.indent(textwrap.dedent(body).strip(), "    "))
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    return ast.unparse(ast.fix_missing_locations(tree)) if rewrite_function(function) else None


def test_a_loop_over_hit_experts_runs_every_expert() -> None:
    text = rewritten(
        """
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            e = e[0]
            k, t = torch.where(mask[e])
            out.index_add_(0, t, f(x[t], self.up[e]))
        """
    )
    assert text is not None
    assert "hit = _memfine_every_expert(torch.greater(mask.sum(dim=(-1, -2)), 0))" in text
    assert "torch.where(_memfine_guarded(mask[e]))" in text
    assert "if not _memfine_exists(e, self.up):" in text
    assert "e = e[0]" not in text


def test_a_variable_of_one_element_keeps_its_dimension_where_it_indexes_tensors() -> None:
    text = rewritten(
        """
        for e in (mask.sum((1, 2)) > 0).nonzero():
            k, t = torch.where(mask[e].squeeze(0))
            y = self.experts[e](x[t])
            z = self[f"expert_{e[0]}"](x[t])
        """
    )
    assert text is not None
    assert "_memfine_guarded(_memfine_take(mask, e)).squeeze(0)" in text
    assert "_memfine_take(self.experts, e)(x[t])" in text
    assert "self[f'expert_{e}']" in text


@pytest.mark.parametrize(
    "condition",
    ["t.numel() == 0", "t.shape[0] == 0", "len(t) == 0", "not t.numel()", "t.size(0) == 0", "not t.any()"],
)
def test_a_guard_on_emptiness_becomes_a_mark(condition: str) -> None:
    text = rewritten(f"for e in range(4):\n    t = f(index, e)\n    if {condition}:\n        continue\n    g(t)")
    assert text is not None
    assert "t = _memfine_guarded(t)" in text
    assert "continue" not in text


def test_a_body_under_a_condition_is_run_always() -> None:
    text = rewritten("for e in range(4):\n    m = index == e\n    if m.any():\n        out[m] += f(x[m])")
    assert text is not None
    assert "if" not in text
    assert "out[m] += f(x[m])" in text


def test_counts_get_a_known_size() -> None:
    text = rewritten("n = torch.bincount(index.view(-1), minlength=self.E).tolist()")
    assert text is not None
    assert "_memfine_count(index.view(-1), minlength=self.E).tolist()" in text


@pytest.mark.parametrize(
    "body",
    [
        "for e in range(4):\n    if x.numel() == 0:\n        continue\n    f(e)",  # not made in the loop
        "for e in range(4):\n    t = f(e)\n    if t.numel() == 1:\n        continue",
        "for e in range(4):\n    t = f(e)\n    if t.numel() == 0:\n        break",
        "for e in range(4):\n    t = f(e)\n    if t.numel() == 0:\n        continue\n    n += 1",  # counts in Python
        "for e in other.nonzero():\n    f(mask[e])",  # nothing says what was hit
        "hit = (mask.sum(0) > 0).nonzero()\nn = len(hit)\nfor e in hit:\n    f(mask[e])",  # read elsewhere
        "n = torch.bincount(index)",
    ],
)
def test_other_loops_stay_as_written(body: str) -> None:
    assert rewritten(body) is None


OFFSETS = """
    start = 0
    for e, num in enumerate(counts):
        end = start + num
        if num == 0:
            continue
        outs.append(self.experts[e](x[start:end]))
        start = end
"""


def test_slices_by_running_offsets_become_parts_of_one_split() -> None:
    text = rewritten("counts = ids.cpu().numpy()" + OFFSETS.replace("\n    ", "\n"))
    assert text is not None
    assert "self.experts[e](_memfine_part(x, counts, e))" in text
    assert "counts = ids.cpu().tolist()" in text
    assert "continue" not in text and "end = " not in text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("start = 0", "start = 1"),
        ("start = end", "start = end + 1"),
        ("x[start:end]", "x[start:end] + y[end]"),
        ("x[start:end]", "x[0:end]"),
        ("if num == 0", "if num == 1"),
    ],
)
def test_offsets_used_in_another_way_stay_as_written(old: str, new: str) -> None:
    text = rewritten(OFFSETS.replace("\n    ", "\n").replace(old, new))
    assert text is None or "_memfine_part" not in text


def test_a_guard_by_counts_of_the_index_is_dropped_with_the_counts() -> None:
    text = rewritten(
        """
        counts = torch.bincount(index.flatten(), minlength=4).tolist()
        for e in range(4):
            if counts[e] == 0:
                continue
            t, k = torch.where(index == e)
            out.index_add_(0, t, f(x[t]))
        """
    )
    assert text is not None
    assert "counts" not in text and "continue" not in text


def test_a_guard_by_counts_of_something_else_stays() -> None:
    text = rewritten(
        """
        counts = torch.bincount(other.flatten(), minlength=4).tolist()
        for e in range(4):
            if counts[e] == 0:
                continue
            t, k = torch.where(index == e)
        """
    )
    assert text is not None and "if counts[e] == 0" in text


def test_a_loop_over_the_named_experts_runs_all_and_marks_their_masks() -> None:
    text = rewritten("for e in index.unique():\n    t, k = torch.where(index == e)\n    g(self.experts[e](x[t]))")
    assert text is not None
    assert "for e in _memfine_every_index(self.experts)" in text
    assert "torch.where(_memfine_guarded(index == e))" in text


def test_places_made_into_lists_stay_tensors_where_they_only_index() -> None:
    loop = "for e in range(4):\n    t, k = torch.where(index == e)\n    places = t.tolist()\n    y = x[None, places]"
    text = rewritten(loop)
    assert text is not None and "places = t\n" in text
    assert rewritten(f"{loop}\n    log(places)") is None


def test_experts_without_weights_that_take_another_branch_are_run_too() -> None:
    text = rewritten(
        """
        for hit in (mask.sum((1, 2)) > 0).nonzero():
            e = int(hit.item())
            k, t = torch.where(mask[e].squeeze(0))
            if e >= self.num_experts:
                y = x[t]
            else:
                y = x[t] @ self.up[e]
            out.index_add_(0, t, y)
        """
    )
    assert text is not None
    assert "e = hit" in text and "torch.where(_memfine_guarded(mask[e]).squeeze(0))" in text
    assert "exists" not in text.replace("import", "")


@pytest.mark.parametrize("extra", ["self.usage[e] += 1", "loss = loss + self.up[e].norm()", "log(e)", "count += 1"])
def test_a_loop_that_also_acts_on_experts_without_rows_stays_as_written(extra: str) -> None:
    loop = "for e in range(4):\n    t = torch.where(index == e)[0]\n    if t.numel() == 0:\n        continue\n    g(t)"
    assert rewritten(loop) is not None
    assert rewritten(f"{loop}\n    {extra}") is None


ENDS = """
    ends = torch.bincount(flat, minlength=self.E).cpu().numpy().cumsum(0)
    for e, end in enumerate(ends):
        start = 0 if e == 0 else ends[e - 1]
        if start == end:
            continue
        own = token[start:end]
        out = out.index_add(0, own, self.experts[e](x[own]))
    """


def test_slices_between_ends_become_parts_of_the_counts() -> None:
    text = rewritten(ENDS)
    assert text is not None
    assert "ends = _memfine_count(flat, minlength=self.E).tolist()" in text
    assert "own = _memfine_part(token, ends, e)" in text
    assert "start" not in text and "continue" not in text


@pytest.mark.parametrize(
    "extra",
    ["log(ends)", "out = out + ends[e - 1]", "y = x[start:]"],
    ids=["ends read elsewhere", "ends read in the loop", "another slice"],
)
def test_ends_that_are_used_otherwise_stay_as_written(extra: str) -> None:
    text = rewritten(f"{ENDS.rstrip()}\n        {extra}\n")
    assert text is None or "cumsum(0)" in text


GUARDED = "for e in range(4):\n    m = index == e\n    if m.any():\n        out[m] += f(x[m])\n"


@pytest.mark.parametrize(
    "otherwise",
    [
        "    else:\n        out[0, 0] += 0 * sum(p.sum() for p in e.parameters())",
        "    elif self.training:\n        out = out + 0.0 * self.experts[e](x[:1]).sum()",
    ],
)
def test_a_branch_that_adds_zeros_for_experts_without_rows_goes(otherwise: str) -> None:
    text = rewritten(GUARDED + otherwise)
    assert text is not None
    assert "0 *" not in text and "0.0 *" not in text and "m = _memfine_guarded(m)" in text


@pytest.mark.parametrize(
    "otherwise", ["out[0, 0] += 1e-3 * self.bias[e]", "out = 0 * x", "out[0] -= 0 * x[0]", "log(e)"]
)
def test_a_branch_that_does_something_else_stays(otherwise: str) -> None:
    text = rewritten(f"{GUARDED}    else:\n        {otherwise}")
    assert text is None or "else:" in text
