"""MoE layers written as source text: loops with guards and effects, and dense layers with edited routing.

Each layer is a module class of a file of its own, because loops over experts are rewritten from their source. A draw is
named by its kind and a number, so that one that fails can be drawn again alone:

    python -m tests.properties.written loop 17        # prints the source

Legend: T tokens, H hidden, E experts, K top-k, F expert width.
"""

from __future__ import annotations

import importlib.util
import random
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from torch import nn

__all__ = [
    "EXPERTS",
    "KINDS",
    "PRODUCTS",
    "SPELLINGS",
    "Kind",
    "WrittenLayer",
    "load",
    "module_source",
    "written_layer",
]

Kind = Literal["loop", "dense"]
KINDS: tuple[Kind, ...] = get_args(Kind)
HIDDEN = 8


@dataclass(frozen=True)
class WrittenLayer:
    """One layer.

    Args:
        name: of its class and file.
        source: of the file.
        choices: what was drawn, by the name of the choice.
    """

    name: str
    source: str
    choices: dict[str, str]


def written_layer(kind: Kind, number: int) -> WrittenLayer:
    """Draw a layer."""
    draw = random.Random(f"{kind} {number}")
    return {"loop": _loop, "dense": _dense}[kind](f"{kind.capitalize()}{number}", draw)


def load(layer: WrittenLayer, folder: Path) -> type[nn.Module]:
    """Write the layer's file into a folder and import its class."""
    path = folder / f"{layer.name.lower()}.py"
    path.write_text(layer.source)
    spec = importlib.util.spec_from_file_location(f"written_{layer.name.lower()}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    loaded: type[nn.Module] = getattr(module, layer.name)
    return loaded


# Routing.


@dataclass(frozen=True)
class _Routing:
    """Lines that make `w` and `i`, both [T,K], of `logits` [T,E]."""

    lines: Sequence[str]
    init: Sequence[str] = ()


_CHOICES = {
    "softmax": ["w, i = torch.topk(logits.softmax(-1), {k})"],
    "after": ["v, i = logits.topk({k}, dim=-1)", "w = v.softmax(-1)"],
    "sigmoid": ["w, i = logits.sigmoid().topk({k}, dim=-1)", "w = w / w.sum(-1, keepdim=True)"],
    "signed": ["w, i = logits.tanh().topk({k}, dim=-1)"],
    "argmax": ["p = logits.softmax(-1)", "i = p.argmax(-1, keepdim=True)", "w = p.gather(-1, i)"],
    "max": ["w, i = logits.softmax(-1).max(-1, keepdim=True)"],
    "two": [
        "p = logits.softmax(-1)",
        "w, i = torch.cat([p.topk(1)[0], p.topk(2)[0][:, 1:]], -1), torch.cat([p.topk(1)[1], p.topk(2)[1][:, 1:]], -1)",
    ],
    "two_heads": [
        "p, q = logits.softmax(-1), self.second(x).softmax(-1)",
        "w = torch.cat([p.max(-1, keepdim=True)[0], q.max(-1, keepdim=True)[0]], -1)",
        "i = torch.cat([p.argmax(-1, keepdim=True), q.argmax(-1, keepdim=True)], -1)",
    ],
    "stacked": [
        "p, q = logits.softmax(-1), self.second(x).softmax(-1)",
        "w = torch.stack([p.max(-1)[0], q.max(-1)[0]], -1)",
        "i = torch.stack([p.argmax(-1), q.argmax(-1)], -1)",
    ],
    "sorted": ["s = logits.softmax(-1).sort(-1, descending=True)", "w, i = s[0][:, :{k}], s[1][:, :{k}]"],
}
_ID_EDITS = {
    "none": [],
    "halved": ["i = i // 2"],
    "clamped": ["i = i.clamp(max={e} - 2)"],
    "clamped low": ["i = i.clamp(min=1)"],
    "clamped idly": ["i = i.clamp(0, {e} - 1)"],
    "modulo": ["i = i % ({e} - 1)"],
    "rotated": ["i = (i + 1) % {e}"],
    "mirrored": ["i = {e} - 1 - i"],
    "negative": ["i = i - {e}"],
    "some negative": ["i = torch.where(w > 0.3, i, i - {e})"],
    "permuted": ["i = self.permutation[i]"],
    "merged": ["i = self.merging[i]"],
    "gathered": ["i = self.merging.gather(0, i.reshape(-1)).view_as(i)"],
    "flipped": ["i = i.flip(-1)"],
    "rolled": ["i = i.roll(1, -1)"],
    "other tokens": ["i = i.flip(0)"],
    "rolled tokens": ["i = i.roll(1, 0)"],
    "first only": ["i = i[:, :1].expand(-1, {k})"],
    "masked": ["i = i.masked_fill(w < 0.3, 0)"],
    "chosen": ["i = torch.where(w > 0.3, i, torch.zeros_like(i))"],
    "minimum": ["i = torch.minimum(i, torch.full_like(i, {e} - 2))"],
    "xor": ["i = i ^ 1", "i = i.clamp(max={e} - 1)"],
    "doubled": ["i = i * 2 % {e}"],
    "summed": ["i = i.cumsum(-1) % {e}"],
    "sorted": ["i, o = i.sort(-1)", "w = w.gather(-1, o)"],
    "sorted alone": ["i = i.sort(-1)[0]"],
    "cast": ["i = i.to(torch.int32).long()"],
    "rounded": ["i = (i.float() * 0.6).round().long()"],
    "embedded": ["i = F.embedding(i, self.merging[:, None]).squeeze(-1)"],
    "duplicated": ["i = torch.cat([i[:, :1], i[:, :{k} - 1]], -1) if {k} > 1 else i"],
    "repeated": ["i, w = i.repeat(1, 2), w.repeat(1, 2)"],
    "interleaved": ["i, w = i.repeat_interleave(2, -1), w.repeat_interleave(2, -1) / 2"],
    "written": ["i = i.clone()", "i[:, 0] = 1"],
    "written for a token": ["i = i.clone()", "i[0] = 0"],
    "reshaped": ["i = i.t().contiguous().t()"],
    "random": ["i = torch.randint_like(i, {e})"],
    "offset": ["i = i + self.offset"],
    "absolute": ["i = (i - 1).abs()"],
    "remainder of tokens": ["i = (i + torch.arange(i.shape[0])[:, None]) % {e}"],
}
_WEIGHT_EDITS = {
    "none": [],
    "scaled": ["w = w * 1.5"],
    "flipped": ["w = w.flip(-1)"],
    "shared": ["w = w[:, :1].expand(-1, w.shape[1])"],
    "signed": ["w = w - 0.3"],
    "cut": ["w = w * (w > 0.25)"],
    "zeroed": ["w = torch.where(w > 0.25, w, torch.zeros_like(w))"],
    "squared": ["w = w ** 2"],
    "renormed": ["w = w / (w.sum(-1, keepdim=True) + 1e-6)"],
    "detached": ["w = w.detach()"],
    "of other tokens": ["w = w.roll(1, 0)"],
    "dropped": ["w = w * (torch.rand_like(w) > 0.3)"],
    "softmaxed": ["w = w.softmax(-1)"],
    "summed": ["w = w.cumsum(-1)"],
}


def _routing(draw: random.Random, *, edits: float, choices: dict[str, str]) -> tuple[list[str], int, int]:
    """Lines, E and K."""
    num_experts = draw.choice((3, 4, 4, 5))
    choice = draw.choice(sorted(_CHOICES) if draw.random() < edits else ["softmax", "after", "signed", "sigmoid"])
    top_k = {"argmax": 1, "max": 1, "two": 2, "two_heads": 2, "stacked": 2}.get(choice, draw.choice((1, 2, 2, 3)))
    ids = draw.choice(sorted(_ID_EDITS)) if draw.random() < edits else "none"
    weights = draw.choice(sorted(_WEIGHT_EDITS)) if draw.random() < edits else "none"
    choices |= {"router": choice, "ids": ids, "weights": weights, "E": str(num_experts), "K": str(top_k)}
    lines = [*_CHOICES[choice], *_ID_EDITS[ids], *_WEIGHT_EDITS[weights]]
    return [line.format(e=num_experts, k=top_k) for line in lines], num_experts, top_k


# Experts.

EXPERTS = {
    "linear": "nn.Linear(H, H)",
    "plain": "nn.Linear(H, H, bias=False)",
    "mlp": "nn.Sequential(nn.Linear(H, 12), nn.SiLU(), nn.Linear(12, H))",
    "gated": "Gated()",
    "counting": "Counting()",
    "counting rows": "CountingRows()",
    "calls": "Calls()",
    "tempered": "Tempered()",
    "noisy": "Noisy()",
    "averaging": "Averaging()",
    "dropout": "nn.Sequential(nn.Linear(H, 12), nn.Dropout(0.3), nn.Linear(12, H))",
    "no dropout": "nn.Sequential(nn.Linear(H, 12), nn.Dropout(0.0), nn.Linear(12, H))",
    "batch norm": "nn.Sequential(nn.Linear(H, 12), nn.BatchNorm1d(12, eps=0.1), nn.Linear(12, H))",
    "layer norm": "nn.Sequential(nn.Linear(H, 12), nn.LayerNorm(12), nn.Linear(12, H))",
    "spectral": "nn.utils.parametrizations.spectral_norm(nn.Linear(H, H))",
    "weight norm": "nn.utils.parametrizations.weight_norm(nn.Linear(H, H))",
    "hooked": "hooked(nn.Linear(H, H))",
    "remembering": "Remembering()",
    "by length": "ByLength()",
    "listing": "Listing()",
    "named": "Named()",
}
_STATELESS = ("linear", "plain", "mlp", "gated", "layer norm", "weight norm", "no dropout")

_EXPERT_CLASSES = """
class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(H, 12), nn.Linear(H, 12), nn.Linear(12, H)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(H, H)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.up(x)


class CountingRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(H, H)
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.rows += x.shape[0]
        return self.up(x)


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(H, H)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.up(x)


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.tau = nn.Linear(H, H), 1.0

    def forward(self, x):
        self.tau *= 0.9
        return F.silu(self.up(x) / self.tau)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(H, H)

    def forward(self, x):
        return F.linear(x, self.up.weight + 0.1 * torch.randn_like(self.up.weight))


class Averaging(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(H, H)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        y = self.up(x)
        self.mean.mul_(0.9).add_(0.1 * y.detach().sum())
        return y


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(H, H)
        self.last = None

    def forward(self, x):
        self.last = x.shape[0]
        return self.up(x)


class ByLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x):
        return self.up(x) if x.shape[0] > 2 else self.down(x)


class Listing(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.seen = nn.Linear(H, H), []

    def forward(self, x):
        self.seen.append(1)
        return self.up(x) * (1 + 0.01 * len(self.seen))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.notes = nn.Linear(H, H), {}

    def forward(self, x):
        self.notes["calls"] = self.notes.get("calls", 0) + 1
        return self.up(x)


def hooked(module):
    module.register_buffer("calls", torch.zeros(()))
    module.register_forward_pre_hook(count)
    return module


def count(module, args):
    module.calls.add_(1)
"""

# Effects of a guarded body.


@dataclass(frozen=True)
class _Effect:
    """Lines beside the rows: in `__init__`, before the loop, in its body (before and after the rows), and after it."""

    init: Sequence[str] = ()
    start: Sequence[str] = ()
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    end: Sequence[str] = ()


def _loss(line: str, *, start: str = "aux = x.new_zeros(())", end: str = "out = out + aux") -> _Effect:
    return _Effect(start=[start], after=[line], end=[end])


_EFFECTS: dict[str, _Effect] = {
    "none": _Effect(),
    # Losses.
    "mean weight": _loss("aux = aux + W.mean()"),
    "summed weight": _loss("aux = aux + W.sum()"),
    "squared rows": _loss("aux = aux + R.pow(2).sum() / x.shape[0]"),
    "mean rows": _loss("aux = aux + R.mean()"),
    "balance": _loss("aux = aux + N / x.shape[0] * logits.softmax(-1)[:, e].mean()"),
    "share": _loss("aux = aux + N * W.sum()"),
    "regularizer": _loss("aux = aux + self.penalty[e].pow(2)"),
    "regularizer of weights": _loss("aux = aux + 0.1 * self.penalty[e] * W.sum()"),
    "inplace loss": _loss("aux += W.sum()"),
    "inplace mean": _loss("aux += W.mean()"),
    "inplace call": _loss("aux.add_(self.penalty[e])"),
    "loss per row": _loss("aux = aux + W.sum() / N"),
    "constant loss": _loss("aux = aux + 0.1"),
    "logged rows": _loss("aux = aux + torch.log1p(torch.tensor(float(N)))"),
    "hit loss": _loss("hits = hits + 1", start="hits = 0", end="out = out * hits"),
    "largest weight": _loss("aux = torch.maximum(aux, W.sum())"),
    "largest entry": _loss("aux = torch.maximum(aux, W.max())"),
    "scaled aux": _loss("aux = aux * 0.5 + W.sum()", start="aux = x.new_ones(())"),
    "stacked losses": _loss(
        "parts.append(W.sum())", start="parts = []", end="out = out + (torch.stack(parts).mean() if parts else 0)"
    ),
    "listed losses": _loss("parts.append(W.sum())", start="parts = []", end="out = out + sum(parts) / max(len(parts), 1)"),
    "list written": _loss("parts[e] = W.sum()", start="parts = [0.0] * self.num", end="out = out + sum(parts)"),
    "dict of losses": _loss("parts[e] = W.sum()", start="parts = {}", end="out = out + sum(parts.values()) / max(len(parts), 1)"),
    "loss by attribute": _Effect(
        init=["self.aux = 0.0"], start=["self.aux = x.new_zeros(())"], after=["self.aux = self.aux + W.sum()"],
        end=["out = out + self.aux"],
    ),
    "mean by attribute": _Effect(
        init=["self.aux = 0.0"], start=["self.aux = x.new_zeros(())"], after=["self.aux = self.aux + W.mean()"],
        end=["out = out + self.aux"],
    ),
    "loss tensor": _loss("aux[e] = W.sum()", start="aux = x.new_zeros(self.num)", end="out = out + aux.mean()"),
    "loss tensor of ones": _loss("aux[e] = W.sum()", start="aux = x.new_ones(self.num)", end="out = out + aux.mean()"),
    "loss tensor grows": _loss("aux[e] += W.sum()", start="aux = x.new_ones(self.num)", end="out = out + aux.mean()"),
    "loss tensor of means": _loss("aux[e] += W.mean()", start="aux = x.new_ones(self.num)", end="out = out + aux.mean()"),
    # Counters.
    "count rows": _Effect(["self.register_buffer('count', torch.zeros(self.num))"], after=["self.count[e] += N"]),
    "count rows by call": _Effect(
        ["self.register_buffer('count', torch.zeros(self.num))"], after=["self.count[e].add_(N)"]
    ),
    "set rows": _Effect(["self.register_buffer('count', torch.zeros(self.num))"], after=["self.count[e] = N"]),
    "count calls": _Effect(["self.register_buffer('count', torch.zeros(self.num))"], after=["self.count[e] += 1"]),
    "count all rows": _Effect(["self.register_buffer('count', torch.zeros(()))"], after=["self.count += N"]),
    "count all calls": _Effect(["self.register_buffer('count', torch.zeros(()))"], after=["self.count.add_(1)"]),
    "count by attribute": _Effect(["self.calls = 0"], after=["self.calls += 1"]),
    "rows by attribute": _Effect(["self.calls = 0"], after=["self.calls += N"]),
    "moving average": _Effect(
        ["self.register_buffer('ema', torch.ones(self.num))"], after=["self.ema[e] = 0.9 * self.ema[e] + 0.1 * N"]
    ),
    "moving weight": _Effect(
        ["self.register_buffer('ema', torch.ones(self.num))"],
        after=["self.ema[e] = 0.9 * self.ema[e] + 0.1 * W.detach().sum()"],
    ),
    "decay": _Effect(["self.register_buffer('ema', torch.ones(()))"], after=["self.ema.mul_(0.9)"]),
    "local counter": _loss("n += 1", start="n = 0", end="out = out * n"),
    "local rows": _loss("n += N", start="n = 0", end="out = out * (n / x.shape[0])"),
    "local tensor": _loss("n[e] = N", start="n = torch.zeros(self.num)", end="out = out + n.mean()"),
    "local tensor of ones": _loss("n[e] = N", start="n = torch.ones(self.num)", end="out = out + n.mean()"),
    # Containers.
    "used list": _loss("used.append(e)", start="used = []", end="out = out * len(used)"),
    "used set": _loss("used.add(e)", start="used = set()", end="out = out * len(used)"),
    "used dict": _loss("used[e] = N", start="used = {}", end="out = out * len(used)"),
    "used attribute": _Effect(["self.used = []"], after=["self.used.append(e)"]),
    "used attribute dict": _Effect(["self.used = {}"], after=["self.used[int(e)] = 1"]),
    "extended": _loss("used += [e]", start="used = []", end="out = out * len(used)"),
    "results": _loss("used.append(Y.sum())", start="used = []", end="out = out + sum(used)"),
    "printed": _Effect(after=["log(e)"]),
    # Names that outlive an iteration.
    "last expert": _loss("last = e", start="last = 0", end="out = out * (last + 1)"),
    "last weight": _loss("last = W.sum()", start="last = x.new_ones(())", end="out = out * last"),
    "last rows": _loss("last = R", start="last = x[:0]", end="out = out + last.sum()"),
    "carried rows": _Effect(
        start=["state = x.new_zeros(H)"], before=["R = R + state"], after=["state = state + R.sum(0)"]
    ),
    "carried scale": _Effect(start=["scale = 1.0"], before=["R = R * scale"], after=["scale = scale * 0.5"]),
    "first hit": _Effect(
        start=["first = True"], before=["R = R * (2.0 if first else 1.0)"], after=["first = False"]
    ),
    "previous": _Effect(start=["prev = None"], after=["if prev is not None: out = out + 0.01", "prev = e"]),
    "loop variable": _Effect(end=["out = out * (e + 1)"]),
    "places after": _Effect(end=["out = out + N"]),
    # Random numbers.
    "drawn": _loss("aux = aux + torch.rand(()) * W.sum()"),
    "drawn alone": _Effect(after=["torch.rand(1)"]),
    "drawn rows": _Effect(before=["R = R + 0.1 * torch.randn_like(R)"]),
    "drawn places": _Effect(after=["noise = torch.rand(N)"]),
    "dropped rows": _Effect(before=["R = F.dropout(R, 0.2, self.training)"]),
    "python random": _Effect(after=["random.random()"]),
    # Writes elsewhere.
    "all rows": _Effect(after=["out = out + self.penalty[e]"]),
    "all rows in place": _Effect(after=["out += 0.01"]),
    "first row": _Effect(after=["out[0] += self.penalty[e]"]),
    "first place": _Effect(after=["out[P[0]] += 0.1"]),
    "scaled output": _Effect(after=["out = out * 1.1"]),
    "column": _Effect(start=["side = torch.zeros(x.shape[0], self.num)"], after=["side[:, e] = 1"], end=["out = out + side.sum(1, keepdim=True)"]),
    "own places": _Effect(start=["side = torch.zeros(x.shape[0], self.num)"], after=["side[P, e] = 1"], end=["out = out + side.sum(1, keepdim=True)"]),
    "weight of places": _Effect(start=["side = x.new_zeros(x.shape[0])"], after=["side = side.index_add(0, P, W.reshape(-1))"], end=["out = out + side[:, None]"]),
    "parameter written": _Effect(["self.register_buffer('scale', torch.ones(self.num))"], after=["self.scale[e] *= 0.9"], end=["out = out * self.scale.mean()"]),
    # Control.
    "break": _Effect(after=["if e == 1: break"]),
    "break after rows": _Effect(after=["if N > 2: break"]),
    "continue": _Effect(before=["if e == 1: continue"]),
    "skip many": _Effect(before=["if N > 2: continue"]),
    "skip few": _Effect(before=["if N < 2: continue"]),
    "raise": _Effect(before=["if N > 100: raise ValueError('many')"]),
    "assert": _Effect(before=["assert N < 100"]),
    "assert some": _Effect(before=["assert N > 0"]),
    "divided": _Effect(before=["R = R * (1.0 / N)"]),
    "divided places": _Effect(before=["R = R / max(N, 1)"]),
    "by parity": _Effect(before=["if e % 2: R = R * 2"]),
    "training": _Effect(before=["if self.training: R = R * 2"]),
    "nested": _Effect(before=["def doubled(v): return v * 2", "R = doubled(R)"]),
    "comprehension": _Effect(after=["parts = [v for v in (e, N)]"]),
    "closure": _Effect(start=["total = [0.0]", "def note(v): total[0] = total[0] + v"], after=["note(1.0)"], end=["out = out + total[0]"]),
    "nonlocal": _Effect(
        start=["total = 0.0", "def note(v):", "    nonlocal total", "    total = total + v"], after=["note(1.0)"], end=["out = out + total"],
    ),
    "method": _Effect(["self.total = 0.0"], after=["self._note(e)"]),
    "tried": _Effect(before=["try: R = R * 1.5", "except RuntimeError: pass"]),
    "walrus": _Effect(start=["s = 0"], after=["if (s := s + 1) > 100: out = out * 0"], end=["out = out * s"]),
    "deleted": _Effect(start=["side = {k: 1.0 for k in range(self.num)}"], after=["del side[e]"], end=["out = out * (1 + len(side))"]),
}  # fmt: skip


# Loops.


@dataclass(frozen=True)
class _Spelling:
    """How a loop takes an expert's rows.

    Args:
        start: lines before the loop.
        header: the loop's first line.
        select: lines that find the rows; `P` are their tokens.
        rows, weight: expressions of the rows and of their weights [R,1].
        add: lines that add `Y` to `out`.
        end: lines after the loop.
        empty: (condition that an expert has no rows, that it has some).
        other: conditions that are something else, as pairs of the same kind.
        skips: whether only experts with rows are visited.
    """

    header: str
    select: Sequence[str]
    rows: str
    weight: str
    add: Sequence[Sequence[str]]
    empty: Sequence[tuple[str, str]]
    other: Sequence[tuple[str, str]]
    start: Sequence[str] = ()
    end: Sequence[str] = ()
    num: str = "t.numel()"
    skips: bool = False


_ADDS = (
    ["out.index_add_(0, t, Y)"],
    ["out = out.index_add(0, t, Y)"],
    ["out[t] += Y"],
    ["out[t] = out[t] + Y"],
    ["out.scatter_add_(0, t[:, None].expand(-1, H), Y)"],
    ["out.index_put_((t,), Y, accumulate=True)"],
    ["out = out + torch.zeros_like(out).index_add(0, t, Y)"],
)
_EMPTY_PLACES = (
    ("t.numel() == 0", "t.numel() > 0"),
    ("t.shape[0] == 0", "t.shape[0] != 0"),
    ("len(t) == 0", "len(t)"),
    ("not t.numel()", "t.numel()"),
    ("t.size(0) == 0", "t.size(0) > 0"),
    ("not len(t)", "len(t) > 0"),
    ("t.nelement() == 0", "t.nelement()"),
    ("t.numel() < 1", "t.numel() >= 1"),
    ("0 == t.numel()", "0 < t.numel()"),
)
_OTHER_PLACES = (
    ("not t.any()", "t.any()"),
    ("t.sum() == 0", "t.sum() > 0"),
    ("t.sum().item() == 0", "t.sum().item()"),
    ("not torch.any(t)", "torch.any(t)"),
    ("not t.all()", "t.all()"),
    ("t.numel() == 1", "t.numel() > 1"),
    ("t.numel() < 2", "t.numel() >= 2"),
    ("t.shape[0] <= 1", "t.shape[0] > 1"),
    ("t.numel() == 0 and e > 0", "t.numel() > 0 or e == 0"),
    ("t.numel() == 0 or e == 1", "t.numel() > 0 and e != 1"),
    ("t.numel() == 0 or self.training and e == 1", "t.numel() > 0 and self.training"),
    ("w.sum() == 0", "w.sum() > 0"),
    ("not w[t].any()", "w[t].any()"),
    ("not x[t].any()", "x[t].any()"),
    ("(x[t] > 0).sum() == 0", "(x[t] > 0).any()"),
    ("not (w[t] > 0.4).any()", "(w[t] > 0.4).any()"),
    ("w[t].sum() < 0.5", "w[t].sum() >= 0.5"),
    ("t.float().mean() < 1", "t.float().mean() >= 1"),
    ("e not in i", "e in i"),
    ("not (i[:, 0] == e).any()", "(i[:, 0] == e).any()"),
    ("not (i != e).any()", "(i != e).any()"),
    ("not (i == 0).any()", "(i == 0).any()"),
    ("not (i > e).any()", "(i > e).any()"),
    ("t.shape[-1] == 3", "t.shape[-1] != 3"),
    ("x[t].shape[1] == 0", "x[t].shape[1]"),
    ("i.numel() == 0", "i.numel()"),
)
_OTHER_CHOICES = (("not c.any()", "c.any()"), ("c.sum() == 0", "c.sum() > 0"), ("not w[t, c].any()", "w[t, c].any()"))
_MASKS = (
    ("not m.any()", "m.any()"),
    ("m.sum() == 0", "m.sum() > 0"),
    ("not m.any().item()", "m.any().item()"),
    ("not torch.any(m)", "torch.any(m)"),
    ("m.sum().item() == 0", "m.sum().item()"),
    ("m.long().sum() == 0", "m.long().sum() > 0"),
    ("not bool(m.any())", "bool(m.any())"),
    ("m.nonzero().numel() == 0", "m.nonzero().numel()"),
)
_OTHER_MASKS = (
    ("not m.all()", "m.all()"),
    ("m.sum() == 1", "m.sum() > 1"),
    ("m.numel() == 0", "m.numel()"),
    ("m.shape[0] == 0", "len(m)"),
    ("not m[0].any()", "m[0].any()"),
    ("not (~m).any()", "(~m).any()"),
    ("not (m & (w > 0.4)).any()", "(m & (w > 0.4)).any()"),
    ("m.float().mean() < 0.2", "m.float().mean() >= 0.2"),
)

SPELLINGS: dict[str, _Spelling] = {
    "where": _Spelling(
        "for e in range(self.num):", ["t, c = torch.where(i == e)"], "x[t]", "w[t, c, None]", _ADDS,
        (*_EMPTY_PLACES, ("c.numel() == 0", "len(c)"), ("not (i == e).any()", "(i == e).any()")), (*_OTHER_PLACES, *_OTHER_CHOICES),
    ),
    "enumerate": _Spelling(
        "for e, expert in enumerate(self.ex):", ["t, c = (i == e).nonzero(as_tuple=True)"], "x[t]", "w[t, c].unsqueeze(-1)", _ADDS,
        _EMPTY_PLACES, (*_OTHER_PLACES, *_OTHER_CHOICES),
    ),
    "nonzero": _Spelling(
        "for e in range(self.num):", ["p = (i == e).nonzero()", "t, c = p[:, 0], p[:, 1]"], "x.index_select(0, t)", "w[t, c].unsqueeze(1)", _ADDS,
        (*_EMPTY_PLACES, ("p.numel() == 0", "p.numel()"), ("p.shape[0] == 0", "len(p)")), (*_OTHER_PLACES, *_OTHER_CHOICES, ("not p.any()", "p.any()")),
    ),
    "rows first": _Spelling(
        "for e in range(self.num):", ["t, c = torch.where(i == e)", "r = x[t]", "g = w[t, c, None]"], "r", "g", _ADDS,
        (("r.shape[0] == 0", "r.shape[0]"), ("r.numel() == 0", "r.numel() > 0"), ("len(r) == 0", "len(r)"), ("g.numel() == 0", "g.numel()")),
        (("not r.any()", "r.any()"), ("g.sum() == 0", "g.sum() > 0"), ("not g.any()", "g.any()"), ("r.sum() == 0", "r.sum() > 0"), ("g.sum() <= 0", "g.sum() > 0"), ("(g > 0.3).sum() == 0", "(g > 0.3).any()")),
    ),
    "mask": _Spelling(
        "for e in range(self.num):", ["m = i == e", "t, c = torch.where(m)"], "x[t]", "w[t, c, None]", _ADDS, _MASKS, (*_OTHER_MASKS, *_OTHER_PLACES),
    ),
    "token mask": _Spelling(
        "for e in range(self.num):", ["m = (i == e).any(-1)", "s = (w * (i == e)).sum(-1)"], "x[m]", "s[m, None]",
        (["out[m] += Y"], ["out[m] = out[m] + Y"], ["out = out.index_add(0, m.nonzero().squeeze(-1), Y)"], ["out.masked_scatter_(m[:, None], out[m] + Y)"]),
        (*_MASKS, ("x[m].shape[0] == 0", "x[m].shape[0]")), (*_OTHER_MASKS, ("s.sum() == 0", "s.sum() > 0"), ("not s.any()", "s.any()")),
        num="int(m.sum())",
    ),
    "flat": _Spelling(
        "for e in range(self.num):", ["m = ids == e"], "xs[m]", "ws[m, None]", (["ys[m] = Y"], ["ys[m] += Y"]), _MASKS, _OTHER_MASKS[:5],
        start=["xs, ids, ws = x.repeat_interleave(i.shape[1], 0), i.reshape(-1), w.reshape(-1)", "ys = torch.zeros_like(xs)"],
        end=["out = out + ys.view(*i.shape, H).sum(1)"], num="int(m.sum())",
    ),
    "hit": _Spelling(
        "for h in hit:", ["e = h[0]", "c, t = torch.where(mask[e])"], "x[t]", "w[t, c, None]", _ADDS, _EMPTY_PLACES[:3], (*_OTHER_PLACES[:9], *_OTHER_CHOICES),
        start=["mask = F.one_hot(i, self.num).permute(2, 1, 0)", "hit = (mask.sum((-1, -2)) > 0).nonzero()"], skips=True,
    ),
    "hit items": _Spelling(
        "for h in (mask.sum((1, 2)) > 0).nonzero():", ["e = int(h.item())", "c, t = torch.where(mask[e])"], "x[t]", "w[t, c, None]", _ADDS, _EMPTY_PLACES[:3], (*_OTHER_PLACES[:9], *_OTHER_CHOICES),
        start=["mask = F.one_hot(i, self.num).permute(2, 1, 0)"], skips=True,
    ),
    "unique": _Spelling(
        "for e in i.unique():", ["t, c = torch.where(i == e)"], "x[t]", "w[t, c, None]", _ADDS, _EMPTY_PLACES[:3], (*_OTHER_PLACES[:9], *_OTHER_CHOICES), skips=True,
    ),
    "unique list": _Spelling(
        "for e in i.unique().tolist():", ["t, c = torch.where(i == e)"], "x[t]", "w[t, c, None]", _ADDS, _EMPTY_PLACES[:3], (*_OTHER_PLACES[:9], *_OTHER_CHOICES), skips=True,
    ),
    "counts": _Spelling(
        "for e in range(self.num):", ["t, c = torch.where(i == e)"], "x[t]", "w[t, c, None]", _ADDS,
        (("counts[e] == 0", "counts[e] > 0"), ("not counts[e]", "counts[e]"), ("counts[e] < 1", "counts[e] >= 1")),
        (("counts[e] == 1", "counts[e] > 1"), ("counts[0] == 0", "counts[0] > 0"), ("counts[e - 1] == 0", "counts[e - 1] > 0"), ("sum(counts) == 0", "sum(counts)")),
        start=["counts = torch.bincount(i.flatten(), minlength=self.num).tolist()"],
    ),
    "tensor counts": _Spelling(
        "for e in range(self.num):", ["t, c = torch.where(i == e)"], "x[t]", "w[t, c, None]", _ADDS,
        (("counts[e] == 0", "counts[e] > 0"), ("counts[e].item() == 0", "counts[e].item()")),
        (("counts[e] == 1", "counts[e] > 1"), ("counts[0] == 0", "counts[0] > 0"), ("counts.sum() == 0", "counts.sum() > 0")),
        start=["counts = torch.bincount(i.reshape(-1), minlength=self.num)"],
    ),
    "other counts": _Spelling(
        "for e in range(self.num):", ["t, c = torch.where(i == e)"], "x[t]", "w[t, c, None]", _ADDS,
        (("t.numel() == 0", "t.numel()"),), (("counts[e] == 0", "counts[e] > 0"),),
        start=["counts = torch.bincount(i[:, 0], minlength=self.num).tolist()"],
    ),
    "splits": _Spelling(
        "for e, n in enumerate(counts):", ["end = start + n", "r, g, t = xs[start:end], ws[start:end], ts[start:end]", "start = end"], "r", "g[:, None]", _ADDS[:3],
        (("n == 0", "n > 0"), ("r.shape[0] == 0", "r.shape[0]"), ("not n", "n")), (("n == 1", "n > 1"), ("n < 2", "n >= 2"), ("not r.any()", "r.any()"), ("g.sum() <= 0", "g.sum() > 0")),
        start=["order = i.reshape(-1).argsort(stable=True)", "ts = order // i.shape[1]", "xs, ws = x[ts], w.reshape(-1)[order]",
               "counts = torch.bincount(i.reshape(-1), minlength=self.num).tolist()", "start = 0"], num="n",
    ),
    "skipped splits": _Spelling(
        "for e, n in enumerate(counts):", ["if n == 0: continue", "end = start + n", "r, g, t = xs[start:end], ws[start:end], ts[start:end]"], "r", "g[:, None]",
        (["out.index_add_(0, t, Y)", "start = end"], ["out[t] += Y", "start = end"]), (), (("not r.any()", "r.any()"),),
        start=["order = i.reshape(-1).argsort(stable=True)", "ts = order // i.shape[1]", "xs, ws = x[ts], w.reshape(-1)[order]",
               "counts = torch.bincount(i.reshape(-1), minlength=self.num).tolist()", "start = 0"], num="n", skips=True,
    ),
    "ends": _Spelling(
        "for e, end in enumerate(ends):", ["start = 0 if e == 0 else ends[e - 1]", "if start == end: continue", "t = ts[start:end]"], "x[t]", "ws[start:end, None]",
        _ADDS[:2], (), (("not t.any()", "t.any()"), ("end == start + 1", "end > start + 1")),
        start=["order = i.reshape(-1).argsort(stable=True)", "ts = order // i.shape[1]", "ws = w.reshape(-1)[order]",
               "ends = torch.bincount(i.reshape(-1), minlength=self.num).cumsum(0).tolist()"], num="(end - start)", skips=True,
    ),
    "one choice": _Spelling(
        "for k, e in ((k, e) for k in range(i.shape[1]) for e in range(self.num)):", ["t = torch.where(i[:, k] == e)[0]"], "x[t]", "w[t, k, None]", _ADDS, _EMPTY_PLACES, _OTHER_PLACES[:9],
    ),
    "columns": _Spelling(
        "for e in range(self.num):", ["m = gates[:, e] > 0", "t = m.nonzero().squeeze(-1)"], "x[t]", "gates[t, e, None]", _ADDS[:4],
        (*_EMPTY_PLACES[:3], *_MASKS[:3]), _OTHER_PLACES[:4],
        start=["gates = torch.zeros(x.shape[0], self.num).scatter(1, i, w)"],
    ),
    "every": _Spelling(
        "for e in range(self.num):", ["t = torch.arange(x.shape[0])", "m = (i == e).any(-1)"], "x", "(w * (i == e)).sum(-1, keepdim=True)", (["out = out + Y"], ["out += Y"]), _MASKS[:4], _OTHER_MASKS[:3],
    ),
}  # fmt: skip


def _loop(name: str, draw: random.Random) -> WrittenLayer:
    choices: dict[str, str] = {}
    routing, num_experts, _ = _routing(draw, edits=0.15, choices=choices)
    spelling_name = draw.choice(sorted(SPELLINGS))
    spelling = SPELLINGS[spelling_name]
    effect_name = draw.choice(sorted(_EFFECTS)) if draw.random() < 0.75 else "none"
    expert = draw.choice(sorted(EXPERTS)) if draw.random() < 0.25 else draw.choice(_STATELESS)
    guard, form = _guard(draw, spelling)
    residual = draw.choice(("torch.zeros_like(x)", "torch.zeros_like(x)", "x.clone()", "torch.zeros_like(x) + x"))
    choices |= {"spelling": spelling_name, "effect": effect_name, "expert": expert, "guard": guard[0] if guard else "", "form": form}  # fmt: skip
    effect = _EFFECTS[effect_name]
    words = {"W": spelling.weight, "N": spelling.num, "P": "t"}
    rows = [
        f"R = {spelling.rows}",
        *effect.before,
        "Y = self.ex[e](R) * " + spelling.weight,
        *draw.choice(spelling.add),
    ]
    if draw.random() < 0.2:
        rows[2 + len(effect.before) - 1] = f"Y = self.ex[e](R * {spelling.weight})"
    body = rows + list(effect.after) if draw.random() < 0.7 else list(effect.after) + rows
    is_outside = effect_name != "none" and draw.random() < 0.1  # for every expert, guarded or not
    if is_outside and not effect.before:
        body = rows
    inner = [
        *spelling.select,
        *(effect.after if is_outside and not effect.before else ()),
        *_guarded(body, guard, form),
    ]
    lines = [*routing, f"out = {residual}", *spelling.start, *effect.start]
    lines += [spelling.header, *("    " + line for line in inner), *spelling.end, *effect.end, "return out"]
    lines = [_worded(line, words) for line in lines]
    methods = ["def _note(self, e):", "    self.total += 1.0"] if effect_name == "method" else []
    return WrittenLayer(name, module_source(name, num_experts, EXPERTS[expert], effect.init, lines, methods), choices)


def _worded(line: str, words: dict[str, str]) -> str:
    return re.sub(r"\b[WNP]\b", lambda match: words[match.group()], line)


def _guard(draw: random.Random, spelling: _Spelling) -> tuple[tuple[str, str] | None, str]:
    chance = draw.random()
    if chance < 0.12:
        return None, "none"
    options = spelling.empty if chance < 0.6 and spelling.empty else spelling.other
    if not options:
        return None, "none"
    return draw.choice(options), draw.choice(("continue", "continue", "inside", "inside", "else", "other", "twice", "break"))  # fmt: skip


def _guarded(body: list[str], guard: tuple[str, str] | None, form: str) -> list[str]:
    if guard is None:
        return body
    empty, some = guard
    nested = ["    " + line for line in body]
    if form == "continue":
        return [f"if {empty}:", "    continue", *body]
    if form == "inside":
        return [f"if {some}:", *nested]
    if form == "else":
        return [f"if {empty}:", "    pass", "else:", *nested]
    if form == "other":
        return [f"if {some}:", *nested, "else:", "    out = out + 0.01 * e"]
    if form == "twice":
        return [f"if {empty}: continue", f"if {empty}: continue", *body]
    if form == "break":
        return [f"if {empty}: break", *body]
    raise ValueError(form)


def module_source(
    name: str, num_experts: int, expert: str, init: Sequence[str], lines: Sequence[str], methods: Sequence[str] = ()
) -> str:
    start = [
        "super().__init__()",
        f"self.num = {num_experts}",
        "self.router, self.second = nn.Linear(H, self.num, bias=False), nn.Linear(H, self.num, bias=False)",
        f"self.ex = nn.ModuleList({expert} for _ in range(self.num))",
        "self.penalty = nn.Parameter(torch.rand(self.num))",
        "self.register_buffer('permutation', torch.arange(self.num).flip(0))",
        "self.register_buffer('merging', torch.arange(self.num) // 2)",
        "self.register_buffer('skew', torch.zeros(self.num))",
        "self.offset = 0",
        *init,
    ]
    body = ["logits = self.router(x) + self.skew", *lines]
    text = "\n".join(
        [
            "import random",
            "",
            "import torch",
            "import torch.nn.functional as F",
            "from torch import nn",
            "",
            f"H = {HIDDEN}",
            "",
            "",
            "def log(e):",
            "    return None",
            "",
            _EXPERT_CLASSES,
            "",
            f"class {name}(nn.Module):",
            "    def __init__(self):",
            *("        " + line for line in start),
            "",
            "    def forward(self, x):",
            *("        " + line for line in body),
            *("    " + line for line in ["", *methods] if methods),
        ]
    )
    return text + "\n"


# Dense, gathered, sorted: everything that is no loop.

PRODUCTS: dict[str, Sequence[str]] = {
    "one hot": [
        "full = (F.one_hot(i, self.num) * w[..., None]).sum(1)",
        "y = torch.einsum('tef,efh->teh', F.silu(torch.einsum('th,ehf->tef', x, self.up)), self.down)",
        "out = torch.einsum('teh,te->th', y, full)",
    ],
    "one hot max": [
        "full = (F.one_hot(i, self.num) * w[..., None]).amax(1)",
        "y = torch.einsum('tef,efh->teh', F.silu(torch.einsum('th,ehf->tef', x, self.up)), self.down)",
        "out = (y * full[..., None]).sum(1)",
    ],
    "one hot any": [
        "full = F.one_hot(i, self.num).amax(1) * logits.softmax(-1)",
        "y = torch.einsum('tef,efh->teh', F.silu(torch.einsum('th,ehf->tef', x, self.up)), self.down)",
        "out = (y * full[..., None]).sum(1)",
    ],
    "one hot sum": [
        "full = F.one_hot(i, self.num).sum(1) * logits.softmax(-1)",
        "y = torch.einsum('tef,efh->teh', F.silu(torch.einsum('th,ehf->tef', x, self.up)), self.down)",
        "out = (y * full[..., None]).sum(1)",
    ],
    "one hot einsum": [
        "mask = F.one_hot(i, self.num).to(x.dtype)",
        "full = torch.einsum('tke,tk->te', mask, w)",
        "y = torch.einsum('tef,efh->teh', F.silu(torch.einsum('th,ehf->tef', x, self.up)), self.down)",
        "out = torch.einsum('teh,te->th', y, full)",
    ],
    "one hot einsum whole": [
        "mask = F.one_hot(i, self.num).to(x.dtype)",
        "y = torch.einsum('tef,efh->teh', F.silu(torch.einsum('th,ehf->tef', x, self.up)), self.down)",
        "out = torch.einsum('teh,tke,tk->th', y, mask, w)",
    ],
    "scatter": [
        "full = torch.zeros(x.shape[0], self.num).scatter(1, i, w)",
        "y = torch.einsum('tef,efh->teh', F.silu(torch.einsum('th,ehf->tef', x, self.up)), self.down)",
        "out = torch.einsum('teh,te->th', y, full)",
    ],
    "scatter add": [
        "full = torch.zeros(x.shape[0], self.num).scatter_add(1, i, w)",
        "y = torch.einsum('tef,efh->teh', F.silu(torch.einsum('th,ehf->tef', x, self.up)), self.down)",
        "out = torch.einsum('teh,te->th', y, full)",
    ],
    "scatter add in place": [
        "full = x.new_zeros(x.shape[0], self.num)",
        "full.scatter_add_(1, i, w)",
        "out = (torch.matmul(F.silu(torch.matmul(x, self.up)), self.down) * full.t()[..., None]).sum(0)",
    ],
    "scatter ones": [
        "mask = torch.zeros(x.shape[0], self.num).scatter(1, i, 1.0)",
        "full = mask * logits.softmax(-1)",
        "out = (torch.matmul(F.silu(torch.matmul(x, self.up)), self.down) * full.t()[..., None]).sum(0)",
    ],
    "scatter infinity": [
        "mask = torch.full_like(logits, float('-inf')).scatter(1, i, 0.0)",
        "full = (logits + mask).softmax(-1)",
        "out = (torch.matmul(F.silu(torch.matmul(x, self.up)), self.down) * full.t()[..., None]).sum(0)",
    ],
    "scatter values softmax": [
        "full = torch.full_like(logits, float('-inf')).scatter(1, i, w).softmax(-1)",
        "out = (torch.matmul(F.silu(torch.matmul(x, self.up)), self.down) * full.t()[..., None]).sum(0)",
    ],
    "masked fill": [
        "chosen = F.one_hot(i, self.num).sum(1) > 0",
        "full = logits.masked_fill(~chosen, float('-inf')).softmax(-1)",
        "out = (torch.matmul(F.silu(torch.matmul(x, self.up)), self.down) * full.t()[..., None]).sum(0)",
    ],
    "compared": [
        "full = ((i[..., None] == torch.arange(self.num)) * w[..., None]).sum(1)",
        "out = (torch.matmul(F.silu(torch.matmul(x, self.up)), self.down) * full.t()[..., None]).sum(0)",
    ],
    "input scaled": [
        "full = torch.zeros(x.shape[0], self.num).scatter_add(1, i, w)",
        "xs = x[None] * full.t()[..., None]",
        "out = torch.bmm(F.silu(torch.bmm(xs, self.up)), self.down).sum(0)",
    ],
    "gathered": [
        "h = F.silu(torch.einsum('th,tkhf->tkf', x, self.up[i]))",
        "y = torch.einsum('tkf,tkfh->tkh', h, self.down[i])",
        "out = (y * w[..., None]).sum(1)",
    ],
    "gathered flat": [
        "ids = i.reshape(-1)",
        "xs = x.repeat_interleave(i.shape[1], 0)",
        "h = F.silu(torch.bmm(xs[:, None], self.up[ids]))",
        "y = torch.bmm(h, self.down[ids]).squeeze(1) * w.reshape(-1, 1)",
        "out = y.view(*i.shape, H).sum(1)",
    ],
    "gathered add": [
        "ids, ts = i.reshape(-1), torch.arange(i.numel()) // i.shape[1]",
        "h = F.silu(torch.bmm(x[ts][:, None], self.up[ids]))",
        "y = torch.bmm(h, self.down[ids]).squeeze(1) * w.reshape(-1, 1)",
        "out = torch.zeros_like(x).index_add(0, ts, y)",
    ],
    "gathered select": [
        "h = F.silu(torch.einsum('th,tkhf->tkf', x, self.up.index_select(0, i.reshape(-1)).view(*i.shape, H, 12)))",
        "y = torch.einsum('tkf,tkfh->tkh', h, self.down.index_select(0, i.reshape(-1)).view(*i.shape, 12, H))",
        "out = torch.einsum('tkh,tk->th', y, w)",
    ],
    "all then gather": [
        "y = torch.einsum('tef,efh->teh', F.silu(torch.einsum('th,ehf->tef', x, self.up)), self.down)",
        "own = y.gather(1, i[..., None].expand(-1, -1, H))",
        "out = (own * w[..., None]).sum(1)",
    ],
    "all then index": [
        "y = torch.einsum('tef,efh->teh', F.silu(torch.einsum('th,ehf->tef', x, self.up)), self.down)",
        "own = y[torch.arange(x.shape[0])[:, None], i]",
        "out = (own * w[..., None]).sum(1)",
    ],
    "stacked": [
        "y = torch.stack([self.ex[e](x) for e in range(self.num)], 1)",
        "full = torch.zeros(x.shape[0], self.num).scatter_add(1, i, w)",
        "out = (y * full[..., None]).sum(1)",
    ],
    "stacked gather": [
        "y = torch.stack([self.ex[e](x) for e in range(self.num)], 1)",
        "out = (y.gather(1, i[..., None].expand(-1, -1, H)) * w[..., None]).sum(1)",
    ],
    "sum of experts": [
        "full = (F.one_hot(i, self.num) * w[..., None]).sum(1)",
        "out = sum(self.ex[e](x) * full[:, e, None] for e in range(self.num))",
    ],
    "sum of masks": [
        "out = torch.zeros_like(x)",
        "for e in range(self.num):",
        "    out = out + self.ex[e](x) * (w * (i == e)).sum(-1, keepdim=True)",
    ],
    "sum of any": [
        "out = torch.zeros_like(x)",
        "for e in range(self.num):",
        "    out = out + self.ex[e](x) * (i == e).any(-1, keepdim=True) * logits.softmax(-1)[:, e, None]",
    ],
    "listed": [
        "out = torch.zeros_like(x)",
        "for e in range(self.num):",
        "    t, c = torch.where(i == e)",
        "    out.index_add_(0, t, self.ex[e](x[t]) * w[t, c, None])",
    ],
    "listed tokens": [
        "out = torch.zeros_like(x)",
        "for e in range(self.num):",
        "    t = torch.where((i == e).any(-1))[0]",
        "    out[t] += self.ex[e](x[t]) * (w * (i == e)).sum(-1)[t, None]",
    ],
    "listed put": [
        "out = torch.zeros_like(x)",
        "for e in range(self.num):",
        "    t, c = torch.where(i == e)",
        "    out[t] = out[t] + self.ex[e](x[t]) * w[t, c, None]",
    ],
    "choices": [
        "out = torch.zeros_like(x)",
        "for k in range(i.shape[1]):",
        "    for e in range(self.num):",
        "        t = torch.where(i[:, k] == e)[0]",
        "        out = out.index_add(0, t, self.ex[e](x[t]) * w[t, k, None])",
    ],
    "sorted": [
        "ids, order = i.reshape(-1).sort(stable=True)",
        "ts = order // i.shape[1]",
        "counts = torch.bincount(ids, minlength=self.num).tolist()",
        "parts = [self.ex[e](part) for e, part in enumerate(x[ts].split(counts))]",
        "y = torch.cat(parts) * w.reshape(-1)[order, None]",
        "out = torch.zeros_like(x).index_add(0, ts, y)",
    ],
    "sorted back": [
        "order = i.reshape(-1).argsort(stable=True)",
        "counts = torch.bincount(i.reshape(-1), minlength=self.num).tolist()",
        "parts = [self.ex[e](part) for e, part in enumerate(x[order // i.shape[1]].split(counts))]",
        "y = torch.empty(i.numel(), H)",
        "y[order] = torch.cat(parts)",
        "out = (y.view(*i.shape, H) * w[..., None]).sum(1)",
    ],
    "grouped": [
        "ids, order = i.reshape(-1).sort(stable=True)",
        "ts = order // i.shape[1]",
        "offs = torch.histc(ids.float(), self.num, 0, self.num - 1).cumsum(0, dtype=torch.int32)",
        "h = F.silu(F.grouped_mm(x[ts].bfloat16(), self.up16, offs=offs))",
        "y = F.grouped_mm(F.pad(h, (0, 4)), self.down16, offs=offs).to(x.dtype) * w.reshape(-1)[order, None]",
        "out = torch.zeros_like(x).index_add(0, ts, y)",
    ],
    "grouped counts": [
        "ids, order = i.reshape(-1).sort(stable=True)",
        "ts = order // i.shape[1]",
        "offs = torch.zeros(self.num).scatter_add(0, i.reshape(-1), torch.ones(i.numel())).cumsum(0).int()",
        "h = F.silu(F.grouped_mm(x[ts].bfloat16(), self.up16, offs=offs))",
        "y = F.grouped_mm(F.pad(h, (0, 4)), self.down16, offs=offs).to(x.dtype) * w.reshape(-1)[order, None]",
        "out = torch.zeros_like(x).index_add(0, ts, y)",
    ],
    "slots": [
        "mask = F.one_hot(i, self.num).to(x.dtype)",
        "place = mask.sum(1).cumsum(0)[:, None] * mask - 1",
        "d = (F.one_hot(place.long().clamp(min=0), 4) * (mask * (place < 4))[..., None]).sum(1)",
        "xs = torch.einsum('tec,th->ech', d, x)",
        "y = torch.bmm(F.silu(torch.bmm(xs, self.up)), self.down)",
        "out = torch.einsum('ech,tec->th', y, d * (mask * w[..., None]).sum(1)[..., None])",
    ],
}
_TAILS = {
    "none": [],
    "residual": ["out = out + x"],
    "scaled": ["out = out * 1.5"],
    "loss": ["out = out + (F.one_hot(i.clamp(0, self.num - 1), self.num).float().mean((0, 1)) * logits.softmax(-1).mean(0)).sum()"],
    "normed": ["out = F.layer_norm(out, (H,))"],
    "shared": ["out = out + self.second(x).sum(-1, keepdim=True)"],
    "mean": ["out = out / i.shape[1]"],
    "counted": ["self.load += torch.bincount(i.reshape(-1).clamp(min=0), minlength=self.num)"],
}  # fmt: skip


def _dense(name: str, draw: random.Random) -> WrittenLayer:
    choices: dict[str, str] = {}
    routing, num_experts, _ = _routing(draw, edits=0.6, choices=choices)
    product, tail = draw.choice(sorted(PRODUCTS)), draw.choice(sorted(_TAILS))
    choices |= {"product": product, "tail": tail}
    init = [
        "self.up = nn.Parameter(torch.randn(self.num, H, 12) / 3)",
        "self.down = nn.Parameter(torch.randn(self.num, 12, H) / 3)",
        "self.register_buffer('load', torch.zeros(self.num, dtype=torch.long))",
    ]
    if product.startswith("grouped"):
        init.append("self.up16 = nn.Parameter((torch.randn(self.num, H, 16) / 3).bfloat16())")
        init[-1] = init[-1].replace("H, 16", "H, 8")
        init.append("self.down16 = nn.Parameter((torch.randn(self.num, 16, H) / 3).bfloat16())")
    lines = [*routing, *PRODUCTS[product], *_TAILS[tail], "return out"]
    if product.startswith("grouped"):
        lines = [line.replace("F.pad(h, (0, 4))", "F.pad(h, (0, 8))") for line in lines]
    return WrittenLayer(name, module_source(name, num_experts, EXPERTS["mlp"], init, lines), choices)


if __name__ == "__main__":
    layer = written_layer(sys.argv[1], int(sys.argv[2]))  # type: ignore[arg-type]  # a kind
    print(textwrap.dedent(layer.source).split("class " + layer.name)[1])
    print(layer.choices)
