"""How routed rows fall on experts, made to measure: counts, a choice of experts per token, and tokens that choose so.

Loads by name
    balanced      every expert the same
    zipf:A        counts in proportion to rank**-A, none above T
    one           every token chooses the same K experts: the worst that a top-k router can do
    paper:L       the hottest eight experts of layer L as MemFine printed them (`paper_counts`)

The block under test stays unmodified. Its router's weight is set to orthonormal rows, one an expert, and each
token carries the rows of its experts on top of noise: then top-k finds exactly those, in any slice of the
tokens and in bf16 too.
"""

import math
from dataclasses import dataclass

import torch

# A chosen expert's logit stands this far above the noise, whose logits have a standard deviation of one.
_CHOSEN_LOGIT = 12.0


@dataclass(frozen=True)
class PrintedLayer:
    """Tokens per expert in one layer of MemFine's run (arXiv 2511.21431, iteration 7), over 256 experts."""

    p99: int
    largest: int
    smallest: int


PAPER_EXPERTS = 256
PAPER_MEAN = 4096
PAPER_LOCAL_EXPERTS = 8  # 256 experts on 32 ranks
PAPER_LAYERS = {
    4: PrintedLayer(19352, 31702, 15),
    5: PrintedLayer(26981, 35313, 38),
    6: PrintedLayer(33391, 46104, 4),
    7: PrintedLayer(35881, 50780, 0),
    8: PrintedLayer(41529, 73130, 0),
    9: PrintedLayer(40685, 84049, 0),
    10: PrintedLayer(76459, 119728, 0),
    11: PrintedLayer(76315, 126887, 0),
    12: PrintedLayer(82480, 105174, 0),
    13: PrintedLayer(70353, 121822, 0),
    14: PrintedLayer(73427, 93234, 0),
    15: PrintedLayer(80488, 129170, 0),
}


def expert_counts(load: str, tokens: int, experts: int, top_k: int) -> list[int]:
    """Rows of each expert, hottest first; they add up to T * K and none exceeds T.

    Raises:
        ValueError: an unknown load, or one that these sizes cannot carry.
    """
    kind, _, argument = load.partition(":")
    if kind == "balanced":
        shares = [1.0] * experts
    elif kind == "zipf":
        shares = [rank ** -float(argument) for rank in range(1, experts + 1)]
    elif kind == "one":
        shares = [1.0] * top_k + [0.0] * (experts - top_k)
    elif kind == "paper":
        shares = [float(count) for count in paper_counts(int(argument))[:experts]]
    else:
        raise ValueError(f"load {load!r} is unknown; expected balanced, zipf:A, one or paper:L")
    if len(shares) != experts or top_k > experts:
        raise ValueError(f"load {load!r} cannot fill {experts} experts with top-{top_k}")
    return _fill(shares, tokens, top_k)


def choose_experts(counts: list[int], tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Expert ids [T, K], distinct in each row, with exactly these counts; tokens in random order.

    Experts are dealt one after the other over the tokens in turn, so an expert that has at most T rows never
    meets one token twice.
    """
    dealt = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    chosen = dealt.view(-1, tokens).t()
    return chosen[torch.randperm(tokens, generator=generator)].contiguous()


def router_weight(experts: int, hidden: int, generator: torch.Generator) -> torch.Tensor:
    """Orthonormal rows [E, H].

    Raises:
        ValueError: more experts than widths.
    """
    if experts > hidden:
        raise ValueError(f"a made load needs experts <= hidden, got {experts} > {hidden}")
    basis, _ = torch.linalg.qr(torch.randn(hidden, experts, generator=generator))
    return basis.t().contiguous()


def tokens_that_choose(chosen: torch.Tensor, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Tokens [T, H] whose K largest logits under `weight` are those of `chosen` [T, K]."""
    noise = torch.randn(len(chosen), weight.shape[1], generator=generator)
    for choice in chosen.unbind(1):
        noise += _CHOSEN_LOGIT * weight[choice]
    return noise


def paper_counts(layer: int) -> list[int]:
    """All 256 experts' tokens in one printed layer, hottest first.

    Printed are the largest, the 99th percentile, the smallest and (by arithmetic) the sum. Between them: a
    power law from the largest to the percentile's rank, and from there on another one whose exponent makes
    the sum right.
    """
    printed = PAPER_LAYERS[layer]
    knee = 1 + (PAPER_EXPERTS - 1) * 0.01  # the rank of the 99th percentile
    head_slope = math.log(printed.largest / printed.p99) / math.log(knee)
    head = [printed.largest * rank**-head_slope for rank in range(1, math.floor(knee) + 1)]
    ranks = range(len(head) + 1, PAPER_EXPERTS + 1)
    wanted = PAPER_EXPERTS * PAPER_MEAN - sum(head)
    low, high = 0.0, 8.0
    for _ in range(60):
        slope = (low + high) / 2
        total = sum(max(printed.smallest, printed.p99 * (rank / knee) ** -slope) for rank in ranks)
        low, high = (slope, high) if total > wanted else (low, slope)
    tail = [max(printed.smallest, printed.p99 * (rank / knee) ** -low) for rank in ranks]
    return [round(count) for count in [*head, *tail]]


def _fill(shares: list[float], tokens: int, top_k: int) -> list[int]:
    """Whole counts in proportion to the shares, capped at T each, that add up to T * K."""
    total, counts = tokens * top_k, [0] * len(shares)
    open_, left = [place for place, share in enumerate(shares) if share > 0], float(total)
    while open_:
        scale = left / sum(shares[place] for place in open_)
        capped = [place for place in open_ if shares[place] * scale > tokens]
        if not capped:
            break
        for place in capped:
            counts[place] = tokens
        open_ = [place for place in open_ if place not in capped]
        left = total - sum(counts)
    for place in open_:
        counts[place] = math.floor(shares[place] * scale)
    return _spread(counts, total - sum(counts), tokens)


def _spread(counts: list[int], missing: int, tokens: int) -> list[int]:
    """What rounding (or a cap with no expert left over) lost, one row at a time from the hottest on."""
    while missing > 0:
        for place, count in enumerate(counts):
            if missing and count < tokens:
                counts[place] += 1
                missing -= 1
    return counts
