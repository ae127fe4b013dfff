"""The lists of jobs behind ``--suite layer``, ``model`` and ``gpu``."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import memfine_fx
from benchmarks.peers import PEERS_OF
from benchmarks.records import Job, Sizes

SUITES = ("layer", "model", "gpu")

_MODEL_PEERS = ("eager", "eager+checkpoint", "compile", "compile+checkpoint", "memfine", "memfine+checkpoint")
_LAYER_PEERS = (
    "eager",
    "eager+checkpoint",
    "compile",
    "compile+checkpoint",
    "diy",
    "diy+compile",
    "memfine",
    "memfine-R2048",
    "memfine-R512",
    "memfine-tokens",
)
_BF16_PEERS = (
    "eager",
    "eager+checkpoint",
    "compile",
    "compile+checkpoint",
    "diy",
    "memfine",
    "memfine-R2048",
)
# Machines with a GPU may be lent by the minute: what matters most comes first.
_GPU_MODEL_PEERS = (
    "memfine",
    "compile+checkpoint",
    "compile",
    "eager+checkpoint",
    "eager",
    "memfine+checkpoint",
)
_GPU_LAYER_PEERS = ("memfine", "eager", "compile", "eager+checkpoint", "compile+checkpoint", "memfine-R16384")
_GRADIENT_PEERS = ("eager", "memfine", "memfine-R2048")

_LAYER = Sizes(batch=1, sequence=8192, hidden=512, width=1024, experts=16, top_k=4)
_LAYER_QUICK = Sizes(batch=1, sequence=1024, hidden=128, width=256, experts=8, top_k=2)
_MODEL = Sizes(
    batch=2,
    sequence=2048,
    hidden=512,
    width=512,
    experts=16,
    top_k=4,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=64,
    vocab=2048,
)
_MODEL_QUICK = Sizes(
    batch=2,
    sequence=256,
    hidden=128,
    width=128,
    experts=8,
    top_k=2,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=512,
)
_GPU_LAYER = Sizes(batch=1, sequence=32768, hidden=2048, width=768, experts=128, top_k=8)
_GPU_LAYER_QUICK = Sizes(batch=1, sequence=8192, hidden=1024, width=512, experts=32, top_k=4)
_GPU_MODEL = Sizes(
    batch=4,
    sequence=4096,
    hidden=2048,
    width=768,
    experts=64,
    top_k=8,
    layers=8,
    heads=16,
    kv_heads=4,
    head_dim=128,
    vocab=8192,
)
_GPU_MODEL_QUICK = Sizes(
    batch=2,
    sequence=1024,
    hidden=512,
    width=512,
    experts=16,
    top_k=4,
    layers=2,
    heads=8,
    kv_heads=4,
    head_dim=64,
    vocab=2048,
)
# The last one leaves most experts with a handful of rows, and some with none.
_GRADIENT_SIZES = (
    Sizes(batch=1, sequence=4096, hidden=1024, width=512, experts=32, top_k=4),
    Sizes(batch=2, sequence=1000, hidden=2048, width=768, experts=64, top_k=8),
    Sizes(batch=1, sequence=24, hidden=512, width=256, experts=64, top_k=2),
)


@dataclass(frozen=True)
class _Part:
    """One table of a suite."""

    workload: str
    sizes: Sizes
    dtype: str
    peers: tuple[str, ...]


def jobs_of(suite: str, *, quick: bool, peers: Sequence[str] | None, steps: int) -> list[Job]:
    """The suite's jobs, table by table. ``peers`` keeps only those named.

    Raises:
        ValueError: a name that no workload of the suite has.
    """
    parts = _parts_of(suite, quick)
    known = {name for part in parts for name in PEERS_OF[part.workload]}
    if unknown := sorted(set(peers or ()) - known):
        raise ValueError(f"suite {suite!r} has no peers {unknown}; it has {sorted(known)}")
    source = digest_of_sources()
    return [
        Job(
            suite=suite,
            workload=part.workload,
            peer=name,
            sizes=part.sizes,
            dtype=part.dtype,
            device="cuda" if suite == "gpu" else "cpu",
            seed=0,
            steps=steps,
            source=source if PEERS_OF[part.workload][name].is_memfine else "",
        )
        for part in parts
        for name in _chosen(part, peers)
    ]


def _chosen(part: _Part, peers: Sequence[str] | None) -> Iterable[str]:
    if peers is None:
        return part.peers
    return [name for name in PEERS_OF[part.workload] if name in peers]


def _parts_of(suite: str, quick: bool) -> list[_Part]:
    if suite == "layer":
        sizes = _LAYER_QUICK if quick else _LAYER
        return [
            _Part("layer", sizes, "float32", _LAYER_PEERS),
            _Part("layer", sizes, "bfloat16", _BF16_PEERS),
        ]
    if suite == "model":
        return [_Part("model", _MODEL_QUICK if quick else _MODEL, "float32", _MODEL_PEERS)]
    gradients = _GRADIENT_SIZES[1:] if quick else _GRADIENT_SIZES
    return [
        *(_Part("gradients", sizes, "bfloat16", _GRADIENT_PEERS) for sizes in gradients),
        _Part("layer", _GPU_LAYER_QUICK if quick else _GPU_LAYER, "bfloat16", _GPU_LAYER_PEERS),
        _Part("model", _GPU_MODEL_QUICK if quick else _GPU_MODEL, "bfloat16", _GPU_MODEL_PEERS),
    ]


def digest_of_sources() -> str:
    """Of memfine_fx's own code, so that finished rows of an older compiler are not taken for this one's."""
    digest = hashlib.sha256()
    root = Path(memfine_fx.__file__).parent
    for folder, subfolders, names in os.walk(root, followlinks=True):
        subfolders[:] = sorted(name for name in subfolders if name != "demo")
        for name in sorted(names):
            if name.endswith(".py"):
                digest.update(name.encode() + (Path(folder) / name).read_bytes())
    return digest.hexdigest()[:12]
