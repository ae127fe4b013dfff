"""What a user can do about a refusal: a hint for each kind of reason, found by the words the reason uses."""

from __future__ import annotations

__all__ = ["hint_for"]

_HINTS: tuple[tuple[str, str], ...] = (
    (
        "leave the captured graph",
        "something between the router and the experts cannot be captured: TORCH_LOGS=graph_breaks shows what; "
        "in transformers, model.set_experts_implementation('grouped_mm') is captured whole",
    ),
    (
        "no expert matmul depends on it",
        "nothing to do if this choice picks no experts (sampling, attention, lookups); if it does, a graph break hides "
        "them, and TORCH_LOGS=graph_breaks shows it",
    ),
    (
        "do not meet in one",
        "only layers that add up a token's experts are chunked; experts whose results stay apart (attention experts, a "
        "result per head) run as written",
    ),
    (
        "experts are rows of a table",
        "one vector an expert leaves no matmul to run per expert (product-key retrieval); experts that are stored flat "
        "are raised as parameters [E,in,out]",
    ),
    (
        "picks tokens",
        "nothing to do where the picked tokens meet one dense block or attention; experts that choose tokens are "
        "raised when their weights are stacked, [E,in,out], and multiplied by bmm or einsum",
    ),
    (
        "one expert for all tokens of a sequence",
        "run each expert on its own sequences, or repeat the choice for every token, [T] ids",
    ),
    (
        "captured whole",
        "an autograd.Function or checkpoint between dispatch and combine is not looked into: put it around the layer",
    ),
    ("shares its dispatch with another region", "the other region is chunked; give this one a dispatch of its own"),
    (
        "logits are returned beside the loss",
        "memfine_fx.Config(returns_logits=False) gives them up in training: the output's logits are then None",
    ),
    ("no gradients are wanted in this graph", "nothing: logits are given up in training only"),
    (
        "logits are used elsewhere",
        "what reads all logits needs all of them at once: take it out of the training step, or compute it now and then",
    ),
    ("a gradient of its own", "reduction='mean' or 'sum' lets the loss be computed chunk by chunk"),
    (
        "stops gradients",
        "gradients through a detached value cannot be recomputed in chunks: detach outside the experts",
    ),
    (
        "other gradients than autograd finds",
        "your layer runs as it was; take what changes gradients out of the experts, or report it with this line",
    ),
    ("autocast or gradient mode changes", "enter autocast or no_grad around the whole MoE layer, not inside it"),
    (
        "also used outside the region",
        "what reads the routed rows keeps all of them alive, so chunks would save nothing: read the combined output",
    ),
    ("tokens interact", "a running sum over tokens (capacity) makes chunks depend on one another"),
    ("changed in place", "write into a new tensor instead of an input of the experts"),
    ("verification failed", "a rewrite gave other numbers than your model: please report it with this line"),
    ("internal error", "your model runs as it was; please report it with this line"),
    (
        "random numbers are drawn",
        "a recomputed chunk would draw others: move dropout behind the combined output, or set it to 0 in the experts",
    ),
    ("compute different things", "experts must be the same computation with weights of their own to share one loop"),
    ("differ in shape, strides", "experts of one width and layout share one loop; these do not"),
    ("no row-wise rule", "an operation inside the experts is not known to treat rows one by one; please report it"),
    ("no known spelling of experts", "see docs/coverage.md for the spellings that are raised"),
    ("is not raised yet", "see docs/coverage.md for the spellings that are raised"),
)


def hint_for(reason: str) -> str:
    """A hint in one sentence; "" where the reason says it all."""
    return next((hint for words, hint in _HINTS if words in reason), "")
