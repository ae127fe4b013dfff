"""Clones of hot experts beside everything else that a training step may be, against one process with all tokens.

Every case runs twice from the same state, so that sums in another order would be seen.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfine_fx
from memfine_fx.compiler.optimized import optimized_call
from memfine_fx.expert_parallel import sharded
from memfine_fx.expert_parallel.clones import Clones
from memfine_fx.expert_parallel.exchange import Exchange
from memfine_fx.expert_parallel.groups import expert_group
from memfine_fx.expert_parallel.shard import sharded_parameters
from memfine_fx.models._experts import GatedExperts, GatheredRows

HIDDEN, WIDTH, EXPERTS, TOP_K, RANK = 8, 12, 5, 2, 3
TOKENS = 24
"""Of each micro-batch on each rank but the last, which has none in the second."""


class Adapted(nn.Module):
    """Frozen tables with low-rank updates: of each expert its own, on the rows or merged, or one half of all."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) * 0.3, requires_grad=False)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.3, requires_grad=False)
        shape = (RANK, HIDDEN) if how == "shared" else (EXPERTS, RANK, HIDDEN)
        self.lora_a = nn.Parameter(torch.randn(shape) * 0.3)
        self.lora_b = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, RANK) * 0.3)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        routed = GatheredRows.from_index(index)
        rows = routed.take(hidden)
        if self.how == "merged":
            both = routed.linear(rows, self.gate_up_proj + torch.bmm(self.lora_b, self.lora_a))
        else:
            low = rows @ self.lora_a.t() if self.how == "shared" else routed.linear(rows, self.lora_a)
            both = routed.linear(rows, self.gate_up_proj) + routed.linear(low, self.lora_b)
        gate, up = both.chunk(2, dim=-1)
        return routed.combine(routed.linear(nn.functional.silu(gate) * up, self.down_proj), weight)


class Block(nn.Module):
    """Experts behind a dense layer, in a residual; recomputed by torch where it is checkpointed."""

    def __init__(self, experts: nn.Module, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.experts = experts
        self.is_checkpointed = is_checkpointed

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = self.dense(hidden)
        if self.is_checkpointed:
            found: torch.Tensor = checkpoint(self.experts, rows, index, weight, use_reentrant=False)
            return hidden + found
        return hidden + self.experts(rows, index, weight)


def _plain() -> nn.Module:
    return Block(GatedExperts(EXPERTS, HIDDEN, WIDTH, "gathered"))


def _checkpointed() -> nn.Module:
    return Block(GatedExperts(EXPERTS, HIDDEN, WIDTH, "gathered"), is_checkpointed=True)


def _frozen(*names: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        block = _plain()
        for name in names:
            block.get_parameter(f"experts.{name}").requires_grad_(False)
        return block

    return build


@dataclass(frozen=True)
class ReplicationCase:
    """One way to train.

    Args:
        build: the whole model.
        num_sent_back: tables whose gradients clones return.
        batches: micro-batches whose gradients are summed; "late" runs all forwards before the first backward.
        routes: of the micro-batches: which experts the rows of rank r go to.
        inner, budget: see `Config`.
    """

    name: str
    build: Callable[[], nn.Module] = _plain
    num_sent_back: int = 2
    batches: int = 1
    is_late: bool = False
    routes: Sequence[str] = ("first", "random", "last")
    inner: Any = "eager"
    budget: str | None = None


CASES = (
    ReplicationCase("plain"),
    ReplicationCase("frozen experts", _frozen("gate_up_proj", "down_proj"), num_sent_back=0),
    ReplicationCase("one table frozen", _frozen("down_proj"), num_sent_back=1),
    ReplicationCase("accumulated", batches=3),
    ReplicationCase("accumulated, all forwards first", batches=3, is_late=True),
    ReplicationCase("accumulated, in a compiled backward", batches=3, inner="aot_eager"),
    ReplicationCase("checkpointed", _checkpointed),
    ReplicationCase("checkpointed, accumulated, all forwards first", _checkpointed, batches=3, is_late=True),
    ReplicationCase("checkpointed, in a compiled backward", _checkpointed, inner="aot_eager"),
    ReplicationCase("adapters on rows", lambda: Block(Adapted("rows")), num_sent_back=2),
    ReplicationCase("merged adapters", lambda: Block(Adapted("merged")), num_sent_back=2),
    ReplicationCase("adapters with one half of all", lambda: Block(Adapted("shared")), num_sent_back=1),
    ReplicationCase("kept", inner="aot_eager", budget="1GiB"),
    ReplicationCase("kept, accumulated, all forwards first", inner="aot_eager", budget="1GiB", batches=3, is_late=True),
)
ON_TWO_NODES = ("plain", "one table frozen", "merged adapters", "kept, accumulated, all forwards first")


def cases(num_ranks: int) -> list[ReplicationCase]:
    """Four ranks are two nodes, where clones travel otherwise; what a step else is does not depend on that."""
    return [case for case in CASES if num_ranks == 2 or case.name in ON_TWO_NODES]


@dataclass
class ReplicationOutcome:
    """What one rank saw of a case.

    Args:
        errors: largest relative error by tensor.
        is_repeatable: whether a second run had the same bits.
        num_clones: in the latest step, on all ranks.
        num_returned: gradients of clones that this rank sent to their owners.
        refusal: why the experts were not chunked.
        policy: what is saved for backward.
    """

    errors: dict[str, float] = field(default_factory=dict)
    is_repeatable: bool = True
    num_clones: int = 0
    num_returned: int = 0
    refusal: str = ""
    policy: str = ""


def run_replication(rank: int, num_ranks: int) -> dict[str, ReplicationOutcome]:
    """Every case of so many ranks on this one."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    warnings.simplefilter("error", RuntimeWarning)
    torch._dynamo.config.recompile_limit = 64  # the models share their code
    sharded.flops_of = lambda ranks: 1.0  # type: ignore[attr-defined]  # so slow that help always pays
    torch.use_deterministic_algorithms(True)
    return {case.name: run_case(case, rank, num_ranks) for case in cases(num_ranks)}


def run_case(case: ReplicationCase, rank: int, num_ranks: int) -> ReplicationOutcome:
    torch.manual_seed(1)
    whole = case.build()
    reference = copy.deepcopy(whole).double()
    ours = _sharded(case, copy.deepcopy(whole), num_ranks)
    torch.manual_seed(2)
    batches = [[_batch(case, number, other, num_ranks) for number in range(case.batches)] for other in range(num_ranks)]
    everyone = [
        [torch.cat(parts) for parts in zip(*(own[number] for own in batches), strict=True)]
        for number in range(case.batches)
    ]
    expected = _step(reference, case, everyone, torch.float64)
    found = _step(ours, case, batches[rank], torch.float32)
    forget_clones(ours)
    with _counted() as counter:
        again = _step(ours, case, batches[rank], torch.float32)
    outcome = ReplicationOutcome(num_returned=counter["returned"])
    outcome.is_repeatable = all(torch.equal(again[name], value) for name, value in found.items())
    for name, value in _averaged(found, ours).items():
        outcome.errors[name] = _error(value, _own(name, expected[name], ours, batches, rank))
    (region,) = memfine_fx.report(ours).regions
    outcome.refusal = "" if region.status == "chunked" else region.reason
    outcome.policy = "" if region.plan is None else region.plan.policy
    outcome.num_clones = 0 if region.rounds is None else region.rounds.num_clones
    return outcome


def _sharded(case: ReplicationCase, model: nn.Module, num_ranks: int) -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh("cpu", (num_ranks,))
    config = memfine_fx.Config(rows_per_chunk=7, inner_backend=case.inner, memory_budget=case.budget)
    group = expert_group(mesh, slots=2)
    memfine_fx.optimize(model, inner_backend=case.inner, dynamic=True, config=config, expert_parallel=group)
    return model


def _batch(case: ReplicationCase, number: int, rank: int, num_ranks: int) -> tuple[torch.Tensor, ...]:
    tokens = 0 if number == 1 and rank == num_ranks - 1 else TOKENS + rank
    route = case.routes[number % len(case.routes)]
    return (torch.randn(tokens, HIDDEN), _index(route, tokens), torch.rand(tokens, TOP_K), torch.randn(tokens, HIDDEN))


def _index(route: str, tokens: int) -> torch.Tensor:
    if route == "random":
        return torch.rand(tokens, EXPERTS).argsort(dim=1)[:, :TOP_K].contiguous()
    first = torch.arange(TOP_K) if route == "first" else EXPERTS - 1 - torch.arange(TOP_K)
    return first.repeat(tokens, 1)


def _step(
    model: nn.Module, case: ReplicationCase, batches: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Outputs and gradients of the micro-batches, and gradients of the parameters, which are summed over them."""
    model.zero_grad()
    found: dict[str, torch.Tensor] = {}
    pending = []
    for number, (hidden, index, weight, probe) in enumerate(batches):
        hidden, weight = (one.detach().clone().to(dtype).requires_grad_() for one in (hidden, weight))
        for one in (index, weight):
            torch._dynamo.mark_static(one, 1)
        out = model(hidden, index, weight)
        found[f"output {number}"] = out.detach()
        pending.append((number, hidden, weight, (out * probe.to(dtype)).sum()))
        if not case.is_late:
            _backward(pending, found)
    _backward(pending, found)
    for name, one in model.named_parameters():
        if one.requires_grad:
            assert one.grad is not None, name
            found[f"d {name}"] = one.grad.clone()
    return found


def _backward(
    pending: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]], found: dict[str, torch.Tensor]
) -> None:
    while pending:
        number, hidden, weight, loss = pending.pop(0)
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        found[f"d hidden {number}"], found[f"d weight {number}"] = hidden.grad, weight.grad


def _own(name: str, whole: torch.Tensor, model: nn.Module, batches: Sequence[Any], rank: int) -> torch.Tensor:
    """What of the reference's tensor this rank has: its own tokens', and means over ranks of parameters' gradients."""
    kind, number = name.rsplit(" ", 1)
    if not name.startswith("d ") or kind in ("d hidden", "d weight"):
        sizes = [len(own[int(number)][0]) for own in batches]
        return whole[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
    parameter = sharded_parameters(model).get(number)
    if parameter is not None:
        return parameter.own(whole) / len(batches)
    return whole / len(batches)


def forget_clones(model: nn.Module) -> None:
    """As where a run begins, or a layer is compiled again: of the clones of the step before nothing is known."""
    call = optimized_call(model)
    assert call is not None and call.session is not None
    for lowered in call.session.lowered:
        vars(lowered.live.exchange).pop("_way", None)


def _averaged(found: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """With the group's mean of the gradients that every rank makes of its own tokens, as DDP takes it."""
    means = dict(found)
    local = {f"d {name}" for name, _ in model.named_parameters()}
    for name in sorted(local & found.keys() - {f"d {name}" for name in sharded_parameters(model)}):
        means[name] = found[name].clone()
        dist.all_reduce(means[name])
        means[name] /= dist.get_world_size()
    return means


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Gradients of clones that this rank returns."""
    give_back, pass_on, counter = Clones.give_back, Exchange.pass_on, Counter[str]()

    def counting(self: Exchange, sent: Any, received: Any) -> Any:
        counter["returned"] += len(sent)
        return pass_on(self, sent, received)

    def giving(self: Clones, *args: Any) -> None:
        with mock.patch.object(Exchange, "pass_on", counting):
            give_back(self, *args)

    with mock.patch.object(Clones, "give_back", giving):
        yield counter


def _error(value: torch.Tensor, exact: torch.Tensor) -> float:
    assert value.shape == exact.shape, f"{list(value.shape)} for {list(exact.shape)}"
    return float((value.double() - exact).norm() / exact.norm().clamp_min(1e-6))
