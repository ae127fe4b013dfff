"""Which loops are rewritten, and into what."""

from __future__ import annotations

import ast
import textwrap

import pytest

from memfine_fx.capture.source.loops import LeftAsWritten, rewrite_function

PREFIX = "_memfine_"


def rewrite(body: str) -> tuple[str | None, list[LeftAsWritten]]:
    """The function with this body after rewriting, or None where it stays as written; and what was in the way."""
    source = "def forward(self, x, index, mask, out):\n" + textwrap.indent(textwrap.dedent(body).strip(), "    ")
    tree, left = ast.parse(source), []  # type: ignore[var-annotated]  # of what is appended
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    is_rewritten = rewrite_function(function, "layer.py", left)
    return (ast.unparse(ast.fix_missing_locations(tree)).replace(PREFIX, "") if is_rewritten else None), left


def rewritten(body: str) -> str | None:
    return rewrite(body)[0]


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
    assert "hits_2 = torch.greater(mask.sum(dim=(-1, -2)), 0)\n    hit = every_expert(hits_2)" in text
    assert "if not exists(e, self.up):\n            pass" in text
    assert "body_1 = body(hits_2[e], 'true', 0, False, 'layer.py:3')" in text
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
    assert "take(mask, e).squeeze(0)" in text
    assert "take(self.experts, e)(x[t])" in text
    assert "self[f'expert_{e}']" in text


@pytest.mark.parametrize(
    ("condition", "marked"),
    [
        ("t.numel() == 0", "t.numel(), '==', 0, True"),
        ("0 == t.numel()", "t.numel(), '==', 0, True"),
        ("t.numel() < 1", "t.numel(), '<', 1, True"),
        ("1 > t.numel()", "t.numel(), '<', 1, True"),
        ("t.shape[0] == 0", "t.shape[0], '==', 0, True"),
        ("len(t) == 0", "len(t), '==', 0, True"),
        ("not t.numel()", "t.numel(), 'true', 0, False"),
        ("t.size(0) == 0", "t.size(0), '==', 0, True"),
        ("not t.any()", "t.any(), 'true', 0, False"),  # ids of places: proved to be no question of emptiness later
        ("not bool(t.any().item())", "t.any(), 'true', 0, False"),
        ("t.sum().item() == 0", "t.sum(), '==', 0, True"),
    ],
)
def test_a_condition_is_marked_as_it_is_written(condition: str, marked: str) -> None:
    text = rewritten(f"for e in range(4):\n    t = f(index, e)\n    if {condition}:\n        continue\n    y = g(t)")
    assert text is not None
    assert f"body_1 = body({marked}, 'layer.py:4')\n        if body_1.is_run:\n            y = g(t)" in text
    assert "leave(body_1)" in text and "continue" not in text


def test_a_body_under_a_condition_is_marked_too() -> None:
    text = rewritten("for e in range(4):\n    m = index == e\n    if m.any():\n        out[m] += f(x[m])")
    assert text is not None
    assert "body_1 = body(m.any(), 'true', 0, False, 'layer.py:4')" in text
    assert "written(out, body_1)[m] += f(x[m])" in text


GUARD = "for e in range(4):\n    t = f(index, e)\n    if t.numel() == 0:\n        continue\n"


def test_names_that_are_read_later_are_merged_with_what_they_were() -> None:
    text = rewritten(
        f"loss = 0\n{GUARD}    y = g(t)\n    loss = loss + y.sum()\n    self.total = self.total + 1\nreturn loss"
    )
    assert text is not None
    assert "body_1_old_0 = loss" in text and "loss = merged(body_1_old_0, loss, body_1)" in text
    assert "self.total = merged(body_1_old_1, self.total, body_1)" in text
    assert "merged(body_1_old_0, y" not in text and "y = merged" not in text


@pytest.mark.parametrize(
    "after",
    [
        "    out.index_add_(0, t, y)",
        "    z = y\n    for k in range(2):\n        z = z + k\n    out[t] = z",  # bound anew before it is read
        "    if e: z = y\n    else: z = -y\n    out[t] = z",
    ],
)
def test_names_of_one_iteration_are_not_merged(after: str) -> None:
    text = rewritten(f"{GUARD}    y = g(t)\n{after}")
    assert text is not None and "merged" not in text


def test_what_is_written_is_asked_whether_it_is_a_tensor() -> None:
    text = rewritten(f"{GUARD}    out[t] = g(t)\n    used.append(e)\n    self.ema[e] *= 0.9")
    assert text is not None
    assert "store(written(out, body_1), t, g(t), body_1)" in text
    assert "written(used, body_1).append(e)" in text
    assert "written(self.ema, body_1)[e] *= 0.9" in text


def test_a_list_that_is_only_put_together_may_grow() -> None:
    text = rewritten(f"parts = []\n{GUARD}    parts.append(g(t))\nreturn torch.cat(parts, 0) if len(parts) else x")
    assert text is not None and "collect(parts, g(t), body_1)" in text


@pytest.mark.parametrize("use", ["parts[0]", "len(parts)", "sum(parts)", "torch.stack(parts)", "torch.cat(parts[1:])"])
def test_a_list_that_is_used_otherwise_is_no_such_list(use: str) -> None:
    text = rewritten(f"parts = []\n{GUARD}    parts.append(g(t))\ny = torch.cat(parts)\nreturn {use}")
    assert text is not None and "written(parts, body_1).append(g(t))" in text


def test_conditions_between_guards_become_branches() -> None:
    text = rewritten(f"{GUARD}    if e == 1: continue\n    out[t] += 1\n")
    assert text is not None
    assert "if e == 1:\n                pass\n            else:\n                written(out, body_1)[t] += 1" in text
    assert "continue" not in text


def test_counts_get_a_known_size() -> None:
    text = rewritten("n = torch.bincount(index.view(-1), minlength=self.E).tolist()")
    assert text is not None
    assert "count(index.view(-1), minlength=self.E).tolist()" in text


@pytest.mark.parametrize(
    "body",
    [
        "for e in range(4):\n    if x.numel() == 0:\n        continue\n    f(e)",  # the same for every expert
        "for e in range(4):\n    t = f(e)\n    if t.numel() > 0.5:\n        out[t] = 1",
        "for e in range(4):\n    t = f(e)\n    if e > 1:\n        out[t] = 1",
        "for e in range(4):\n    t = f(e)\n    if t.numel() == 0:\n        break",
        "for e in other.nonzero():\n    f(mask[e])",  # nothing says what was hit
        "hit = (mask.sum(0) > 0).nonzero()\nn = len(hit)\nfor e in hit:\n    f(mask[e])",  # read elsewhere
        "n = torch.bincount(index)",
        "for e in range(4):\n    t = f(e)\n    if t.numel() == 0:\n        continue\n    g(t)\nelse:\n    h()",
    ],
)
def test_other_loops_stay_as_written(body: str) -> None:
    assert rewritten(body) is None


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("break", "a body that is skipped holds a break"),
        ("return out", "a body that is skipped holds a return"),
        ("if e: return out", "a body that is skipped holds a return"),
        ("raise ValueError", "a body that is skipped holds a raise"),
        ("assert t.numel() > 2", "a body that is skipped holds an assert"),
        ("try: y = g(t)\n    except RuntimeError: pass", "a body that is skipped holds a try"),
        ("while t.any(): t = g(t)", "a body that is skipped holds a while"),
        ("del x", "a body that is skipped holds a del"),
        ("global n", "a body that is skipped holds a global"),
        ("import math", "a body that is skipped holds an import"),
        ("log(e)", "`log(e)` is called for what it does, in a body that is skipped"),
        ("self.experts[e](x)", "`self.experts[e](x)` is called for what it does, in a body that is skipped"),
        ("self.experts[e].count = 1", "`self.experts[e].count` is written, in a body that is skipped"),
        ("last = e\n    out[t] = 1", "last is read after a body that is skipped, and was not bound before"),
    ],
)
def test_a_body_that_does_something_else_stays_as_written(statement: str, reason: str) -> None:
    text, left = rewrite(f"{GUARD}    {statement}\nreturn out, last")
    assert text is None
    assert [one.reason for one in left] == [reason]
    assert left[0].where.startswith("layer.py:") and int(left[0].where.partition(":")[2]) > 3


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
    text = rewritten(
        "counts = ids.cpu().numpy()\nouts = []" + OFFSETS.replace("\n    ", "\n") + "return torch.cat(outs)"
    )
    assert text is not None
    assert "self.experts[e](part(x, counts, e, 'layer.py:9'))" in text
    assert "counts = ids.cpu().tolist()" in text
    assert "body(counts[e], '==', 0, True, 'layer.py:7')" in text
    assert "continue" not in text and "end = " not in text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("start = 0", "start = 1"),
        ("start = end", "start = end + 1"),
        ("x[start:end]", "x[start:end] + y[end]"),
        ("x[start:end]", "x[0:end]"),
        ("if num == 0", "if num == 1"),
        ("if num == 0", "if e == 0"),
        ("        start = end\n", "        start = end\n    out = out[start:]\n"),  # read behind the loop
    ],
)
def test_offsets_used_in_another_way_stay_as_written(old: str, new: str) -> None:
    loop = OFFSETS.replace("\n    ", "\n")
    edit = (old, new)
    if "\n" in old:
        edit = (old.replace("    ", "", 1), new.replace("\n    ", "\n").replace("    ", "", 1))
    assert edit[0] in loop
    text = rewritten(loop.replace(*edit))
    assert text is None or "part(" not in text


def test_a_guard_by_counts_stays_with_the_counts() -> None:
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
    assert "body(counts[e], '==', 0, True, 'layer.py:4')" in text


def test_a_loop_over_the_named_experts_runs_all_that_are_named() -> None:
    text = rewritten(
        """
        for e in index.unique():
            t, k = torch.where(index == e)
            out[t] += self.scale[0] * self.experts[e](x[t]) * self.share[int(e)] * self.power.item()
        """
    )
    assert text is not None
    assert "self.experts[e](x[t]) * self.share[e] * self.power.item()" in text
    assert "ids_2 = index\n    for e in every_index(self.experts, ids_2, 'layer.py:2')" in text
    assert "body((ids_2 == e).any(), 'true', 0, False, 'layer.py:2')" in text


@pytest.mark.parametrize("context", ["torch.no_grad()", "self.contexts[e]", "(lambda: self.context)()"])
def test_a_guarded_body_may_stand_in_any_context(context: str) -> None:
    loop = "for e in range(4):\n    t, k = torch.where(index == e)\n    if t.numel() == 0: continue\n"
    text = rewritten(f"{loop}    with {context}:\n        out[t] += f(x[t])")
    assert text is not None and f"with {context}:" in text


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
    assert "e = hit" in text and "torch.where(mask[e].squeeze(0))" in text
    assert "exists" not in text.replace("import", "")


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
    assert "ends = count(flat, minlength=self.E).tolist()" in text
    assert "own = part(token, ends, e, 'layer.py:7')" in text
    assert "body(ends[e], '==', 0, True, 'layer.py:5')" in text
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
        "    elif self.training:\n        out = out + 0.0 * self.experts[e].up.sum()",
    ],
)
def test_a_branch_that_adds_zeros_for_experts_without_rows_goes(otherwise: str) -> None:
    text = rewritten(GUARDED + otherwise)
    assert text is not None
    assert "0 *" not in text and "0.0 *" not in text and "body(m.any(), 'true', 0, False" in text


EFFECTS = (
    "out = out + 0 * F.dropout(x, 0.5)",
    "out = out + 0 * torch.rand(1)",
    "out = out + 0 * self.probe(x)",
    "out += 0.0 * self.experts[e](x[:1]).sum()",
    "out[draw()] += 0 * x[0]",
    "out += 0 * sum(p.sum() for p in self.take(e))",
)


@pytest.mark.parametrize(
    "otherwise", ["out[0, 0] += 1e-3 * self.bias[e]", "out = 0 * x", "out[0] -= 0 * x[0]", "log(e)", *EFFECTS]
)
def test_a_branch_that_does_something_else_stays(otherwise: str) -> None:
    text = rewritten(f"{GUARDED}    else:\n        {otherwise}")
    assert text is None or "else:" in text
