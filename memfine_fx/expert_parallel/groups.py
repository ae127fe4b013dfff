"""The ranks that share a model's experts, and their data-parallel replicas.

A device mesh of two dimensions is (replicas, experts): ranks of a row share the experts, ranks of a column hold the
same ones. Tokens are everybody's own, so all ranks are data-parallel for the dense part.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from memfine_fx.errors import ConfigError

__all__ = ["ExpertGroup", "MeshOrGroup", "expert_group", "registered"]

MeshOrGroup = DeviceMesh | dist.ProcessGroup
_EXPERT_DIM_NAMES = ("expert", "experts", "ep")


@dataclass(frozen=True)
class ExpertGroup:
    """Ranks that share experts.

    Args:
        mesh: of one dimension, or (replicas, experts).
        expert_dim: the mesh dimension along which experts are sharded.
        overlaps: whether rows of the next round travel while one computes; rows of two rounds are alive then.
        rows_per_round: the most rows that come to a rank at once; None: T K of its tokens, as even routing brings, or
            what its budget leaves.
        slots: S, room on every rank for clones of other ranks' experts; 0 for no replication (`help`).
        leaves_slots_open: whether S follows from the memory budget when a model is sharded.
    """

    mesh: DeviceMesh
    expert_dim: int
    overlaps: bool = False
    rows_per_round: int | None = None
    slots: int = 0
    leaves_slots_open: bool = False

    def with_slots(self, slots: int) -> ExpertGroup:
        """Return the same ranks with `slots` decided, and register them."""
        ranks = replace(self, slots=slots, leaves_slots_open=False)
        _groups[ranks.key] = ranks
        return ranks

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group(self.expert_dim)

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """Return the ranks with the same experts, or None where this is the only one."""
        if self.mesh.ndim == 1 or self.mesh.size(1 - self.expert_dim) == 1:
            return None
        return self.mesh.get_group(1 - self.expert_dim)

    @property
    def num_ranks(self) -> int:
        return self.mesh.size(self.expert_dim)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def node_ranks(self) -> int:
        """Return the ranks per node by torchrun's LOCAL_WORLD_SIZE; all ranks where they are not ordered by node."""
        everyone = dist.get_process_group_ranks(self.group)
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or len(everyone))
        first = everyone[0]
        are_consecutive = everyone == list(range(first, first + len(everyone)))
        fills_nodes = local > 0 and first % local == 0 and len(everyone) % local == 0
        return local if are_consecutive and fills_nodes else len(everyone)

    @property
    def device(self) -> torch.device:
        if self.mesh.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.mesh.device_type)

    @property
    def key(self) -> str:
        """Return the name by which graphs of this process refer to the group."""
        replicas = "" if self.replicas is None else f"/{self.replicas.group_name}"
        rounds = "" if self.rows_per_round is None else f"/{self.rows_per_round}"
        slots = f"/{self.slots} slots" if self.slots else ""
        return f"{self.group.group_name}{replicas}{'/overlaps' if self.overlaps else ''}{rounds}{slots}"

    def average(self, gradients: Sequence[torch.Tensor]) -> None:
        """Turn sums over the expert group into averages over all ranks of the mesh, in place.

        Gradients of experts are sums over the group's ranks by nature, because the rows of all reach their owner.
        Divided by their number and averaged over the replicas they are gradients of the mean of all ranks' losses, as
        DistributedDataParallel's are.
        """
        filled = [gradient for gradient in gradients if gradient.numel()]
        for gradient in filled:
            gradient.div_(self.num_ranks)
        if self.replicas is None:
            return
        num_replicas = dist.get_world_size(self.replicas)
        pending = [dist.all_reduce(gradient, group=self.replicas, async_op=True) for gradient in filled]
        for work, gradient in zip(pending, filled, strict=True):
            if work is not None:
                work.wait()
            gradient.div_(num_replicas)


_groups: dict[str, ExpertGroup] = {}


def registered(key: str) -> ExpertGroup:
    """Return the group that is registered under a key.

    Raises:
        KeyError: the group was made by another process.
    """
    return _groups[key]


def expert_group(
    mesh_or_group: MeshOrGroup, *, overlaps: bool = False, rows_per_round: int | None = None, slots: int | None = None
) -> ExpertGroup:
    """Return the ranks that a mesh or process group names, and register them under their key.

    Args:
        mesh_or_group: a process group, or a `DeviceMesh` of one dimension, or of two: the one named "expert", "experts"
            or "ep", or else the last, shards experts and the other replicates them.
        overlaps, rows_per_round: see `ExpertGroup`.
        slots: S; 0 for no replication. None: two where a memory budget gives room for them, none without a budget
            (`shard.shard_experts`).

    Raises:
        ConfigError: it is something else, torch.distributed is not initialized, rounds would have no rows, or slots are
            fewer than none.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("expert_parallel needs torch.distributed: call torch.distributed.init_process_group first")
    if rows_per_round is not None and rows_per_round < 1:
        raise ConfigError(f"rows_per_round must be at least 1, got {rows_per_round}")
    if slots is not None and slots < 0:
        raise ConfigError(f"slots must be at least 0, got {slots}")
    if isinstance(mesh_or_group, DeviceMesh):
        mesh = mesh_or_group
    elif isinstance(mesh_or_group, dist.ProcessGroup):
        device_type = "cuda" if "nccl" in dist.get_backend(mesh_or_group) else "cpu"
        mesh = DeviceMesh.from_group(mesh_or_group, device_type)
    else:
        raise ConfigError(f"expert_parallel must be a DeviceMesh or a ProcessGroup, got {type(mesh_or_group).__name__}")
    if mesh.ndim > 2:
        raise ConfigError(
            f"expert_parallel got a mesh of {mesh.ndim} dimensions; expected (experts) or (replicas, experts): "
            "flatten the others into replicas"
        )
    names = mesh.mesh_dim_names or ()
    named = [dim for dim, name in enumerate(names) if name in _EXPERT_DIM_NAMES]
    ranks = ExpertGroup(mesh, named[0] if named else mesh.ndim - 1, overlaps, rows_per_round, slots or 0, slots is None)
    _groups[ranks.key] = ranks
    return ranks
