"""Correctness, one layer and one model on a CUDA device; machines with one may be lent by the minute.

What matters most comes first, the suite stops by itself, and goes on when it is run again.
"""

from collections.abc import Sequence

from benchmarks.records import Sizes
from benchmarks.suites.base import Part, Suite

_MODEL_PEERS = ("memfine", "compile+checkpoint", "compile", "eager+checkpoint", "eager", "memfine+checkpoint")
_LAYER_PEERS = (
    "memfine", "memfine-kernels", "memfine-kernels-w8", "eager", "compile", "eager+checkpoint", "compile+checkpoint",
    "memfine-R16384",
)  # fmt: skip
_FURTHER_LAYER_PEERS = (
    "scattermoe", "sonicmoe", "megablocks", "deepspeed-tiled", "liger-tiled", "unsloth-tiled", "diy",
)  # fmt: skip
_GRADIENT_PEERS = ("eager", "memfine", "memfine-R2048", "memfine-kernels", "memfine-kernels-w8")
_LAYER = Sizes(batch=1, sequence=32768, hidden=2048, width=768, experts=128, top_k=8)
_LAYER_QUICK = Sizes(batch=1, sequence=8192, hidden=1024, width=512, experts=32, top_k=4)
_MODEL = Sizes(
    batch=4, sequence=4096, hidden=2048, width=768, experts=64, top_k=8, layers=8, heads=16, kv_heads=4, head_dim=128,
    vocab=8192,
)  # fmt: skip
_MODEL_QUICK = Sizes(
    batch=2, sequence=1024, hidden=512, width=512, experts=16, top_k=4, layers=2, heads=8, kv_heads=4, head_dim=64,
    vocab=2048,
)  # fmt: skip
# The last one leaves most experts with a handful of rows, and some with none.
_GRADIENT_SIZES = (
    Sizes(batch=1, sequence=4096, hidden=1024, width=512, experts=32, top_k=4),
    Sizes(batch=2, sequence=1000, hidden=2048, width=768, experts=64, top_k=8),
    Sizes(batch=1, sequence=24, hidden=512, width=256, experts=64, top_k=2),
)


def _parts(quick: bool) -> Sequence[Part]:
    gradients = _GRADIENT_SIZES[1:] if quick else _GRADIENT_SIZES
    layer = _LAYER_QUICK if quick else _LAYER
    return [
        *(Part("gradients", sizes, "bfloat16", _GRADIENT_PEERS) for sizes in gradients),
        Part("layer", layer, "bfloat16", _LAYER_PEERS),
        Part("model", _MODEL_QUICK if quick else _MODEL, "bfloat16", _MODEL_PEERS),
        Part("layer", layer, "bfloat16", _FURTHER_LAYER_PEERS),
    ]


SUITE = Suite(
    "gpu",
    "gradients, one layer and one model on a CUDA device",
    _parts,
    rounds=1,
    device="cuda",
    job_limit_s=140.0,
    total_limit_s=400.0,
)
