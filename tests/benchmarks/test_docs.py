"""What the documentation shows runs: every block of Python and every `memfine` line of the pages, as a reader would."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.known_models import known_config
from memfine_fx.cli import main

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(python|shell)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#:]+\.(?:md|png|svg))")
_HUB_NAME = re.compile(r"^memfine fit (\w[\w.-]*/[\w.-]+)", re.MULTILINE)
_DOCS = ROOT / "docs"
_PAGES = sorted(
    path.relative_to(_DOCS).as_posix()
    for path in {*_DOCS.rglob("*.md"), *(_DOCS / "planner").glob("*.md")}  # a link, which rglob does not enter
)


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [found[2] for found in _BLOCK.finditer(text) if found[1] == language]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/quickstart.md", "docs/budget.md"])
def test_every_python_block_of_a_page_runs_in_order(page: str) -> None:
    pytest.importorskip("transformers")
    names: dict[str, object] = {"__name__": page}
    code = blocks(page, "python")
    assert code
    for number, block in enumerate(code):
        exec(compile(block, f"{page}, block {number}", "exec"), names)


@pytest.mark.slow
def test_the_readme_s_lines_run() -> None:
    pytest.importorskip("transformers")
    import torch

    from memfine_fx.demo.tiny import tiny_causal_lm

    tokens = torch.randint(1, 64, (2, 32))
    names = {"model": tiny_causal_lm("qwen3_moe"), "batch": {"input_ids": tokens, "labels": tokens}}
    exec(compile(blocks("README.md", "python")[0], "README.md", "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/quickstart.md", "docs/budget.md"])
def test_every_command_of_a_page_runs(
    page: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader has a network; here a folder of the same name stands for what the Hub would give, and no file stays."""
    for name in _HUB_NAME.findall("\n".join(blocks(page, "shell"))):
        known_config(name.partition("/")[2]).save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks(page, "shell") for line in block.splitlines() if line.startswith("memfine ")]
    assert lines
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0, line
        assert capsys.readouterr().out, line


@pytest.mark.parametrize("page", [*(f"docs/{name}" for name in _PAGES), "README.md"])
def test_every_page_and_figure_that_a_page_links_to_exists(page: str) -> None:
    """Cheap, and without mkdocs, which checks anchors too (`make docs`)."""
    path = ROOT / page
    for target in _LINK.findall(path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([a-z_/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == _PAGES
