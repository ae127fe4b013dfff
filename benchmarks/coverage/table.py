"""docs/coverage.md from the stored rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.coverage.forms import FORMS, Form
from benchmarks.coverage.rows import (
    EAGER_FACTOR,
    NO_FUNCTION,
    NOT_INSTALLED,
    TOLERANCE,
    CoverageRow,
    MultimodalRow,
    PackageRow,
    VersionRow,
)

__all__ = ["coverage_page"]


def coverage_page(
    rows: Sequence[CoverageRow],
    packaged: Sequence[PackageRow],
    by_version: Sequence[VersionRow],
    multimodal: Sequence[MultimodalRow],
    versions: str,
    of_functions: Sequence[CoverageRow] = (),
) -> str:
    """The whole page.

    Args:
        rows: of families and spellings.
        packaged: of layers as their packages ship them.
        by_version: of a few families in several versions of transformers.
        multimodal: of deep models with images.
        versions: of transformers and torch, in words.
        of_functions: of families that `experts_implementation="memfine"` chunks.
    """
    families = [row for row in rows if row.kind == "family"]
    spellings = [row for row in rows if row.kind == "spelling"]
    return "\n".join(
        [
            "# Coverage",
            "",
            "Written by `python -m benchmarks.coverage`; do not edit. "
            f"{versions}, toy sizes (H=32, E=4, K up to 2, T=128), fp32, train mode, inner compiler eager, "
            "16 rows a chunk.",
            "",
            f"**Every layer chunked and exact: {_num_whole(families)} of {len(families)} transformers families with "
            f"experts, {_num_whole(spellings)} of {len(spellings)} hand-written spellings.** A family is in the list "
            "when its source defines a class of experts; none is left out.",
            "",
            "* *layers*: layers of experts in the toy model; *found*: routing decisions behind which something was "
            "looked for; *raised*: regions chunked.",
            f"* *error*: worst relative error of the outputs and every gradient against the unmodified model, to be "
            f"below {TOLERANCE:g}. `a / b`: this tensor is ill-conditioned; a is our distance from the unmodified "
            "model in fp64, b the unmodified fp32 model's own distance from it, the largest of several roundings of "
            f"its parameters, and a is to be below {EAGER_FACTOR:g} b.",
            "* *peak*: bytes of a step beyond parameters and gradients, over those of the same captured graph not "
            "rewritten. Toy sizes: attention, logits and scans weigh more here than in a model of real width, so this "
            "column says that the routed rows are gone, not what a real model saves.",
            "",
            "## Transformers families",
            "",
            *_table(families),
            "",
            *_versions(by_version),
            *_experts_functions(of_functions),
            *_multimodal(multimodal),
            "## Hand-written spellings",
            "",
            *_table(spellings),
            "",
            "## What is not whole, and why",
            "",
            *_reasons(rows),
            "",
            "## What is not compared with the model's own code",
            "",
            "Each kind of chunked layer is compared with the model's own code, run eagerly, when it is first compiled "
            "([Reliability](reliability.md)). Of these it was not:",
            "",
            *(f"* {row.name}: {'; '.join(row.uncompared)}" for row in (*rows, *packaged) if row.uncompared),
            "",
            "## Rewritten source",
            "",
            "Some expert loops reach no graph as they are written. Methods with such loops are rewritten for the time "
            "of a compiled call (`memfine_fx.capture.source`), in the forms below; everything else stays as written, "
            "and so does a loop that does more than its form allows. Without a form, the rows named with it are not "
            "whole. `guarded` marks what an expert was skipped for, so that reading the loop can prove that it works "
            "on its own rows alone.",
            "",
            *(line for form in FORMS for line in _example(form)),
            *_packages(packaged),
        ]
    )


def _experts_functions(rows: Sequence[CoverageRow]) -> list[str]:
    """The section of families that are chunked without a compiler."""
    taking = [row for row in rows if row.failure != NO_FUNCTION]
    others = [row.name for row in rows if row.failure == NO_FUNCTION]
    left = [
        f"* {row.name}: {row.failure or '; '.join(row.reasons) or _error(row)}" for row in taking if not row.is_whole
    ]
    return [
        '## `experts_implementation="memfine"`',
        "",
        "Written by `python -m benchmarks.coverage --experts-function`. Loss and every gradient are compared with "
        'transformers\' `"eager"`, by the same rule as above. '
        f"**Every layer chunked and exact: {_num_whole(taking)} of {len(taking)} families whose experts take a "
        f"function by name.** The others have experts of their own form: {', '.join(others)}.",
        "",
        *left,
        *([""] if left else []),
    ]


def _multimodal(rows: Sequence[MultimodalRow]) -> list[str]:
    """The section of deep models with images."""
    head = ["| name | built as | whole | layers | chunked | graphs | torch.compile | second call | error |"]
    return [
        "## Deep multimodal models with images",
        "",
        "Written by `python -m benchmarks.coverage --multimodal`. 14 text layers and 3 vision layers, `use_cache` at "
        "its default, one training step with an image and text, and a second one with two "
        "images and more text. Layers are counted by the shapes of their parameters.",
        "",
        "* *chunked*: regions run in a step, the smaller number of both steps.",
        "* *graphs*: those of the first step; *torch.compile*: those of plain `torch.compile` for the same step; "
        "*second call*: graphs that the second step adds.",
        "",
        *head,
        "|---" * 9 + "|",
        *(_multimodal_cells(row) for row in rows),
        "",
        *(f"* **{row.name}**: {row.failure or _refused_beside(row)}" for row in rows if row.failure or row.reasons),
        "",
    ]


def _refused_beside(row: MultimodalRow) -> str:
    beside = (
        "every layer is chunked, and the report also refuses what is none" if row.is_whole else "the report refuses"
    )
    return f"{beside}: {'; '.join(row.reasons)}"


def _multimodal_cells(row: MultimodalRow) -> str:
    mark = "yes" if row.is_whole else "partly" if row.num_raised else "no"
    layers = (row.num_layers, row.num_raised)
    graphs = (row.num_graphs, row.num_plain_graphs, row.num_later_graphs)
    cells = (row.name, row.built, "no result" if row.failure else mark, *layers, *graphs, _error(row))
    return f"| {' | '.join(map(str, cells))} |"


def _versions(rows: Sequence[VersionRow]) -> list[str]:
    """The section of several versions of transformers."""
    families = list(dict.fromkeys(row.name for row in rows))
    cells = {(row.version, row.name): row for row in rows}
    return [
        "### In other versions of transformers",
        "",
        "Written by `make coverage-versions`: layers chunked of layers, outputs and gradients compared as above. "
        "Up to 5.2 grouped matmuls reach a graph in bf16 alone: plain `torch.compile` fails there in fp32 too.",
        "",
        f"| transformers | {' | '.join(families)} |",
        "|---|" + "---|" * len(families),
        *(
            f"| {version} | {' | '.join(_of_version(cells.get((version, name))) for name in families)} |"
            for version in dict.fromkeys(row.version for row in rows)
        ),
        "",
    ]


def _of_version(row: VersionRow | None) -> str:
    if row is None:
        return "not tried"
    if row.failure:
        return "fails: " + row.failure.split(": ")[1]
    exact = "" if row.is_exact else ", **not exact**"
    return f"{row.num_raised} of {row.num_layers}{exact}"


def _packages(rows: Sequence[PackageRow]) -> list[str]:
    """The section of layers that are imported from the packages of the registry."""
    ran = [row for row in rows if row.worst_error is not None]
    packages = {row.package for row in ran}
    whole = {row.package for row in ran if row.is_whole}
    return [
        "## Layers as their packages ship them",
        "",
        "Written by `make coverage-packages`, in an environment of its own (`benchmarks/coverage/packages.txt`). Each "
        "layer is imported from its package and built at toy size by its own constructor; nothing is copied or "
        "changed. What the layer returns, losses too, and all gradients are compared as above.",
        "",
        f"**Chunked and exact: {_num_whole(ran)} of {len(ran)} configurations of layers, of {len(whole)} of "
        f"{len(packages)} packages.** Exact, chunked or not: {sum(row.is_exact for row in ran)} of {len(ran)}.",
        "",
        "| layer | package | class | chunked | graphs | error | peak |",
        "|---" * 7 + "|",
        *(_package_cells(row) for row in rows),
        "",
        "Why the others are not chunked:",
        "",
        *_reasons(rows),
        "",
    ]


def _package_cells(row: PackageRow) -> str:
    mark = "yes" if row.is_whole else "partly" if row.num_raised else "no"
    if row.worst_error is None:
        mark = NOT_INSTALLED if row.failure == NOT_INSTALLED else "does not run"
    peak = "" if row.peak_ratio is None else f"{row.peak_ratio:.2f}"
    cells = (row.name, f"{row.package} {row.version}", row.built, mark, row.num_graphs, _error(row), peak)
    return f"| {' | '.join(map(str, cells))} |"


def _num_whole(rows: Iterable[CoverageRow]) -> int:
    return sum(row.is_whole for row in rows)


def _table(rows: Iterable[CoverageRow]) -> list[str]:
    head = ["| name | built as | whole | layers | found | raised | graphs | error | peak |", "|---" * 9 + "|"]
    return head + [_cells(row) for row in rows]


def _cells(row: CoverageRow) -> str:
    mark = "yes" if row.is_whole else "partly" if row.num_raised else "no"
    peak = "" if row.peak_ratio is None else f"{row.peak_ratio:.2f}"
    cells = (row.name, row.built or "not built", mark, row.num_layers, row.num_found, row.num_raised, row.num_graphs)
    return f"| {' | '.join(map(str, cells))} | {_error(row)} | {peak} |"


def _error(row: CoverageRow) -> str:
    if row.worst_error is None:
        return ""
    if row.exact_error is None or row.eager_error is None:
        return f"{row.worst_error:.1e}"
    return f"{row.exact_error:.1e} / {row.eager_error:.1e}"


def _reasons(rows: Iterable[CoverageRow]) -> list[str]:
    return [f"* **{row.name}**: {_why(row)}" for row in rows if not row.is_whole]


def _example(form: Form) -> list[str]:
    rows = ", ".join(f"*{name}*" for name in form.rows)
    after = form.after.replace("'", '"')  # as `ruff format` writes the page's code
    return [f"**{form.name}** ({rows})", *_code(form.before), "runs as", *_code(after), ""]


def _code(text: str) -> list[str]:
    return ["```python", text, "```"]


def _why(row: CoverageRow) -> str:
    if row.failure:
        return row.failure.replace("\n", " ")
    if not row.is_exact:
        return f"error {_error(row)} in {row.worst_name}"
    return "; ".join(row.reasons) or f"no routing decision in what Dynamo captures of it (graphs: {row.num_graphs})"
