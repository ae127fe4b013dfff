"""How routed rows fall on experts, made to measure: counts, a choice of experts per token, and tokens that choose so.

Loads by name
    balanced      every expert the same
    zipf:A        counts in proportion to rank**-A, none above T
    one           every token chooses the same K experts: the worst that a top-k router can do
    paper:L       the hottest experts of layer L in MemFine's run (memfine_fx.memory.published)

The block under test stays unmodified. Its router's weight is set to orthonormal rows, one an expert, and each
token carries the rows of its experts on top of noise: then top-k finds exactly those, in any slice of the
tokens and in bf16 too.
"""

import math

import torch

from memfine_fx.memory.published import IMBALANCE, expert_loads

# A chosen expert's logit stands this far above the noise, whose logits have a standard deviation of one.
_CHOSEN_LOGIT = 12.0


PRINTED = {imbalance.layer: imbalance for imbalance in IMBALANCE}


def expert_counts(load: str, tokens: int, experts: int, top_k: int) -> list[int]:
    """Rows of each expert, hottest first; they add up to T * K and none exceeds T.

    Raises:
        ValueError: an unknown load, or one that these sizes cannot carry.
    """
    shares = shares_of(load, experts, top_k)
    if len(shares) != experts or top_k > experts:
        raise ValueError(f"load {load!r} cannot fill {experts} experts with top-{top_k}")
    return _fill(shares, tokens, top_k)


def shares_of(load: str, experts: int, top_k: int) -> list[float]:
    """What each expert has of the rows, hottest first, in any unit and not capped; of paper:L at most those printed.

    Raises:
        ValueError: an unknown load.
    """
    kind, _, argument = load.partition(":")
    if kind == "balanced":
        return [1.0] * experts
    if kind == "zipf":
        return [rank ** -float(argument) for rank in range(1, experts + 1)]
    if kind == "one":
        return [1.0] * top_k + [0.0] * (experts - top_k)
    if kind == "paper":
        return expert_loads(PRINTED[int(argument)])[:experts]
    raise ValueError(f"load {load!r} is unknown; expected balanced, zipf:A, one or paper:L")


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
