"""The suites, found by themselves wherever a module here defines a `Suite`, and their jobs."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import torch

import memfine_fx
from benchmarks.peers import find_peer, peer_names
from benchmarks.records import Job
from benchmarks.suites.base import Part, Suite

__all__ = ["SUITES", "Part", "Suite", "device_of", "jobs_of"]


def _found() -> Iterator[Suite]:
    for module in iter_modules(__path__):
        yield from (one for one in vars(import_module(f"{__name__}.{module.name}")).values() if isinstance(one, Suite))


SUITES = {suite.name: suite for suite in _found()}


def jobs_of(
    suite: str, *, quick: bool, peers: Sequence[str] | None, steps: int, workloads: Sequence[str] | None = None
) -> list[Job]:
    """The suite's jobs, table by table.

    Args:
        peers: those named in place of the suite's own.
        workloads: those named only.

    Raises:
        ValueError: a name that no workload of the suite has, or that no workload has.
    """
    parts = SUITES[suite].parts(quick)
    if missing := set(workloads or ()) - {part.workload for part in parts}:
        raise ValueError(f"suite {suite!r} has no workloads {sorted(missing)}")
    parts = [part for part in parts if workloads is None or part.workload in workloads]
    if unknown := [name for name in peers or () if not any(_known(part, [name]) for part in parts)]:
        known = sorted({name for part in parts for name in peer_names(part.workload)})
        raise ValueError(f"suite {suite!r} has no peers {unknown}; it has {known}")
    source = digest_of_sources()
    return [
        Job(
            suite=suite,
            workload=part.workload,
            peer=peer.name,
            sizes=part.sizes,
            dtype=part.dtype,
            device=device_of(SUITES[suite]),
            seed=0,
            steps=part.steps or steps,
            source=source if peer.is_memfine else "",
            load=part.load,
            points=part.points,
            limit_bytes=part.limit_bytes,
        )
        for part in parts
        for name in (part.peers if peers is None else _known(part, peers))
        for peer in [find_peer(part.workload, name)]
    ]


def device_of(suite: Suite) -> str:
    """ "cpu" or "cuda"."""
    if suite.device == "any":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return suite.device


def _known(part: Part, names: Sequence[str]) -> list[str]:
    """Those of the names that the part's workload has."""
    found = []
    for name in names:
        with suppress(KeyError):
            found.append(find_peer(part.workload, name).name)
    return found


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
