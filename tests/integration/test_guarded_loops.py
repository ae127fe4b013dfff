"""Loops that skip experts without rows: which effects of a skipped body are exact, and which are refused.

Each layer trains for four steps, and so does an unmodified copy of it, with experts that come to have no rows. What is compared is
all that a step may change: outputs, gradients, parameters, buffers, attributes of modules and random state.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from memfine_fx.compiler import pipeline
from memfine_fx.passes.ops import target_name
from memfine_fx.passes.read.no_rows import GraphIndex
from tests.properties.life import NUM_TOKENS, Outcome, compare
from tests.properties.written import EXPERTS, WrittenLayer, load, module_source

pytestmark = pytest.mark.usefixtures("float64_by_default")
EMPTY = "t.numel() == 0"
ROWS = "out.index_add_(0, t, self.ex[e](x[t]) * w[t, c, None])"
SEVERAL = (6, 4, 3, 2)
"""Tokens of the steps where one token alone, whose graph is compiled by itself, tests no other proof."""
_numbers = itertools.count()


def outcome(
    folder: Path,
    body: Sequence[str] = (ROWS,),
    *,
    guard: str = EMPTY,
    start: Sequence[str] = (),
    end: Sequence[str] = (),
    init: Sequence[str] = (),
    select: Sequence[str] = ("t, c = torch.where(i == e)",),
    header: str = "for e in range(self.num):",
    route: Sequence[str] = ("w, i = logits.softmax(-1).topk(2, dim=-1)",),
    expert: str = "mlp",
    num_tokens: Sequence[int] = SEVERAL,
) -> Outcome:
    """Train a layer with one loop over experts; `guard` skips an expert, "" skips none."""
    skipping = [f"if {guard}: continue"] if guard else []
    inner = [*select, *skipping, *body]
    lines = [
        *route,
        "out = torch.zeros_like(x)",
        *start,
        header,
        *("    " + line for line in inner),
        *end,
        "return out",
    ]
    name = f"Loop{next(_numbers)}"
    layer = WrittenLayer(name, module_source(name, 4, EXPERTS[expert], init, lines), {})
    torch.manual_seed(0)
    return compare(load(layer, folder)(), seed=3, num_tokens=num_tokens)


@pytest.mark.parametrize(
    ("guard", "refusal"),
    [
        (EMPTY, ""),
        ("t.shape[0] == 0", ""),
        ("not len(t)", ""),
        ("t.numel() < 1", ""),
        ("0 == t.size(0)", ""),
        ("x[t].numel() == 0", ""),
        ("not (i == e).any()", ""),
        ("(i == e).sum().item() == 0", ""),
        ("(i == e).long().sum() < 1", ""),
        ("not (i == e).long().bool().any()", ""),
        ("not t.any()", "needs"),
        ("t.sum() == 0", "index_add_ writes into out"),
        ("not c.any()", "index_add_ writes into out"),
        ("not w[t, c].any()", "index_add_ writes into out"),
        ("w[t, c].sum() <= 0", "its condition does not ask whether an expert has rows"),
        ("not x[t].any()", "index_add_ writes into out"),
        ("t.numel() < 2", "its condition does not ask whether an expert has rows"),
        ("not (i > e).any()", "index_add_ writes into out"),
        ("not (i != e).any()", "index_add_ writes into out"),
        ("not (i[:, 0] == e).any()", "index_add_ writes into out"),
        ("(w[t, c] * 0.5).long().sum() == 0", ""),
    ],
)
def test_a_condition_must_be_proved_to_ask_for_rows(guard: str, refusal: str, tmp_path: Path) -> None:
    result = outcome(tmp_path, guard=guard)
    assert result.verdict == "exact", result
    if refusal == "":
        assert result.num_chunked == 1 or "(w[t" in guard, result
    else:
        assert result.num_chunked == 0 and "in a body that is skipped" in result.details, result


AGAIN = ("t, c = torch.where(i == e)", ROWS)
FLAT = ("flat = i.reshape(-1)", "xs = x.repeat_interleave(2, 0)", "y = torch.zeros_like(xs)")
FLAT_END = ("out = (y.view(-1, 2, H) * w[..., None]).sum(1)",)
ONE_HOT = "counts = F.one_hot(i, self.num)"
ZEROS = "0 * sum(p.sum() for p in self.ex[e].parameters())"

ASKED: dict[str, dict[str, Any]] = {
    "any, and the mask again": {"guard": "not (i == e).any()", "body": AGAIN},
    "another spelling of the mask": {"guard": "not i.eq(e).any()", "body": AGAIN},
    "a function": {"guard": "not torch.any(torch.eq(i, e))", "body": AGAIN},
    "membership": {"guard": "e not in i", "body": AGAIN},
    "tokens": {"guard": "not (i == e).any(-1).any()", "body": AGAIN},
    "a number": {"select": ("n = (i == e).sum().item()",), "guard": "n == 0", "body": AGAIN},
    "counts by one_hot": {"start": (f"{ONE_HOT}.sum((0, 1))",), "guard": "counts[e] == 0", "body": AGAIN},
    "counts, one dimension after the other": {
        "start": (f"{ONE_HOT}.sum(1).sum(0) > 0",), "guard": "not counts[e]", "body": AGAIN,
    },
    "counts of a permuted mask": {
        "start": (f"{ONE_HOT}.permute(2, 1, 0).sum(dim=(1, 2))",), "guard": "counts[e].item() == 0", "body": AGAIN,
    },
    "a column of members": {
        "start": ("m = F.one_hot(i, self.num).sum(1)", "counts = m.sum(0)"), "guard": "counts[e] == 0",
        "body": ("t = m[:, e].bool().nonzero().squeeze(-1)", "out[t] += self.ex[e](x[t]) * (w * (i == e)).sum(-1)[t, None]"),
    },
    "the number of an expert's results": {
        "select": ("t, c = torch.where(i == e)", "o = self.ex[e](x[t])"), "guard": "o.numel() == 0",
        "body": ("out.index_add_(0, t, o * w[t, c, None])",),
    },
    "the length of an expert's results": {
        "start": FLAT, "select": ("o = self.ex[e](xs[flat == e])",), "guard": "o.shape[0] <= 0",
        "body": ("y[flat == e] = o",), "end": FLAT_END,
    },
    "zeros that are added to an expert's results": {
        "start": FLAT, "select": ("o = self.ex[e](xs[flat == e])",), "guard": "",
        "body": ("if o.shape[0] > 0: y[flat == e] = o.to(y.dtype)", f"else: y[flat == e] = o.to(y.dtype) + {ZEROS}"),
        "end": FLAT_END,
    },
}  # fmt: skip
ASKED_OTHERWISE: dict[str, dict[str, Any]] = {
    "members of the first choice": {"guard": "e not in i[:, 0]", "body": AGAIN},
    "members of a list": {"start": ("hit = [1, 2]",), "guard": "e not in hit", "body": AGAIN},
    "counts of the first choice": {"start": ("counts = F.one_hot(i[:, :1], self.num).sum((0, 1))",), "guard": "counts[e] == 0", "body": AGAIN},
    "counts of choices": {"start": (f"{ONE_HOT[:-1]} + 3).sum((0, 2))",), "guard": "counts[min(e, 1)] == 0", "body": AGAIN},
    "counts of two signs": {
        "start": (f"{ONE_HOT} - F.one_hot((i + 1) % self.num, self.num)", "counts = counts.sum((0, 1))"),
        "guard": "counts[e] == 0", "body": AGAIN,
    },
    "a size that may be one": {
        "select": ("t, c = torch.where(i == e)", "o = self.ex[e](x[t])"), "guard": "o.numel() <= 8",
        "body": ("out.index_add_(0, t, o * w[t, c, None])",),
    },
    "other entries without rows": {
        "start": FLAT, "select": ("o = self.ex[e](xs[flat == e])",), "guard": "",
        "body": ("if o.shape[0] > 1: y[flat == e] = o", "else: y[flat != e] += 0.1"), "end": FLAT_END,
    },
    "no zeros that are added": {
        "start": FLAT, "select": ("o = self.ex[e](xs[flat == e])",), "guard": "",
        "body": ("if o.shape[0] > 1: y[flat == e] = o", f"else: y[flat == e] = o + 1{ZEROS[1:]}"), "end": FLAT_END,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_a_condition_that_asks_for_rows_in_other_words_is_proved(name: str, tmp_path: Path) -> None:
    result = outcome(tmp_path, **ASKED[name])
    assert result.verdict == "exact" and result.num_chunked == 1, result


@pytest.mark.parametrize("name", ASKED_OTHERWISE)
def test_a_condition_that_asks_for_something_else_is_not(name: str, tmp_path: Path) -> None:
    result = outcome(tmp_path, **ASKED_OTHERWISE[name])
    assert result.verdict == "exact" and result.num_chunked == 0, result


WEIGHTS = "w[t, c, None]"
AUX = {"start": ["aux = x.new_zeros(())"], "end": ["out = out + aux"]}
COUNT = {"init": ["self.register_buffer('count', torch.ones(self.num))"]}

EXACT: dict[str, dict[str, Sequence[str]]] = {
    "a loss over an expert's weights": AUX | {"body": [ROWS, f"aux = aux + {WEIGHTS}.sum()"]},
    "a mean over an expert's weights": AUX | {"body": [ROWS, f"aux = aux + {WEIGHTS}.mean()"]},
    "a mean in front of the rows": AUX | {"body": [f"aux = aux + 0.1 * {WEIGHTS}.mean()", ROWS]},
    "a loss over an expert's rows": AUX | {"body": [ROWS, "aux = aux + x[t].pow(2).sum() / x.shape[0]"]},
    "a share of rows times a mean score": AUX
    | {"body": [ROWS, "aux = aux + t.numel() * logits.softmax(-1)[:, e].mean()"]},
    "a regularizer of experts that were hit": AUX | {"body": [ROWS, "aux = aux + self.penalty[e].pow(2)"]},
    "a loss that is an attribute": {
        "init": ["self.aux = 0.0"],
        "start": ["self.aux = x.new_zeros(())"],
        "body": [ROWS, f"self.aux = self.aux + {WEIGHTS}.mean()"],
        "end": ["out = out + self.aux"],
    },
    "a loss for each expert": {
        "start": ["aux = x.new_ones(self.num)"],
        "body": [ROWS, f"aux[e] = {WEIGHTS}.mean()"],
        "end": ["out = out + aux.mean()"],
    },
    "a product that is carried on": {
        "start": ["scale = x.new_ones(())"],
        "body": [ROWS, f"scale = scale * {WEIGHTS}.sum()"],
        "end": ["out = out * scale"],
    },
    "rows that are carried on": {
        "start": ["last = x.new_ones(())"],
        "body": [ROWS, f"last = {WEIGHTS}.sum()"],
        "end": ["out = out * last"],
    },
    "rows counted in place": COUNT | {"body": [ROWS, "self.count[e] += t.numel()"]},
    "rows counted by a call": COUNT | {"body": [ROWS, "self.count[e].add_(t.shape[0])"]},
    "rows counted in all": COUNT | {"body": [ROWS, "self.count += len(t)"]},
    "a count that is set": COUNT | {"body": [ROWS, "self.count[e] = t.numel()"]},
    "a moving average of counts": COUNT | {"body": [ROWS, "self.count[e] = 0.9 * self.count[e] + 0.1 * t.numel()"]},
    "rows written into another tensor": {
        "start": ["side = torch.zeros(x.shape[0], self.num)"],
        "body": [ROWS, "side[t, e] = 1.0"],
        "end": ["out = out + side.sum(-1, keepdim=True)"],
    },
    "rows that are concatenated": {
        "start": ["rows, places = [], []"],
        "body": [f"rows.append(self.ex[e](x[t]) * {WEIGHTS})", "places.append(t)"],
        "end": ["out = out.index_add(0, torch.cat(places), torch.cat(rows))"],
    },
    "a number of rows that is added up": {
        "start": ["n = 0"],
        "body": [ROWS, "n += t.numel()"],
        "end": ["out = out + n"],
    },
    "a sum by name": {"body": [f"out = out.index_add(0, t, self.ex[e](x[t]) * {WEIGHTS})"]},
    "a condition on the mode": {"body": ["y = x[t]", "if self.training: y = y * 2", ROWS.replace("x[t]", "y")]},
    "a second condition": {"body": ["if t.numel() == 0: continue", ROWS]},
    "an expert that counts its rows": {"expert": "counting rows"},
    "an expert with dropout that is off": {"expert": "no dropout"},
    "an expert with weight norm": {"expert": "weight norm"},
}
REFUSED: dict[str, tuple[dict[str, Sequence[str]], str]] = {
    "calls counted": (COUNT | {"body": [ROWS, "self.count[e] += 1"]}, "iadd writes into"),
    "a decay": (COUNT | {"body": [ROWS, "self.count.mul_(0.9)"]}, "mul_ writes into"),
    "a weight for every token": ({"body": [ROWS, "out += self.penalty[e]"]}, "iadd writes into out"),
    "the first token": ({"body": [ROWS, "out[0] += 0.1"]}, "writes into"),
    "the first of its tokens": ({"body": [ROWS, "out[t[0]] += 0.1"]}, "a loop is not captured as a whole"),
    "a mean written in place": (AUX | {"body": [ROWS, f"aux += {WEIGHTS}.mean()"]}, "iadd writes into aux"),
    "a maximum": (AUX | {"body": [ROWS, f"aux = torch.maximum(aux, {WEIGHTS}.max())"]}, "needs a row"),
    "a mean that weighs": (AUX | {"body": [ROWS, f"aux = aux + {WEIGHTS}.mean() * self.penalty[e]"]}, "mul of a mean"),
    "a spread": (AUX | {"body": [ROWS, f"aux = aux + {WEIGHTS}.std()"]}, "std needs a row"),
    "a norm": (AUX | {"body": [ROWS, "aux = aux + self.penalty.norm()"]}, "norm may not be defined without rows"),
    "one by the number of rows": (AUX | {"body": [ROWS, "aux = aux + self.penalty[e] / t.numel()"]}, "of a number of rows"),
    "a condition on the expert's number": ({"body": ["if e == 1: continue", ROWS]}, ""),
    "a list of experts": (
        {"start": ["used = []"], "body": [ROWS, "used.append(e)"], "end": ["out = out * len(used)"]},
        "something that is no tensor is written to",
    ),
    "a dictionary": (
        {"start": ["used = {}"], "body": [ROWS, "used[e] = 1"], "end": ["out = out * len(used)"]},
        "something that is no tensor is written to",
    ),
    "a list of losses": (
        {"start": ["parts = []"], "body": [ROWS, f"parts.append({WEIGHTS}.sum())"], "end": ["out = out + sum(parts)"]},
        "something that is no tensor is written to",
    ),
    "a list of all tokens": (
        {"start": ["parts = []"], "body": [ROWS, "parts.append(x)"], "end": ["out = out + torch.cat(parts).sum()"]},
        "a list grows by other than an expert's rows",
    ),
    "a list in an attribute": ({"init": ["self.used = []"], "body": [ROWS, "self.used.append(e)"]}, "no tensor"),
    "a local counter": ({"start": ["n = 0"], "body": [ROWS, "n += 1"], "end": ["out = out * n"]}, "a number changes"),
    "the last expert": ({"start": ["n = 0"], "body": [ROWS, "n = e"], "end": ["out = out * n"]}, "a number changes"),
    "a flag": (
        {"start": ["first = True"], "body": [ROWS, "first = False"], "end": ["out = out * (2.0 if first else 1.0)"]},
        "a value that is no tensor, and that is read again later, changes",
    ),
    "a name of its own": ({"body": [ROWS, "last = e"], "end": ["out = out + last"]}, "last is read after"),
    "an attribute that counts": ({"init": ["self.calls = 0"], "body": [ROWS, "self.calls += 1"]}, "changes"),
    "a closure": (
        {"start": ["total = [0.0]", "def note(v):", "    total[0] += v", "    return v"], "body": [ROWS, "n = note(1.0)"], "end": ["out = out * total[0]"]},
        "an attribute, a list or another Python object changes",
    ),
    "a call": ({"body": [ROWS, "log(e)"]}, "`log(e)` is called for what it does"),
    "a number of Python's": ({"body": [ROWS, "n = random.random()"]}, "a loop is not captured as a whole"),
    "random numbers of torch's": ({"body": [ROWS, "torch.rand(1)"]}, "rand draws random numbers"),
    "noise": ({"body": [ROWS.replace("x[t]", "x[t] + torch.randn(t.numel(), H)")]}, "randn draws random numbers"),
    "an early end": ({"body": [ROWS, "if e == 1: break"]}, "holds a break"),
    "an assertion": ({"body": ["assert t.numel() > 0", ROWS]}, "holds an assert"),
    "a try": ({"body": ["try: y = x[t]", "except RuntimeError: pass", ROWS]}, "holds a try"),
    "an expert that counts its calls": ({"expert": "counting"}, "writes into"),
    "an expert with an attribute that counts": ({"expert": "calls"}, "changes"),
    "an expert that cools down": ({"expert": "tempered"}, "changes"),
    "an expert that averages": ({"expert": "averaging"}, "writes into"),
    "an expert with noisy weights": ({"expert": "noisy"}, "draws random numbers"),
    "an expert with dropout": ({"expert": "dropout"}, "draws random numbers"),
    "an expert with batch norm": ({"expert": "batch norm"}, ""),
    "an expert with spectral norm": ({"expert": "spectral"}, ""),
    "an expert with a hook that counts": ({"expert": "hooked"}, "writes into"),
    "an expert that remembers": ({"expert": "remembering"}, "changes"),
    "an expert that lists": ({"expert": "listing"}, "changes"),
    "an expert that notes": ({"expert": "named"}, "changes"),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_an_effect_that_can_be_preserved_is_preserved(name: str, tmp_path: Path) -> None:
    result = outcome(tmp_path, num_tokens=NUM_TOKENS, **EXACT[name])  # type: ignore[arg-type]  # lists of lines, and a name
    assert result.verdict == "exact" and result.num_chunked == 1, result


@pytest.mark.parametrize("name", REFUSED)
def test_an_effect_that_cannot_be_preserved_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    fields, reason = REFUSED[name]
    result = outcome(tmp_path, **fields)  # type: ignore[arg-type]  # lists of lines, and an expert's name
    assert result.num_chunked == 0 and reason in result.details, result
    assert result.verdict in ("exact", "both raise"), result


def test_a_number_that_a_guard_alone_reads_is_not_read_from_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[fx.Graph] = []
    compile_graph = pipeline.compile_graph

    def noted(module: fx.GraphModule, *args: Any) -> Any:
        compiled = compile_graph(module, *args)
        graphs.append(module.graph)
        return compiled

    monkeypatch.setattr(pipeline, "compile_graph", noted)
    counts = "counts = torch.bincount(i.flatten(), minlength=self.num).tolist()"
    result = outcome(tmp_path, guard="counts[e] == 0", start=(counts,))
    assert result.verdict == "exact" and result.num_chunked == 1 and graphs
    assert not [node for graph in graphs for node in graph.nodes if target_name(node) in ("item", "bincount")]


@pytest.mark.parametrize(
    ("mask", "guard"),
    [("(i == e).long() - (i == e + 1).long()", "m.sum() == 0"), ("(i == e).double() * 0.5", "m.long().sum() == 0")],
)
def test_places_are_not_none_because_a_sum_is_zero(mask: str, guard: str, tmp_path: Path) -> None:
    result = outcome(tmp_path, guard=guard, select=(f"m = {mask}", "t, c = torch.where(m)"))
    assert result.verdict == "exact" and "in a body that is skipped" in result.details, result


def test_a_mask_of_choices_that_all_tokens_share_says_nothing_of_an_expert_without_it(tmp_path: Path) -> None:
    start = ("m = F.one_hot(i, self.num).permute(2, 1, 0)", "hit = m.amin((1, 2))")
    result = outcome(tmp_path, guard="hit[e] == 0", start=start, select=("c, t = torch.where(m[e])",))
    assert result.verdict == "exact" and "in a body that is skipped" in result.details, result


MASKED = "out = out + self.ex[e](x) * (w * m).sum(-1, keepdim=True)"
IN_A_BODY = "in a body that is skipped"

UNPROVED: dict[str, tuple[dict[str, Sequence[str]], str]] = {
    "an entropy": (AUX | {"body": [MASKED, "p = (w * m).sum()", "aux = aux - p * p.log()"]}, "log of a number"),
    "a root": (AUX | {"body": [MASKED, "aux = aux + (w * m).sum().sqrt()"]}, "sqrt of a number"),
    "a root as a power": (AUX | {"body": [MASKED, "aux = aux + (w * m).sum() ** 0.5"]}, "pow of a number"),
    "a normalized sum": (
        AUX | {"body": [MASKED, "aux = aux + (w * m).pow(2).sum() / (w * m).sum()"]},
        "div of a number",
    ),
    "a quotient of one sum": (
        AUX | {"body": [MASKED, "p = (w * m).sum()", "aux = aux + p / p"]},
        "div of a number",
    ),
    "the next expert": (
        {"start": ["it = iter(self.ex)"], "body": ["ex = next(it)", MASKED.replace("self.ex[e]", "ex")]},
        "an iterator is made",
    ),
    "the next of an attribute": (
        {"init": ["self.it = iter(self.ex)"], "body": [MASKED, "n = next(self.it)"]},
        "an iterator is advanced in a body",
    ),
    "the rest of an iterator": (
        {"start": ["it = zip(self.ex, range(self.num))"], "body": [MASKED, "ex = list(it)"]},
        "it, an iterator, is read in a body",
    ),
    "a generator's items": (
        {"start": ["it = self.parameters"], "body": [MASKED, "n = [p.sum() for p in it]"]},
        "it may be an iterator",
    ),
    "an iterator in a closure": (
        {
            "start": ["box = [iter(self.ex)]", "def take():", "    for one in box[0]: return one"],
            "body": ["ex = take()", MASKED.replace("self.ex[e]", "ex")],
        },
        "an iterator is made",
    ),
    "a module by name": (
        {"start": ["head = self.second"], "body": [MASKED, "head = self.ex[e]"], "end": ["out = out + head(x).sum()"]},
        "a value that is no tensor, and that is read again later, changes",
    ),
    "a list of tensors written": (COUNT | {"body": [MASKED, "torch._foreach_add_([self.count], 1.0)"]}, IN_A_BODY),
    "random numbers that a tag tells of": (
        {"body": [MASKED, "torch.binomial(torch.full((2,), 9.0), torch.full((2,), 0.5))"]},
        "binomial draws random numbers",
    ),
    "entries of an earlier time": (
        COUNT
        | {
            "start": ["saved = [self.count[[k]] for k in range(4)]", "self.count.add_(1)"],
            "body": [MASKED, "self.count[[e]] = saved[e]"],
        },
        "writes into",
    ),
    "truths as values": (
        {
            "start": ["hit = torch.ones(self.num, x.shape[0], dtype=torch.bool)"],
            "body": [MASKED, "hit.index_copy_(0, torch.tensor([e]), m.any(-1)[None])"],
            "end": ["out = out * hit.sum()"],
        },
        "index_copy_ writes into hit",
    ),
}


@pytest.mark.parametrize("name", UNPROVED)
def test_what_is_not_proved_is_refused(name: str, tmp_path: Path) -> None:
    fields, reason = UNPROVED[name]
    options: dict[str, Any] = {"select": ("m = i == e",), "guard": "not m.any()"} | fields
    result = outcome(tmp_path, **options)
    assert result.num_chunked == 0 and reason in result.details, result
    assert result.verdict in ("exact", "both raise"), result


KEPT: dict[str, dict[str, Sequence[str]]] = {
    "another view of a tensor": {
        "start": ["last = logits[:, 0]"],
        "body": [MASKED, "last = logits[:, e]"],
        "end": ["out = out * last[:, None]"],
    },
    "a difference as a condition": {
        "body": [
            MASKED,
            "d = torch.add((i == e).long(), (i == (e + 1) % 4).long(), alpha=-1)",
            "if d.sum() != 0: out = out + d.sum(-1, keepdim=True)",
        ]
    },
}


@pytest.mark.parametrize("name", KEPT)
def test_a_name_keeps_its_old_value_without_rows(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"select": ("m = i == e",), "guard": "not m.any()"} | KEPT[name]
    result = outcome(tmp_path, **options)
    assert result.verdict == "exact", result


def test_the_same_comparison_before_and_after_a_write_is_another() -> None:
    graph = fx.Graph()
    ids = graph.placeholder("ids")
    ids.meta["example_value"] = tensor = torch.zeros(3, 2, dtype=torch.long)
    before = graph.call_function(operator.eq, (ids, 1))
    again = graph.call_function(operator.eq, (ids, 1))
    for node in (before, again):
        node.meta["example_value"] = tensor == 1
    unwritten = GraphIndex(graph)
    assert unwritten.key(before) == unwritten.key(again)
    with graph.inserting_before(again):
        graph.call_function(operator.setitem, (ids, 0, 1))
    index = GraphIndex(graph)
    assert index.key(before) != index.key(again)


def test_the_last_of_the_experts_with_rows_is_not_the_last_of_all(tmp_path: Path) -> None:
    result = outcome(tmp_path, guard="", header="for e in i.unique().tolist():", end=("out = out * (e + 1)",))
    assert result.verdict == "exact" and result.num_chunked == 0, result


@pytest.mark.parametrize(("ids", "is_proved"), [("i.reshape(-1)", True), ("i.reshape(-1) + 1", False), ("i % 3", True)])
def test_only_ids_that_surely_exist_are_counted_with_a_result_of_known_size(
    ids: str, is_proved: bool, tmp_path: Path
) -> None:
    start = (f"load = torch.bincount(({ids}).flatten(), minlength=self.num)", "out = out + load.sum()")
    result = outcome(tmp_path, start=start)
    assert result.verdict == "exact", result
    assert ("ids are counted that may be too large" in result.details) is not is_proved, result
