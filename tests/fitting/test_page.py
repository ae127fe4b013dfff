"""The page of an answer: its expressions are those of the records, and a browser gives what the command gives."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Mod

import memfine_fx
from memfine_fx.config import Config
from memfine_fx.errors import ConfigError
from memfine_fx.fitting.analysis import Analysis, StaticBytes
from memfine_fx.fitting.answer import Question, report_of
from memfine_fx.fitting.changes import Changed, changes
from memfine_fx.fitting.export import Exported
from memfine_fx.fitting.recording import RecordedStep
from memfine_fx.fitting.report import FitReport, page
from memfine_fx.fitting.setup import OptimizerBytes, Setup
from memfine_fx.memory.head_bytes import HeadBytes, HeadMemory
from memfine_fx.memory.liveness import Allocation, Call, GraphMemory
from memfine_fx.memory.step import GraphStep, RunMemory
from memfine_fx.plan.rows import LEAST_TOKENS, knee_tokens
from memfine_fx.report.style import palette
from memfine_fx.units import readable_bytes
from tests.fitting.test_fit import config_of
from tests.pages import read_page

NODE = shutil.which("node")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
TOKENS, LENGTH = (sympy.Symbol(name, integer=True, positive=True) for name in ("s27", "s53"))
OPERATIONS: dict[str, Any] = {
    "+": lambda *all_of: sum(all_of),
    "*": lambda *all_of: math.prod(all_of),
    "^": lambda one, other: one**other,
    "/": lambda one, other: one / other,
    "max": max,
    "min": min,
    "floor": math.floor,
    "ceiling": math.ceil,
    "floordiv": lambda one, other: one // other,
    "mod": lambda one, other: one % other,
    ">=": lambda one, other: one >= other,
    ">": lambda one, other: one > other,
    "<": lambda one, other: one < other,
    "and": lambda one, other: one and other,
    "or": lambda one, other: one or other,
    "not": lambda one: not one,
}


def value(expr: Any, sizes: dict[str, int]) -> Any:
    """What the page's script makes of an expression."""
    if isinstance(expr, (bool, int, float)):
        return expr
    if isinstance(expr, str):
        return sizes[expr]
    if expr[0] == "piecewise":
        return next(value(one, sizes) for one, condition in expr[1:] if value(condition, sizes))
    return OPERATIONS[expr[0]](*(value(one, sizes) for one in expr[1:]))


def analysis_of(num_bytes: sympy.Expr, head: HeadMemory | None = None) -> Analysis:
    """Of a step whose forward keeps so many bytes, and may have a chunked head."""
    calls = (Call(0, "head", "head"),) if head is not None else ()
    kept = GraphMemory((Allocation("kept", num_bytes, 0, None),), calls, 2)
    freed = GraphMemory((Allocation("kept", num_bytes, 0, 1, is_input=True),), (), 2)
    step = GraphStep(forward=kept, backward=freed, heads={"head": head} if head is not None else {})
    run = RunMemory(step, {"s27": 2, "s53": 64})
    record = RecordedStep(dict.fromkeys(("asked", "least", "most"), (run,)), 2, 64, (), (), "")
    static = StaticBytes(1000, 1000, 8, OptimizerBytes(2000, 0, 0))
    return Analysis((record,), 0, static, Setup(2, 64, dtype="fp32"), Config())


def test_one_sequence_is_answered_by_its_own_graph() -> None:
    """Also where a shorter sequence or the largest batch is searched; more sequences are answered by the other."""
    own = analysis_of(sympy.Integer(100_000)).records[0]
    other = analysis_of(10_000 * TOKENS)
    analysis = dataclasses.replace(other, setup=Setup(1, 64, dtype="fp32"), of_one_sequence=(own,))
    whole, extra = (analysis.total("most", batch, 64).num_bytes for batch in (1, 3))
    assert whole == dataclasses.replace(other, records=(own,)).total("most", 1, 64).num_bytes
    assert extra == other.total("most", 3, 64).num_bytes
    assert analysis.peak_as_asked(1, 64).num_bytes == analysis.lightest(1, 64).num_bytes == whole > extra
    available = analysis.lightest(1, 2).num_bytes - 1
    (shorter,) = [
        change
        for change in changes(Changed(analysis, lambda name: analysis), available)
        if change.what.startswith("seq=")
    ]
    assert not shorter.fits and shorter.least_bytes == analysis.lightest(1, 32).num_bytes > 100_000
    report = report_of(config_of(), analysis, "made by hand", Question(memory=available))
    assert report.fits is False and report.largest_batch == 0


def page_of(num_bytes: sympy.Expr) -> str:
    return page(report_of(config_of(), analysis_of(num_bytes), "made by hand", Question(memory="1MiB")))


@pytest.mark.parametrize(
    "expr",
    [
        4 * TOKENS * LENGTH + 7,
        sympy.Max(8 * TOKENS, 3 * LENGTH**2) - sympy.Min(LENGTH, 100),
        sympy.floor(TOKENS * LENGTH / 3) + sympy.ceiling(sympy.Rational(5, 2) * LENGTH),
        FloorDiv(TOKENS * LENGTH, 7) + Mod(LENGTH, 5),
        sympy.Piecewise((256, LENGTH >= 768), (64, LENGTH >= 192), (32, True)) * TOKENS,
        sympy.Piecewise((8, sympy.ITE(LENGTH >= 768, TOKENS > 8, TOKENS < 2)), (4, True)) * LENGTH,
    ],
)
def test_an_expression_on_the_page_is_that_of_the_record(expr: sympy.Expr) -> None:
    exported = Exported()
    added = exported.add(analysis_of(expr), ("most",))
    (run,) = added["plans"]["most"][0]
    tables = exported.tables
    number = tables["memories"][run["forward"]]["allocations"][0][0]
    for tokens, length in ((1, 2), (3, 777), (16, 4096)):
        expected = int(expr.subs({TOKENS: tokens, LENGTH: length}))
        assert int(value(tables["expressions"][number], {"b": tokens, "s": length})) == expected


def test_a_chunked_head_on_the_page_is_that_of_the_record() -> None:
    terms = HeadBytes(64, 5000, 2, False, (True, True, False), "cuda", saves_logits=True)
    exported = Exported()
    added = exported.add(analysis_of(sympy.Integer(8), HeadMemory(terms, TOKENS * LENGTH)), ("most",))
    (run,) = added["plans"]["most"][0]
    tables = exported.tables
    ((_, _, kind, free, least),) = tables["memories"][run["forward"]]["calls"]
    assert kind == "head"
    for tokens, length in ((1, 2), (3, 777)):
        found = [int(value(tables["expressions"][one], {"b": tokens, "s": length})) for one in (free, least)]
        assert found == [terms.workspace(min(tokens * length, rows)) for rows in (knee_tokens(terms), LEAST_TOKENS)]


def test_a_size_without_a_counterpart_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no counterpart on a page: gamma\(b\)"):
        page_of(sympy.gamma(TOKENS))


def test_a_report_without_records_says_so() -> None:
    bare = dataclasses.replace(
        report_of(config_of(), analysis_of(sympy.Integer(8)), "made by hand", Question()), analysis=None
    )
    with pytest.raises(ConfigError, match="no records of the step"):
        page(bare)


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_page_writes_bytes_as_texts_do() -> None:
    sizes = [0, 900, 1024, 10_700, 2_786_552, 1023 << 20, 80 << 30, 37_190_743, 3 << 40]
    script = Path("memfine_fx/fitting/page.js").read_text(encoding="utf-8")
    cut = script[script.index("const UNITS") : script.index("const grouped")]
    command = [str(NODE), "-e", f"{cut}; console.log(JSON.stringify({sizes}.map(readable)))"]
    written = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(written) == [readable_bytes(size) for size in sizes]


def test_the_page_has_no_colour_of_one_scheme_only() -> None:
    style = Path("memfine_fx/fitting/page.html").read_text(encoding="utf-8").partition("</style>")[0]
    assert set(re.findall(r"var\((--\w+)", style)) <= set(re.findall(r"--\w+", palette(":root")))
    assert re.findall(r"[;{](?:color|background|fill|stroke|border[-\w]*):[^;}]*#\w+", style) == []


def test_the_file_needs_nothing_beside_it() -> None:
    data = json.loads(read_page(page_of(4 * TOKENS * LENGTH)).scripts[0])
    assert data["start"] == {"batch": 2, "seq": 64, "memory": 2**20}
    assert set(data["analysis"]["plans"]) == {"asked", "least", "most"}


@pytest.mark.skipif(BROWSER is None, reason="no headless browser")
def test_a_browser_draws_every_term_on_axes_with_units(tmp_path: Path) -> None:
    (tmp_path / "fit.html").write_text(page_of(4000 * TOKENS * LENGTH), encoding="utf-8")
    drawn = dumped(tmp_path / "fit.html")
    legend = re.sub("<[^>]+>", "|", drawn.partition('id="legend"')[2].partition("</section>")[0])
    assert all(f"|{name}|" in legend for name in ("parameters", "optimizer state", "gradients", "saved for backward"))
    assert (
        "live memory, KiB</text>" in drawn and "operations of the step, in order; widths are not time</text>" in drawn
    )


def dumped(path: Path, fragment: str = "") -> str:
    """Return the page's HTML after its script has run."""
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--virtual-time-budget=4000", "--dump-dom", f"file://{path}#{fragment}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def shown(path: Path, **sizes: int) -> dict[str, str]:
    """Values on the page at a setting, by the id of what shows them."""
    found = dumped(path, "&".join(f"{name}={size}" for name, size in sizes.items()))
    return dict(re.findall(r'id="(\w+)"[^>]*data-value="([^"]*)"', found))


def expected(report: FitReport, memory: int, batch: int, seq: int) -> dict[str, str]:
    """What the command says at a setting, of the records that the page was written from."""
    analysis = report.analysis
    assert analysis is not None
    there = dataclasses.replace(analysis, setup=dataclasses.replace(analysis.setup, batch=batch, seq=seq))
    said = report_of(config_of(), there, "", Question(memory=memory))
    values = {
        "verdict": str(said.fits).lower(),
        "drawn": said.shown.num_bytes,
        "least": said.least.num_bytes,
        "most": said.most.num_bytes,
        "longest": said.longest_seq,
        "largest": said.largest_batch,
    }
    if said.asked is not None:
        values["asked"] = said.asked.num_bytes
    return {name: str(one) for name, one in values.items()}


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no headless browser")
@pytest.mark.parametrize(
    ("layers", "given"),
    [
        (2, dict(dtype="bf16")),
        (2, dict(dtype="fp32", memory_budget="12MiB", has_even_routing=True)),
        (6, dict(dtype="bf16", fsdp=4)),
    ],
)
def test_a_browser_gives_what_the_command_gives(layers: int, given: dict[str, Any], tmp_path: Path) -> None:
    report = memfine_fx.fit(config_of(num_hidden_layers=layers), memory="24MiB", batch=2, seq=256, **given)
    report.to_html(tmp_path / "fit.html")
    draw = random.Random(0)
    for _ in range(8):
        memory, batch, seq = draw.randint(1 << 21, 1 << 28), draw.randint(1, 40), draw.randint(2, 3000)
        found = shown(tmp_path / "fit.html", memory=memory, batch=batch, seq=seq)
        assert found == expected(report, memory, batch, seq)


@pytest.mark.slow
def test_keeping_everything_is_what_the_command_says_when_it_is_asked_at_other_sizes() -> None:
    report = memfine_fx.fit(config_of(), batch=2, seq=256)
    again = memfine_fx.fit(config_of(), batch=3, seq=640)
    assert report.analysis is not None
    assert report.analysis.total("most", 3, 640) == again.most
