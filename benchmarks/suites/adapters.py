"""Fine-tuning of one layer: adapters on its experts, its tables in full or packed, against everything that runs it."""

from collections.abc import Sequence

from benchmarks.records import Row, Sizes
from benchmarks.suites.base import Part, Suite, at_most
from benchmarks.summaries import Summary, summaries_of
from benchmarks.workloads.adapted import WORKLOADS

FULL = tuple(Sizes(batch=1, sequence=8192, hidden=512, width=1024, experts=experts, top_k=4) for experts in (64, 128))
QUICK = Sizes(batch=1, sequence=512, hidden=128, width=256, experts=16, top_k=2)
_PEERS = ("eager", "compile", "eager+checkpoint", "loop", "memfine")
_WITH_MORE_EXPERTS = ("frozen", "lora", "nf4", "nf4+lora")
_MOST_OF_EAGER, _MOST_OF_FROZEN, _MOST_TIME, _MOST_OF_A_TABLE = 0.25, 1.05, 1.0, 0.125


def _parts(quick: bool) -> Sequence[Part]:
    sizes = (QUICK,) if quick else FULL
    return [
        Part(workload, one, "float32", _PEERS)
        for one in sizes
        for workload in (WORKLOADS if one is not FULL[1] else _WITH_MORE_EXPERTS)
    ]


def _conclude(rows: Sequence[Row]) -> str:
    summaries = [one for one in summaries_of(rows) if one.job.sizes in FULL]
    if not summaries:
        return f"Targets are set for {FULL}"
    found = {(one.job.workload, one.job.sizes, one.job.peer): one for one in summaries}
    lines = [line for key, one in found.items() if key[2] == "memfine" for line in _judged(one, found)]
    return "\n".join(["Targets", *lines])


def _judged(one: Summary, found: dict[tuple[str, Sizes, str], Summary]) -> list[str]:
    job = one.job
    about = f"{job.workload}, E={job.sizes.experts}"
    eager = found.get((job.workload, job.sizes, "eager"))
    frozen = found.get(("frozen", job.sizes, "memfine"))
    table_bytes = 4 * job.sizes.experts * 2 * job.sizes.width * job.sizes.hidden
    largest = (one.last.largest_bytes or 0) / table_bytes
    lines = [at_most(f"{about}: largest allocation against the larger table", largest, _MOST_OF_A_TABLE)]
    if eager is not None:
        lines.append(at_most(f"{about}: peak against eager", one.peak_bytes / eager.peak_bytes, _MOST_OF_EAGER))
        lines.append(at_most(f"{about}: time against eager", one.step_seconds / eager.step_seconds, _MOST_TIME))
    if frozen is not None:
        # A measured peak is beyond the gradients that the step leaves behind, so that none are taken off here.
        share = one.peak_bytes / frozen.peak_bytes
        what = "peak beyond gradients against frozen experts without adapters"
        lines.append(at_most(f"{about}: {what}", share, _MOST_OF_FROZEN))
    return lines


ADAPTERS = Suite("adapters", "one layer with frozen, packed and adapted experts", _parts, conclude=_conclude)
