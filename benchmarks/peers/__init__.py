"""What users would pick, and ours: every peer by name, one file a kind."""

from benchmarks.peers import chunked, kernels, ours, plain
from benchmarks.peers.base import Forward, Peer, Recompute

__all__ = ["Forward", "Peer", "Recompute", "find_peer", "peer_names"]

_LAYER = {peer.name: peer for module in (plain, chunked, kernels, ours) for peer in module.LAYER}
_MODEL = {peer.name: peer for module in (plain, chunked, ours) for peer in module.MODEL}
_FAMILIES = (chunked.family_member, ours.family_member)


def find_peer(workload: str, name: str) -> Peer:
    """The peer of this name for a workload: "model", one of an architecture ("model:mixtral"), or any of one layer.

    Raises:
        KeyError: there is none.
    """
    listed = _peers_of(workload)
    if name in listed:
        return listed[name]
    for family_member in _FAMILIES if not _is_model(workload) else (ours.model_family_member,):
        if (peer := family_member(name)) is not None:
            return peer
    raise KeyError(name)


def peer_names(workload: str) -> list[str]:
    """Names listed for a workload; families (memfine-R512, diy-c4, memfine-800MB) have more."""
    return list(_peers_of(workload))


def _peers_of(workload: str) -> dict[str, Peer]:
    return _MODEL if _is_model(workload) else _LAYER


def _is_model(workload: str) -> bool:
    return workload.partition(":")[0] == "model"
