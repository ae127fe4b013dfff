"""What one expert-parallel rank computes in MemFine's run: the same eight experts under each printed layer's load.

The rank that holds a layer's eight hottest experts receives s' rows, 3 to 18 times the balanced number. Here
those rows come from s' / K tokens of K choices each, on eight experts with the printed skew, in one process:
nothing is sent, and the block is the unmodified one. One step runs forward and backward of layers 4 to 15 one
after the other, so its peak is the worst layer's, as with full recomputation in the paper (one set of
activations alive). All layers share one set of weights.
"""

from dataclasses import replace

import torch

from benchmarks.records import Job, Sizes
from benchmarks.workloads import Workload, normalised_product
from benchmarks.workloads.layer import build_layer
from memfine_fx.memory.published import IMBALANCE, Imbalance, rank_rows


def sizes_of_layer(sizes: Sizes, imbalance: Imbalance) -> Sizes:
    """`sizes` are the most loaded layer's; the others have tokens in proportion to their rows."""
    share = rank_rows(imbalance) / max(rank_rows(other) for other in IMBALANCE)
    return replace(sizes, batch=1, sequence=max(1, round(sizes.sequence * share)))


def build_rank_workload(job: Job) -> Workload:
    layer = build_layer(job)
    sizes = [sizes_of_layer(job.sizes, one) for one in IMBALANCE]
    parts = [
        layer.workload(*layer.draw(size, f"paper:{one.layer}")) for size, one in zip(sizes, IMBALANCE, strict=True)
    ]
    leaves: dict[str, torch.Tensor] = {}
    for one, part in zip(IMBALANCE, parts, strict=True):
        leaves |= {f"hidden {one.layer}" if name == "hidden" else name: leaf for name, leaf in part.leaves.items()}

    def step() -> torch.Tensor:
        for part in parts[:-1]:
            part.step()
        return parts[-1].step()

    return Workload(
        step=step,
        step_with_shape=parts[0].step_with_shape,
        leaves=leaves,
        value_of=normalised_product,
        series={
            "layer": tuple(float(one.layer) for one in IMBALANCE),
            "rows": tuple(float(size.routed_rows) for size in sizes),
        },
        parts=tuple(part.step for part in parts),
    )
