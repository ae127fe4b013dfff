"""Ordinary edits of layers that are chunked: each is chunked and exact, or refused, at the line that is in the way."""

from __future__ import annotations

import ast
import copy
import importlib.util
import random
import re
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import memfine_fx
from tests.integration.comparison import FP32_TOLERANCE, relative_error

TOKENS, EDITS_PER_LAYER = 13, 25

HEADER = """
import torch
from torch import nn
from torch.nn import functional as F

H, FF, E, K = 8, 6, 4, 2


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(H, FF), nn.Linear(FF, H)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.up = nn.Parameter(torch.randn(E, H, FF) / 3)
        self.down = nn.Parameter(torch.randn(E, FF, H) / 3)
        self.experts = nn.ModuleList(Expert() for _ in range(E))
        self.last = self.mean = None

    def forward(self, x):
        logits = self.router(x)
        scores = logits.softmax(-1)
        w, i = torch.topk(scores, K)
"""

LAYERS = {
    "gathered": """
        rows = i.flatten()
        tokens = x.repeat_interleave(K, 0)
        h = tokens.unsqueeze(1) @ self.up[rows]
        h = F.silu(h)
        y = h @ self.down[rows]
        y = y.view(-1, K, H)
        y = y * w.unsqueeze(-1)
        out = y.sum(1)
        return out
    """,
    "looped over tables": """
        out = torch.zeros_like(x)
        for e in range(E):
            t, c = torch.where(i == e)
            h = x[t] @ self.up[e]
            h = F.silu(h)
            y = h @ self.down[e]
            y = y * w[t, c, None]
            out.index_add_(0, t, y)
        return out
    """,
    "looped over a list": """
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, c = torch.where(i == e)
            h = x[t]
            y = expert(h)
            y = y * w[t, c, None]
            out.index_add_(0, t, y)
        return out
    """,
    "guarded": """
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, c = torch.where(i == e)
            if t.numel() == 0:
                continue
            h = x[t]
            y = expert(h)
            y = y * w[t, c, None]
            out.index_add_(0, t, y)
        return out
    """,
    "masks": """
        out = torch.zeros_like(x)
        for c in range(K):
            for e, expert in enumerate(self.experts):
                mask = i[:, c] == e
                h = x[mask]
                y = expert(h)
                out[mask] += w[mask, c, None] * y
        return out
    """,
    "hit experts": """
        out = torch.zeros_like(x)
        chosen = F.one_hot(i, E).permute(2, 1, 0)
        hit = chosen.sum(dim=(-1, -2)).gt(0).nonzero()
        for e in hit:
            e = e[0]
            c, t = torch.where(chosen[e])
            h = x[t] @ self.up[e]
            h = F.silu(h)
            y = h @ self.down[e]
            y = y * w[t, c, None]
            out.index_add_(0, t, y)
        return out
    """,
    "sorted and split": """
        order = i.flatten().argsort(stable=True)
        t = order // K
        counts = torch.bincount(i.flatten(), minlength=E).tolist()
        parts = x[t].split(counts)
        y = torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
        y = y * w.flatten()[order, None]
        out = torch.zeros_like(x).index_add(0, t, y)
        return out
    """,
    "dense": """
        full = torch.zeros_like(scores).scatter(1, i, w)
        h = torch.einsum("th,ehf->tef", x, self.up)
        h = F.silu(h)
        y = torch.einsum("tef,efh->teh", h, self.down)
        y = y * full.unsqueeze(-1)
        out = y.sum(1)
        return out
    """,
    "dense list": """
        full = torch.zeros_like(scores).scatter(1, i, w)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            y = expert(x)
            y = y * full[:, e, None]
            out = out + y
        return out
    """,
    "bmm over experts": """
        full = torch.zeros_like(scores).scatter(1, i, w)
        tokens = x.unsqueeze(0).expand(E, -1, -1)
        h = torch.bmm(tokens, self.up)
        h = F.silu(h)
        y = torch.bmm(h, self.down)
        y = y * full.t().unsqueeze(-1)
        out = y.sum(0)
        return out
    """,
    "unsorted": """
        order = i.flatten().argsort(stable=True)
        tokens = x[order // K]
        counts = torch.bincount(i.flatten(), minlength=E).tolist()
        parts = tokens.split(counts)
        y = torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
        y = y[order.argsort()]
        y = y.view(-1, K, H)
        out = (y * w.unsqueeze(-1)).sum(1)
        return out
    """,
    "added to zeros": """
        out = torch.zeros_like(x)
        for e in range(E):
            t, c = torch.where(i == e)
            h = F.silu(x[t] @ self.up[e])
            y = h @ self.down[e]
            y = y * w[t, c].unsqueeze(1)
            out = out.index_add(0, t, y)
        return out
    """,
}

EDITS = (
    "{0} = {0} * 1.5",
    "{0} = {0} + 0.25",
    "{0} = {0}.clone()",
    "{0} = {0}.contiguous()",
    "{0} = {0}.detach()",
    "{0} = {0}.double().float()",
    "{0} = torch.nan_to_num({0})",
    "{0} = {0}.clamp(-0.5, 0.5)",
    "{0} = {0}.roll(1, 0)",
    "{0} = {0}.flip(0)",
    "{0} = {0} / {0}.norm()",
    "{0} = {0} - {0}.mean(0)",
    "{0} = {0} - {0}.mean(-1, keepdim=True)",
    "{0} = {0}.cumsum(0)",
    "{0} = {0}.sort(0).values",
    "{0} = {0}.tanh()",
    "{0} = torch.where({0} > 0, {0}, 0.1 * {0})",
    "{0} = {0}.transpose(0, -1).transpose(0, -1)",
    "{0} = {0}.reshape({0}.shape)",
    "{0} = F.layer_norm({0}, {0}.shape[-1:])",
    "{0} = F.normalize({0}, dim=-1)",
    "{0} = {0}.unsqueeze(0).squeeze(0)",
    "self.last = {0}.detach()",
    "self.mean = {0}.mean().detach()",
    "{0} = {0}[torch.arange({0}.shape[0])]",
)
"""Of a tensor of numbers that a line has just assigned."""

NUMBERS = {"logits", "scores", "w", "tokens", "h", "y", "full", "out", "parts"}


@dataclass(frozen=True)
class Edited:
    source: str
    line: int
    readers: frozenset[int]
    """Lines that read what was edited, directly."""


def edited(layer: str, draw: random.Random) -> Edited:
    """A layer's module with one edit behind a line, drawn at random, that assigns a tensor of numbers."""
    lines, begin = lines_of(layer)
    assigned = [
        (number, target.id)
        for number, line in enumerate(lines)
        if number > begin
        for target in _targets(line.strip())
        if target.id in NUMBERS and target.id != "parts"
    ]
    number, name = draw.choice(assigned)
    indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
    lines.insert(number + 1, indent + draw.choice(EDITS).format(name))
    source = "\n".join(lines) + "\n"
    readers = {
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) and node.lineno > begin
    }
    return Edited(source, number + 2, frozenset(readers))


def lines_of(layer: str) -> tuple[list[str], int]:
    """The lines of a layer's module, and the number of the one at which its forward begins."""
    lines = (HEADER + textwrap.indent(textwrap.dedent(LAYERS[layer]).strip("\n"), " " * 8) + "\n").splitlines()
    return lines, lines.index("    def forward(self, x):", lines.index("class Layer(nn.Module):"))


def _targets(line: str) -> list[ast.Name]:
    try:
        (statement,) = ast.parse(line).body
    except SyntaxError:
        return []
    if not isinstance(statement, ast.Assign):
        return []
    return [node for node in ast.walk(statement.targets[0]) if isinstance(node, ast.Name)]


def built(source: str, folder: Path, name: str) -> nn.Module:
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    layer: nn.Module = module.Layer()
    return layer


def outcome(edit: Edited, folder: Path, name: str) -> str:
    """Run one edited layer as it is and optimized: "" if all is well, else what is wrong."""
    torch.compiler.reset()
    reference = built(edit.source, folder, name)
    model = copy.deepcopy(reference)
    memfine_fx.optimize(model, inner_backend="eager", config=memfine_fx.Config(gives_up_comparison_with_eager=True))
    inputs = [torch.randn(TOKENS, 8, requires_grad=True) for _ in range(1)]
    results, gradients = [], []
    for each in (reference, model):
        (tokens,) = [value.detach().requires_grad_() for value in inputs]
        try:
            result = each(tokens)
            if result.requires_grad:
                (result * torch.linspace(0.5, 1.5, result.numel()).view_as(result)).sum().backward()
        except Exception as error:
            if each is reference:
                return ""  # the edit is none of a layer that runs
            return f"raises {type(error).__name__}: {error}"
        results.append(result)
        gradients.append([tokens.grad, *(parameter.grad for parameter in each.parameters())])
    if relative_error(results[1], results[0]) > 10 * FP32_TOLERANCE:
        return f"another output, by {relative_error(results[1], results[0]):.1e}"
    for expected, found in zip(*gradients, strict=True):
        zero = torch.zeros(())
        if relative_error(zero if found is None else found, zero if expected is None else expected) > 1e-4:
            return "another gradient"
    report = memfine_fx.report(model)
    refused = [region for region in report.regions if region.status == "refused"]
    if report.num_chunked:
        return ""
    if not refused:
        return "not chunked, without a refusal"
    said = [f"{region.obstacle or region.where.source} {region.reason}" for region in refused]
    lines = {int(line) for line in re.findall(rf"{name}\.py:(\d+)", " ".join(said))}
    if not lines & {edit.line, *edit.readers}:
        return f"refused at {sorted(lines)}, the edit is at {edit.line}: {refused[0].reason}"
    return ""


CAUSES = {
    "rows are picked by no index of the routing": ("looped over tables", "y", "y = y[torch.arange(y.shape[0])]"),
    "a body that is skipped binds an attribute": ("guarded", "y", "self.mean = y.mean().detach()"),
    "the graph returns a view of the output": ("masks", "out", "self.last = out.detach()"),
    "weights are not followed": ("dense list", "full", "full = full.cumsum(0)"),
    "weights may not be zero": ("dense list", "full", "full = torch.where(full > 0, full, 0.1 * full)"),
    "results are not followed": ("dense list", "y", "y = y.flip(0)"),
    "weights lose their zeros": ("dense", "full", "full = full + 0.25"),
    "copies of tokens are not followed": ("bmm over experts", "tokens", "tokens = tokens * (tokens > 0)"),
    "rows come from two tensors": ("bmm over experts", "tokens", "tokens = tokens - tokens.mean(0)"),
    "the graph breaks in a loop": ("looped over a list", "y", "y = y.roll(1, 0)"),
    "the graph breaks in a loop that skips experts": ("guarded", "y", "y = y.roll(1, 0)"),
    "the graph breaks behind the experts": ("unsorted", "y", "y = y.roll(1, 0)"),
    "the graph breaks at a condition": ("unsorted", "y", "y = y * 1.5 if y.sum() > 0 else y"),
}
"""Layer, a name and the edit behind the first line that assigns it."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cause", CAUSES)
def test_a_refusal_names_the_line_in_the_way(cause: str, tmp_path: Path) -> None:
    layer, name, edit = CAUSES[cause]
    lines, begin = lines_of(layer)
    number = next(
        number
        for number, line in enumerate(lines)
        if number > begin and name in [target.id for target in _targets(line.strip())]
    )
    indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
    lines.insert(number + 1, indent + edit)
    said = outcome(Edited("\n".join(lines) + "\n", number + 2, frozenset()), tmp_path, "layer")
    assert not said, said


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layer", LAYERS)
def test_edited_layers_are_exact_or_refused(layer: str, tmp_path: Path) -> None:
    draw = random.Random(layer)
    wrong, others = [], []
    for number in range(EDITS_PER_LAYER):
        edit = edited(layer, draw)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = outcome(edit, tmp_path, f"layer_{number}")
        if said:
            places = others if said.startswith("refused at") else wrong
            places.append(f"{said}\n    {edit.source.splitlines()[edit.line - 1].strip()}")
    assert not wrong, "\n".join(wrong)
    assert not others, "\n".join(others)
