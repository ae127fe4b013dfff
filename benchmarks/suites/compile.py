"""What compiling costs: cold, with a filled cache, and as chunks and layers grow."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.records import Row, Sizes
from benchmarks.suites.base import Part, Suite, at_most
from benchmarks.suites.model import QUICK as _MODEL
from benchmarks.summaries import align, by_key

_LAYER = Sizes(batch=1, sequence=4096, hidden=128, width=256, experts=8, top_k=2)
_LAYER_PEERS = (
    "compile", "compile+checkpoint", "diy-c4+compile", "diy-c16+compile", "memfine", "memfine-R512", "memfine-tokens",
)  # fmt: skip
_MODEL_PEERS = ("compile", "memfine", "memfine-by-layer")
_LAYERS = (4, 12, 24)
_MOST = {"cold": 1.05, "warm": 1.2}
_MOST_BY_LAYER = {"cold": 0.5}
"""Of torch.compile's seconds; by layer, in the deepest model, whose layers are compiled once."""


def _parts(quick: bool) -> Sequence[Part]:
    if quick:
        return [Part("layer", _LAYER, "float32", ("compile", "memfine"), steps=1)]
    return [
        Part("layer", _LAYER, "float32", _LAYER_PEERS, steps=2),
        *(Part("model", replace(_MODEL, layers=layers), "float32", _MODEL_PEERS, steps=2) for layers in _LAYERS),
    ]


def _conclude(rows: Sequence[Row]) -> str:
    """Cold and warm seconds beside each other."""
    cells = [["peer", "sizes", "cold s", "warm s", "graphs", "recompiled in 5 shapes"]]
    plain: dict[str, dict[str, float]] = {}
    verdicts = []
    for same in by_key(rows).values():
        job, measured = same[0].job, [row.measurement for row in same if row.measurement is not None]
        if measured:
            cold, warm = ([one.compile_seconds for one in measured if one.cold is cold] for cold in (True, False))
            seconds = [f"{found[0]:.1f}" if found else "-" for found in (cold, warm)]
            here = {name: found[0] for name, found in (("cold", cold), ("warm", warm)) if found}
            if job.workload == "model" and job.peer == "compile":
                plain[str(job.sizes)] = here
            elif job.workload == "model":
                beside = plain.get(str(job.sizes), {})
                most = _MOST
                if job.peer == "memfine-by-layer":
                    most = _MOST_BY_LAYER if job.sizes.layers == max(_LAYERS) else {}
                verdicts += [
                    at_most(
                        f"{job.peer}, {job.sizes}: {name} seconds of torch.compile's", here[name] / beside[name], limit
                    )
                    for name, limit in most.items()
                    if name in here and name in beside
                ]
            again = "-" if measured[-1].recompilations is None else str(measured[-1].recompilations)
            cells.append([job.peer, f"{job.workload}, {job.sizes}", *seconds, str(measured[-1].graphs), again])
    heading = "Compile time: an empty cache of Inductor's, and a second process with it filled"
    return "\n".join([heading, align(cells), *verdicts])


SUITE = Suite(
    "compile", "compile time, cold and warm", _parts, rounds=2, quick_rounds=2, empties_caches=True, conclude=_conclude
)
