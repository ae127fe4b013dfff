"""How uneven is the routing of a model in training, and do clones of hot experts stay from step to step? On paper.

A small Qwen3-MoE of transformers, random at first, learns bytes of the Python standard library without a loss that
balances its router. Each step's batch is that of 32 ranks, and what their tokens choose is recorded, layer by layer.
The plans of `benchmarks.measures.ep_help` are then made step after step, each told the clones of the step before, as
ranks tell each other. Rows are taken as many times as a rank of DeepSeek-V3 has more tokens, and seconds are of its
sizes by the same cost model. Nothing is sent.
"""

import statistics
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.measures import Answer
from benchmarks.measures.ep_help import POLICIES, SLOTS, costs_of, within_capacity
from benchmarks.measures.ep_scale import Model
from benchmarks.summaries import markdown
from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.replication import no_replication
from memfine_fx.expert_parallel.replication_costs import choose_replication

__all__ = ["Followed", "follow", "measure", "record_routing"]

RANKS = (8, 32)
TOKENS, SEQUENCE, EXPERTS, TOP_K, LAYERS = 512, 256, 64, 8, 3
_FIRST_STEPS = 20
_HEADER = (
    "layer | ranks | steps | busiest over mean | with help | at most | one shot | capacity drops | clones | "
    "clones stayed | time of no help"
)


@dataclass(frozen=True)
class Followed:
    """One step of one layer on so many ranks.

    Args:
        alone, replicated, one_shot: rows of the busiest rank over the mean.
        dropped: part of the rows that capacity 1.25 drops.
        clones: in all.
        stayed: whether every clone was there in the step before.
        seconds, seconds_alone: by the cost model.
    """

    alone: float
    replicated: float
    one_shot: float
    dropped: float
    clones: int
    stayed: bool
    seconds: float
    seconds_alone: float


def measure(steps: int = 200) -> Answer:
    counts = record_routing(steps)
    bounds = sorted({0, min(_FIRST_STEPS, steps), max(_FIRST_STEPS, steps // 2), steps})
    lines = []
    for layer in range(counts.shape[1]):
        for ranks in RANKS:
            found = list(follow(counts[:, layer], ranks))
            lines += [_cells(layer, ranks, first, found[first:last]) for first, last in pairwise(bounds)]
    return Answer([markdown(_HEADER, lines)])


def record_routing(steps: int) -> torch.Tensor:
    """[steps,layers,32,E]: rows of each expert from each of 32 ranks."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    model = transformers.Qwen3MoeForCausalLM(config).train()
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, result: chosen.append(_choices(result)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    record = torch.zeros(steps, LAYERS, RANKS[-1], EXPERTS, dtype=torch.int64)
    for step, tokens in enumerate(islice(_batches(), steps)):
        chosen.clear()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for layer, index in enumerate(chosen):
            by_rank = index.view(RANKS[-1], -1)
            record[step, layer].scatter_add_(1, by_rank, torch.ones_like(by_rank))
    return record


def _choices(result: Any) -> torch.Tensor:
    """[T,K] expert ids in what a router returns."""
    index: torch.Tensor = next(one for one in result if not one.is_floating_point())
    return index.detach().to(torch.int64)


def _batches() -> Iterator[torch.Tensor]:
    """[B,S] bytes of one module of the standard library after the other, again and again."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    size = RANKS[-1] * TOKENS
    sequences = data[: len(data) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(len(sequences), generator=generator)
        for some in order[: len(order) // (size // SEQUENCE) * (size // SEQUENCE)].view(-1, size // SEQUENCE):
            yield sequences[some].to(torch.int64)


def follow(record: torch.Tensor, ranks: int) -> Iterator[Followed]:
    """The steps of one layer's record [steps,32,E], in order."""
    model = Model()
    costs, placement = costs_of(model), Placement(record.shape[2], ranks)
    times = model.tokens * ranks // (TOKENS * RANKS[-1])
    before: list[tuple[int, int]] = []
    for whole in record:
        counts = whole.view(ranks, -1, record.shape[2]).sum(dim=1) * max(1, times)
        mean = int(counts.sum()) / ranks
        alone, plan = no_replication(counts, placement), choose_replication(counts, placement, costs, SLOTS, before)
        pairs = [(clone.expert, clone.rank) for clone in plan.clones]
        yield Followed(
            alone.busiest / mean,
            plan.busiest / mean,
            POLICIES["one shot"](counts, placement, costs).busiest / mean,
            1 - int(within_capacity(counts).sum()) / int(counts.sum()),
            len(pairs),
            set(pairs) <= set(before),
            costs.seconds(counts, placement, plan),
            costs.seconds(counts, placement, alone),
        )
        before = sorted(pairs, key=lambda pair: pair[1])


def _cells(layer: int, ranks: int, first: int, found: Sequence[Followed]) -> list[str]:
    mean = {name: statistics.mean(getattr(one, name) for one in found) for name in Followed.__dataclass_fields__}
    return [
        str(layer),
        str(ranks),
        f"{first + 1} to {first + len(found)}",
        f"{mean['alone']:.2f}",
        f"{mean['replicated']:.2f}",
        f"{max(one.replicated for one in found):.2f}",
        f"{mean['one_shot']:.2f}",
        f"{mean['dropped']:.1%}",
        f"{mean['clones']:.1f}",
        f"{mean['stayed']:.0%}",
        f"{mean['seconds'] / mean['seconds_alone']:.2f}",
    ]
