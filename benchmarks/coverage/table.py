"""docs/coverage.md from the stored rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.coverage.forms import FORMS
from benchmarks.coverage.rows import (
    EAGER_FACTOR,
    EXPERTS_FUNCTION,
    NO_FUNCTION,
    NOT_INSTALLED,
    ROUTING_REPLAY,
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
    of_kinds: Mapping[str, Sequence[CoverageRow]],
) -> str:
    """The whole page.

    Args:
        rows: of families and spellings.
        packaged: of layers as their packages ship them.
        by_version: of a few families in several versions of transformers.
        multimodal: of deep models with images.
        versions: of transformers and torch, in words.
        of_kinds: of families that `experts_implementation="memfine"` chunks, and that replay a routing.
    """
    families = [row for row in rows if row.kind == "family"]
    spellings = [row for row in rows if row.kind == "spelling"]
    return "\n".join(
        [
            "# Coverage",
            "",
            f"Written by `python -m benchmarks.coverage`; do not edit. {versions}, toy sizes (H=32, E=4, K up to 2, "
            "T=128), fp32, train mode, inner compiler eager, 16 rows a chunk.",
            "",
            f"**Every layer chunked and exact: {_num_whole(families)} of {len(families)} transformers families with "
            f"experts, {_num_whole(spellings)} of {len(spellings)} hand-written spellings.** The list has every family "
            "whose source defines a class of experts.",
            "",
            "* *chunked*: chunked layers / layers of experts in the toy model.",
            "* *error*: worst relative error of outputs and gradients against the unmodified model, below "
            f"{TOLERANCE:g}. `a / b`: an ill-conditioned tensor; a is the distance to the unmodified model in fp64, b "
            f"that of the unmodified model in fp32, and a is below {EAGER_FACTOR:g} b.",
            "* *peak*: memory of a step beyond parameters and gradients, over that of the same graph not rewritten. At "
            "toy sizes this shows that routed rows are gone, not what a real model saves.",
            "",
            "## Transformers families",
            "",
            *_table(families),
            "",
            *_versions(by_version),
            *_experts_functions(of_kinds[EXPERTS_FUNCTION]),
            *_replays(of_kinds[ROUTING_REPLAY]),
            *_multimodal(multimodal),
            "## Hand-written spellings",
            "",
            *_spellings(spellings),
            "",
            "## What is not whole, and why",
            "",
            *_reasons(rows),
            "",
            "## What is not compared with the model's own code",
            "",
            "A new kind of chunked layer is compared with its own code, run eagerly "
            "([Reliability](reliability.md)). These were not:",
            "",
            *_listed((row.name, "; ".join(row.uncompared)) for row in (*rows, *packaged) if row.uncompared),
            "",
            "## Rewritten source",
            "",
            "Some expert loops reach no graph as written. Methods with such loops are rewritten for the time of a "
            f"compiled call, in {len(FORMS)} forms: `benchmarks/coverage/forms.py` has each, its rows, and the code "
            "before and after. A loop that does more than its form allows stays as written.",
            "",
            *_packages(packaged),
        ]
    )


def _experts_functions(rows: Sequence[CoverageRow]) -> list[str]:
    """The section of families that are chunked without a compiler."""
    taking = [row for row in rows if row.failure != NO_FUNCTION]
    others = [row.name for row in rows if row.failure == NO_FUNCTION]
    left = _left(taking)
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


def _replays(rows: Sequence[CoverageRow]) -> list[str]:
    """The section of families under a routing that they are given."""
    left = _left(rows)
    return [
        "## Routing replay",
        "",
        "Written by `python -m benchmarks.coverage --replay`. A family replays the routing that was recorded of it, "
        "bit by bit the same outputs and gradients, and a routing that gives experts in turn, compared with the "
        "unmodified model whose choices are forced. "
        f"**Every layer recorded and replayed: {_num_whole(rows)} of {len(rows)} families.**",
        "",
        *left,
        *([""] if left else []),
    ]


def _left(rows: Iterable[CoverageRow]) -> list[str]:
    whys = [(row.name, _brief_reason(row)) for row in rows if not row.is_whole]
    return [f"* {name}: {why}" for name, why in whys]


def _brief_reason(row: CoverageRow) -> str:
    if row.failure:
        return row.failure.rpartition("cannot be replayed: ")[2].removeprefix("RoutingReplayError: ")
    if row.num_raised < row.num_layers:
        return f"{row.num_raised} of {row.num_layers} layers are chunked"
    return "; ".join(row.reasons) or _error(row)


def _multimodal(rows: Sequence[MultimodalRow]) -> list[str]:
    """The section of deep models with images."""
    head = ["| name | chunked | graphs | torch.compile | second call | error |"]
    return [
        "## Deep multimodal models with images",
        "",
        "Written by `python -m benchmarks.coverage --multimodal`. 14 text and 3 vision layers; one training step with "
        "an image, a second one with two images and more text.",
        "",
        "* *graphs*: of the first step; *torch.compile*: graphs of plain `torch.compile` for the same step; *second "
        "call*: graphs that the second step adds.",
        "",
        *head,
        "|---" * 6 + "|",
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
    graphs = (row.num_graphs, row.num_plain_graphs, row.num_later_graphs)
    cells = (row.name.removesuffix(" with images"), "no result" if row.failure else _share(row), *graphs, _error(row))
    return f"| {' | '.join(map(str, cells))} |"


def _versions(rows: Sequence[VersionRow]) -> list[str]:
    """The section of several versions of transformers."""
    families = list(dict.fromkeys(row.name for row in rows))
    cells = {(row.version, row.name): row for row in rows}
    return [
        "### In other versions of transformers",
        "",
        "Written by `make coverage-versions`: chunked layers / layers, compared as above. Up to 5.2, plain "
        "`torch.compile` fails in fp32 too.",
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
    return _share(row)


def _packages(rows: Sequence[PackageRow]) -> list[str]:
    """The section of layers that are imported from the packages of the registry."""
    ran = [row for row in rows if row.worst_error is not None]
    packages = {row.package for row in ran}
    whole = {row.package for row in ran if row.is_whole}
    return [
        "## Layers as their packages ship them",
        "",
        "Written by `make coverage-packages` (`benchmarks/coverage/packages.txt`). Each layer is imported from its "
        "package, unchanged, at toy size. Outputs, losses and gradients are compared as above.",
        "",
        f"**Chunked and exact: {_num_whole(ran)} of {len(ran)} configurations of layers, of {len(whole)} of "
        f"{len(packages)} packages.** Exact, chunked or not: {sum(row.is_exact for row in ran)} of {len(ran)}.",
        "",
        "| layer | package | chunked | error | peak |",
        "|---" * 5 + "|",
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
    cells = (row.name, f"{row.package} {row.version}", mark, _error(row), peak)
    return f"| {' | '.join(map(str, cells))} |"


def _num_whole(rows: Iterable[CoverageRow]) -> int:
    return sum(row.is_whole for row in rows)


def _table(rows: Sequence[CoverageRow]) -> list[str]:
    head = "| name | built as | chunked | error | peak |"
    return [head, "|---" * 5 + "|", *map(_cells, rows)]


def _cells(row: CoverageRow) -> str:
    peak = "" if row.peak_ratio is None else f"{row.peak_ratio:.2f}"
    return f"| {' | '.join((row.name, row.built or 'not built', _share(row), _error(row), peak))} |"


def _spellings(rows: Sequence[CoverageRow]) -> list[str]:
    """How many rows are whole, precise and save memory, with ranges; a line of the table for each other row."""
    usual = [row for row in rows if row.is_whole and row.exact_error is None and (row.peak_ratio or 1.0) < 1.0]
    others = [row for row in rows if row not in usual]
    if not usual:
        return _table(others)
    peaks = sorted(row.peak_ratio or 0.0 for row in usual)
    error = max(row.worst_error or 0.0 for row in usual)
    summary = (
        f"{len(usual)} are chunked and exact, with an error of at most {error:.1e} and a peak of {peaks[0]:.2f} to "
        f"{peaks[-1]:.2f} (median {peaks[len(peaks) // 2]:.2f}); `benchmarks/coverage/spellings.py` has their names."
    )
    return [summary, *(["", *_table(others)] if others else [])]


def _share(row: CoverageRow) -> str:
    """Chunked layers over layers, in bold where not every layer is chunked and exact."""
    share = f"{row.num_raised}/{row.num_layers}"
    if row.is_whole:
        return share
    return f"**{share}**" if row.is_exact else f"**{share}, not exact**"


def _error(row: CoverageRow) -> str:
    if row.worst_error is None:
        return ""
    if row.exact_error is None or row.eager_error is None:
        return f"{row.worst_error:.1e}"
    return f"{row.exact_error:.1e} / {row.eager_error:.1e}"


def _reasons(rows: Iterable[CoverageRow]) -> list[str]:
    return _listed((row.name, _why(row)) for row in rows if not row.is_whole)


def _listed(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each reason, with all rows that have it."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons:
        names.setdefault(reason, []).append(f"**{name}**")
    return [f"* {', '.join(ones)}: {reason}" for reason, ones in names.items()]


def _why(row: CoverageRow) -> str:
    if row.failure:
        return row.failure.replace("\n", " ")
    if not row.is_exact:
        return f"error {_error(row)} in {row.worst_name}"
    return "; ".join(row.reasons) or f"no routing decision in what Dynamo captures of it (graphs: {row.num_graphs})"
